"""Complex numbers: which operations take them, and that those which torch refuses are refused.

What an operation that takes them gives, and its gradient, is tested with the other dtypes in test_ops.py; here real
operands meet complex ones, and forge's own functions that tell the two apart are tested.
"""

import pytest
import torch
from support import all_samples, map_tensors, refusal, tensors_in
from test_ops import NOT_IMPLEMENTED, _assert_same_flow, _changed_inputs, _differentiable_inputs, _flow

import forge
from forge.functional import Direct
from forge.testing import OpInfo, Sample, all_opinfos

NAMES = [info.name for info in all_opinfos()]


def _differentiates(info: OpInfo, sample: Sample) -> bool:
    changed = _changed_inputs(info, sample)
    flow = _flow(info.reference or info.op, sample, _differentiable_inputs(info, sample, changed), changed)
    return any(flow.requires_grad) and flow.refused is None


@pytest.mark.parametrize("info", all_opinfos(), ids=NAMES)
def test_an_op_takes_complex64_where_torch_does(info: OpInfo) -> None:
    """Where torch differentiates a sample, or runs them all and has no gradient; what torch refuses forge refuses."""
    try:
        found = all_samples(info, "cpu", torch.complex64)
    except RuntimeError as reason:
        pytest.skip(f"torch makes no samples: {reason}")
    refusals = [refusal(info, sample) for sample in found]
    taken = [
        sample
        for sample, refused in zip(found, refusals, strict=True)
        if refused is None and all(tensor.numel() for tensor in tensors_in((sample.args, sample.kwargs)))
    ]
    if info.gradient:
        wanted = any(_differentiates(info, sample) for sample in taken)
    else:
        wanted = not any(refusals)
    assert (torch.complex64 in info.dtypes) == wanted, "forge/testing/opinfos/complex.py says otherwise"
    for sample, refused in zip(found, refusals, strict=True):
        if refused is not None:
            with pytest.raises(type(refused)):
                Direct(info.op)(*sample.args, **sample.kwargs)
                pytest.fail(f"forge accepts {sample}", pytrace=False)


MIXED = [info for info in all_opinfos() if info.gradient and torch.complex64 in info.dtypes]


@pytest.mark.parametrize("executor", ["torch", "torch-prims"])
@pytest.mark.parametrize("info", MIXED, ids=[info.name for info in MIXED])
def test_a_real_operand_among_complex_ones(info: OpInfo, executor: str) -> None:
    """Each operand of the first sample made real in turn: eager's values and gradients, real ones of the real operand."""
    for sample in all_samples(info, "cpu", torch.complex128)[:1]:
        count = sum(tensor.is_complex() for tensor in tensors_in((sample.args, sample.kwargs)))
        for position in range(count if count > 1 else 0):
            _check_mixed(info, _with_real(sample, position), executor)


def _with_real(sample: Sample, position: int) -> Sample:
    """The sample with the real part of one of its complex tensors."""
    remaining = iter(range(100))

    def choose(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.real.clone() if tensor.is_complex() and next(remaining) == position else tensor

    args, kwargs = map_tensors(choose, (sample.args, sample.kwargs))
    return Sample(args, kwargs)


def _check_mixed(info: OpInfo, sample: Sample, executor: str) -> None:
    refused = refusal(info, sample)
    if refused is not None:
        with pytest.raises(type(refused)):
            Direct(info.op, executors=[executor])(*sample.args, **sample.kwargs)
        return
    changed = _changed_inputs(info, sample)
    wanted = _differentiable_inputs(info, sample, changed)
    try:
        eager = _flow(info.reference or info.op, sample, wanted, changed)
    except RuntimeError:  # torch.addr's backward multiplies operands of two dtypes
        return
    if eager.refused is None:
        _assert_same_flow(_flow(Direct(info.op, executors=[executor]), sample, wanted, changed), eager, None)
