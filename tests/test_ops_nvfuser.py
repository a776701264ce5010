"""Every OpInfo through nvFuser's executor: with the double of the library on a CPU, with the library if it is
installed.

The op stands between pointwise calls, and regions of single calls are made, too: results and gradients are those of
torch's own functions, and so are strides if no gradient decomposes a call. One sample of each op runs by default in its
main dtype, one op in `EVERY` with symbolic sizes; all samples, float16 and bfloat16 under `slow`:
`pytest tests/test_ops_nvfuser.py --op exp2` runs everything about one op.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from nvfuser_executors import AVAILABLE, executor_of
from support import (
    around,
    assert_same,
    assert_same_flow,
    chosen_opinfos,
    copy_of,
    directive_marks,
    gives_unspecified_values,
    samples,
    short,
    tensors_in,
)
from test_ops import changed_inputs, differentiable_inputs, flow_of

import forge
from forge.api.functional import Direct
from forge.executors.nvfuserex import nvfuserex
from forge.testing import OpInfo, Sample
from tests.seeding import seed

EVERY = 45
FEW = 2  # samples that are captured
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# torch's CPU kernels lay these out differently from its kernels for fake tensors, which determine the known strides
LAID_OUT_OTHERWISE = ("nn.functional.logsigmoid", "nn.functional.batch_norm")

# a rounding of each call of a decomposition, where torch's kernel rounds once
WITHIN = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (5e-2, 5e-2), torch.float16: (1e-2, 1e-2)}


def _instances(config: pytest.Config, every: int) -> Iterator[Any]:
    for position, info in enumerate(chosen_opinfos(config)):
        dtypes = [dtype for dtype in DTYPES if dtype in info.dtypes] or list(info.dtypes)[:1]
        for turn, dtype in enumerate(dtypes):
            for name, device in AVAILABLE.items():
                usual = turn == 0 and position % every == 0 and device == "cpu"
                slow = [] if usual else [pytest.mark.slow]
                marks = [*directive_marks(info, "test_fused", "torch", device, dtype), *slow]
                yield pytest.param(
                    info, name, device, dtype, marks=marks, id=f"{info.name}-{name}-{device}-{short(dtype)}"
                )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "info" in metafunc.fixturenames:
        every = EVERY if metafunc.function is test_symbolic_lengths else 1
        metafunc.parametrize("info,name,device,dtype", list(_instances(metafunc.config, every)))


@pytest.mark.skipif("nvfuser" not in AVAILABLE, reason=getattr(nvfuserex.is_available(), "reason", ""))
def test_the_library_is_tested_where_it_loads() -> None:
    assert AVAILABLE["nvfuser"] == "cuda"


@pytest.mark.parametrize("every", [pytest.param(False, id="one"), pytest.param(True, id="all", marks=pytest.mark.slow)])
@pytest.mark.one_in(6)
def test_fused(info: OpInfo, name: str, device: str, dtype: torch.dtype, every: bool) -> None:
    """Outputs and gradients are those of the torch executor; strides, too, without gradients, which decompose calls."""
    op = around(info.op)
    for sample in _chosen(info, device, dtype, every):
        changed = changed_inputs(info, sample)
        wanted = differentiable_inputs(info, sample, changed)
        if _is_unspecified(info, sample):
            continue
        results = [_results(Direct(op, executors=each), sample) for each in ([executor_of(name), "torch"], ["torch"])]
        assert_same(*results, within=WITHIN.get(dtype), stride=info.name not in LAID_OUT_OTHERWISE)
        expected = flow_of(Direct(op, executors=["torch"]), sample, wanted, changed)
        actual = flow_of(Direct(op, executors=[executor_of(name), "torch"]), sample, wanted, changed)
        assert_same_flow(actual, expected, within=WITHIN.get(dtype))


def _results(function: Callable, sample: Sample) -> Any:
    ours = copy_of(sample)
    seed(1)
    return function(*ours.args, **ours.kwargs)


def _is_unspecified(info: OpInfo, sample: Sample) -> bool:
    trace = Direct(info.op, executors=["torch"]).compile(sample.args, sample.kwargs)[1].traces[0]
    return gives_unspecified_values(trace)


def _chosen(info: OpInfo, device: str, dtype: torch.dtype, every: bool) -> list[Sample]:
    found = list(samples(info, device, dtype))
    full = [sample for sample in found if all(x.numel() for x in tensors_in((sample.args, sample.kwargs)))]
    return found if every else (full or found)[:1]


def test_symbolic_lengths(info: OpInfo, name: str, device: str, dtype: torch.dtype) -> None:
    """Samples that run one after another through one function, compiled for any length, have eager's results."""
    op = around(info.op)
    jitted = forge.jit(op, executors=[executor_of(name), "torch"], dynamic=True)
    torch._dynamo.reset()
    for sample in _chosen(info, device, dtype, every=True)[:FEW]:
        changed = changed_inputs(info, sample)
        wanted = differentiable_inputs(info, sample, changed)
        if _is_unspecified(info, sample):
            continue
        expected = flow_of(op, sample, wanted, changed)
        actual = flow_of(jitted, sample, wanted, changed)
        assert_same(actual.outputs, expected.outputs, within=WITHIN.get(dtype))
        for one, other in zip(actual.gradients, expected.gradients, strict=True):
            if one is not None and other is not None:
                assert_same(one, other, within=WITHIN.get(dtype))
