"""Every OpInfo: an argument or a result that torch's own backward does not read may change before the backward.

If torch reads it, its change is an error in torch; forge raises it, too, or computes the gradient of the forward's
values. One op in `EVERY` runs by default, all under `slow`; `pytest tests/test_ops_saved.py --op div` runs one.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import chosen_opinfos, main_dtype, samples, tensors_in
from torch.utils import _pytree

from forge.api.functional import Direct
from forge.testing import OpInfo, Sample
from tests.seeding import seed

EVERY = 20
COUNT = 3  # samples of an op
TENSORS = 8  # of a sample's arguments and results

_KERNEL = "eager runs another kernel here, which saves something else"
_BIAS = "the backward is given the bias, for its dtype"
_PARTS = "eager differentiates the parts that torch makes of it, and saves what is inside of them"
READ_MORE = {
    "nn.functional.scaled_dot_product_attention.dropout": _KERNEL,
    "nn.functional.scaled_dot_product_attention.hidden_row": _KERNEL,
    "pdist": "eager saves nothing of no rows",
    "aten._native_batch_norm_legit.no_stats": _BIAS,
    "nn.functional.group_norm": _BIAS,
    "group_norm": _BIAS,
    "nn.functional.batch_norm": _BIAS,
    "nn.functional.batch_norm.train": _BIAS,
    "nn.functional.batch_norm.statistics": _BIAS,
    "batch_norm": _BIAS,
    "kron": _PARTS,
    "special.ndtr": _PARTS,
    "nn.functional.instance_norm.statistics": _PARTS,
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen, one = chosen_opinfos(metafunc.config), bool(metafunc.config.getoption("--op"))
    marks = [[] if one or place % EVERY == 0 else [pytest.mark.slow] for place in range(len(chosen))]
    for info, its in zip(chosen, marks, strict=True):
        if info.name in READ_MORE:
            its.append(pytest.mark.xfail(reason=READ_MORE[info.name], strict=True))
    metafunc.parametrize(
        "info", [pytest.param(info, marks=m, id=info.name) for info, m in zip(chosen, marks, strict=True)]
    )


def test_what_torch_does_not_save_may_change(info: OpInfo) -> None:
    for sample in list(samples(info, "cpu", main_dtype(info)))[:COUNT]:
        ours = Direct(info.op, executors=["torch"])
        for place in _places(info.op, sample):
            expected = _gradients(info.op, sample, place)
            if expected is None:
                continue
            torch.testing.assert_close(_gradients(ours, sample, place), expected, equal_nan=True, rtol=1e-3, atol=1e-4)


def _places(function: Callable, sample: Sample) -> Iterator[int]:
    """Yield the tensors of a call that has gradients."""
    try:
        inputs, results = _called(function, sample)
    except Exception:  # it refuses arguments that require a gradient
        return
    if any(each.requires_grad for each in results):
        yield from range(min(TENSORS, len(inputs) + len(results)))


def _called(function: Callable, sample: Sample) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    seed(0)
    args, kwargs = _pytree.tree_map_only(torch.Tensor, _leaf, (sample.args, sample.kwargs))
    return tensors_in((args, kwargs)), tensors_in(function(*args, **kwargs))


def _leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_(x.is_floating_point() or x.is_complex())


def _gradients(function: Callable, sample: Sample, place: int) -> tuple[Any, ...] | None:
    """Return the arguments' gradients, with one tensor of the call zeroed before the backward; None if torch refuses
    that."""
    inputs, results = _called(function, sample)
    flowing = [each for each in results if each.requires_grad]  # summed, because the backward of a sum reads nothing
    total = sum(x.sum(dtype=torch.complex64).real if x.is_complex() else x.sum() for x in flowing)
    try:
        [*inputs, *results][place].detach().zero_()
        return torch.autograd.grad(total, [x for x in inputs if x.requires_grad], allow_unused=True)
    except RuntimeError:
        return None
