"""Every OpInfo with Inductor's regions around it: results, gradients and strides are those of torch's own functions.

The op stands between pointwise calls, so that its own calls may be in a region with them, forward and backward. One op
in `EVERY` runs by default in its main dtype, all in float32, bfloat16 and float64 under `slow`:
`pytest tests/test_ops_fused.py --op softmax` runs everything about one op.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import (
    DEVICES,
    assert_same,
    chosen_opinfos,
    gives_unspecified_values,
    samples,
    short,
    tensors_in,
)
from test_ops import changed_inputs, differentiable_inputs, flow_of
from torch.utils import _pytree

from forge.executors.inductorex import InductorExecutor
from forge.functional import Direct
from forge.ir import TensorProxy
from forge.testing import OpInfo, Sample

EVERY = 40
COUNT = 2  # samples of an op that are compiled
DTYPES = (torch.float32, torch.bfloat16, torch.float64)

# what one rounding of a result is, and what sums of rounded terms come to
WITHIN = {torch.float32: (1e-4, 1e-4), torch.float64: (1e-7, 1e-7), torch.bfloat16: (5e-2, 5e-2)}


class Always(InductorExecutor):
    """Makes regions of single calls, too."""

    def pays(self, calls: list[Any]) -> bool:
        return True


FUSER = Always("inductor")


def _instances(config: pytest.Config) -> Iterator[Any]:
    for position, info in enumerate(chosen_opinfos(config)):
        dtypes = [dtype for dtype in DTYPES if dtype in info.dtypes] or list(info.dtypes)[:1]
        for turn, dtype in enumerate(dtypes):
            for device in DEVICES:
                usual = turn == 0 and position % EVERY == 0 and device == "cpu"
                marks = [] if usual else [pytest.mark.slow]
                yield pytest.param(info, device, dtype, marks=marks, id=f"{info.name}-inductor-{device}-{short(dtype)}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "info" in metafunc.fixturenames:
        metafunc.parametrize("info,device,dtype", list(_instances(metafunc.config)))


def _around(op: Callable) -> Callable:
    """The op between pointwise calls that change neither dtype nor range much."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return _pytree.tree_map(_scaled, op(*args, **kwargs))

    return call


def _scaled(x: Any) -> Any:
    return x * 2 if isinstance(x, (torch.Tensor, TensorProxy)) and x.is_floating_point() else x


def test_fused(info: OpInfo, device: str, dtype: torch.dtype) -> None:
    """Outputs and gradients of the torch executor; strides, too."""
    op = _around(info.op)
    for sample in _few(info, device, dtype):
        changed = changed_inputs(info, sample)
        wanted = differentiable_inputs(info, sample, changed)
        if gives_unspecified_values(Direct(info.op, executors=["torch"]).compile(sample.args, sample.kwargs).traces[0]):
            continue
        expected = flow_of(Direct(op, executors=["torch"]), sample, wanted, changed)
        actual = flow_of(Direct(op, executors=[FUSER, "torch"]), sample, wanted, changed)
        within = WITHIN.get(dtype)
        assert_same(actual.outputs, expected.outputs, within=within, stride=True)
        assert actual.refused == expected.refused
        for one, other in zip(actual.gradients, expected.gradients, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert_same(one, other, within=within)


def _few(info: OpInfo, device: str, dtype: torch.dtype) -> list[Sample]:
    found = list(samples(info, device, dtype))
    full = [sample for sample in found if all(x.numel() for x in tensors_in((sample.args, sample.kwargs)))]
    return (full or found)[:COUNT]
