"""Every OpInfo with regions around it: results, gradients and strides are those of torch's own functions.

The op stands between pointwise calls, so that its own calls may be in a region with them, forward and backward. One op
in `EVERY_CHECKED` runs in its main dtype with regions that torch runs and checks (check="regions"), one in `EVERY`, of
one sample, with Inductor's kernels, and all in float32, bfloat16 and float64 under `slow`: `pytest
tests/test_ops_fused.py --op softmax` runs everything about one op.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import (
    DEVICES,
    around,
    assert_same_flow,
    chosen_opinfos,
    directive_marks,
    gives_unspecified_values,
    samples,
    short,
    tensors_in,
)
from test_ops import changed_inputs, differentiable_inputs, flow_of

from forge.api.functional import Direct
from forge.executors.inductorex import InductorExecutor
from forge.testing import OpInfo, Sample

EVERY, EVERY_CHECKED = 6, 5
RECURRENT = "torch's fake tensors have other strides than its recurrent kernels"
_RECURRENT = frozenset({"gru", "lstm", "rnn_relu", "rnn_tanh"})
COUNT = 2  # samples of an op
DTYPES = (torch.float32, torch.bfloat16, torch.float64)

# tolerances of one rounding of a result, and of sums of rounded terms
SCALED = ("forge.linear_int8", "forge.linear_fp8", "forge.linear_int4")  # by scales of float32
WITHIN = {torch.float32: (1e-4, 1e-4), torch.float64: (1e-7, 1e-7), torch.bfloat16: (5e-2, 5e-2)}


class Always(InductorExecutor):
    """An executor that makes regions of single calls, too."""

    def is_profitable(self, calls: list[Any]) -> bool:
        return True


FUSER = Always("inductor")


def _instances(config: pytest.Config, *, compiled: bool) -> Iterator[Any]:
    for position, info in enumerate(chosen_opinfos(config)):
        dtypes = [dtype for dtype in DTYPES if dtype in info.dtypes] or list(info.dtypes)[:1]
        for turn, dtype in enumerate(dtypes):
            for device in DEVICES:
                usual = turn == 0 and position % (EVERY if compiled else EVERY_CHECKED) == 0 and device == "cpu"
                slow = [] if usual else [pytest.mark.slow]
                fails = info.name in _RECURRENT and not (compiled and usual)  # the first sample does not
                recurrent = [pytest.mark.xfail(strict=True, reason=RECURRENT)] if fails else []
                marks = [*recurrent, *directive_marks(info, "test_fused", "torch", device, dtype), *slow]
                yield pytest.param(info, device, dtype, marks=marks, id=f"{info.name}-inductor-{device}-{short(dtype)}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "info" in metafunc.fixturenames:
        compiled = metafunc.function is test_fused
        metafunc.parametrize("info,device,dtype", list(_instances(metafunc.config, compiled=compiled)))


@pytest.mark.usefixtures("compiled_regions")
@pytest.mark.one_in(2)
def test_fused(info: OpInfo, device: str, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    """Outputs, strides and gradients are those of the torch executor."""
    slow = request.node.get_closest_marker("slow") is not None
    _compare(info, device, dtype, FUSER, COUNT if slow else 1)


def test_checked(info: OpInfo, device: str, dtype: torch.dtype) -> None:
    """The same holds for regions that torch's operators run, with checked assumptions."""
    _compare(info, device, dtype, FUSER.with_region_checks())


def _compare(info: OpInfo, device: str, dtype: torch.dtype, fuser: InductorExecutor, count: int = COUNT) -> None:
    op = around(info.op)
    for sample in _few(info, device, dtype, count):
        changed = changed_inputs(info, sample)
        wanted = differentiable_inputs(info, sample, changed)
        if gives_unspecified_values(
            Direct(info.op, executors=["torch"]).compile(sample.args, sample.kwargs)[1].traces[0]
        ):
            continue
        expected = flow_of(Direct(op, executors=["torch"]), sample, wanted, changed)
        actual = flow_of(Direct(op, executors=[fuser, "torch"]), sample, wanted, changed)
        within = WITHIN.get(dtype)
        if info.name in SCALED and dtype == torch.float64:
            within = (1e-6, 1e-6)  # gradients of their scales are sums rounded to float32
        assert_same_flow(actual, expected, within=within, stride=True)


def _few(info: OpInfo, device: str, dtype: torch.dtype, count: int) -> list[Sample]:
    found = list(samples(info, device, dtype))
    full = [sample for sample in found if all(x.numel() for x in tensors_in((sample.args, sample.kwargs)))]
    return (full or found)[:count]
