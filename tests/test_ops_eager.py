"""Every OpInfo through forge.jit on the torch executor: the results are observably those of eager.

This covers memory shared among results and inputs, with offsets; strides; changed inputs; and whether results require a
gradient, are leaves, or are inference tensors. If no gradient is recorded, values are bitwise equal to eager's, because
torch's own function runs. One sample per op runs by default, in some modes of some ops, all under `slow`; `pytest
tests/test_ops_eager.py --op split` runs everything about one op.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support import (
    assert_same,
    chosen_opinfos,
    copy_of,
    directive_marks,
    gives_unspecified_values,
    main_dtype,
    samples,
    tensors_in,
)
from test_ops import Inputs, changed_inputs, differentiable_inputs

import forge
from forge.api.functional import Direct
from forge.capture.handles import handle_of
from forge.testing import OpInfo, Sample
from tests.seeding import seed

MODES: dict[str, Callable] = {
    "plain": nullcontext,  # no input requires a gradient
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "dynamic": nullcontext,  # as grad, with symbolic shapes
}
EVERY = 16  # of the modes but grad, one op in so many runs by default

NOT_CAPTURED = (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError, torch._dynamo.exc.TorchRuntimeError)


def _instances(config: pytest.Config) -> Iterator[Any]:
    infos = chosen_opinfos(config)
    for position, info in enumerate(infos):
        for turn, mode in enumerate(MODES):
            usual = mode == "grad" or (position + turn) % EVERY == 0
            for every in (False, True):
                slow = [pytest.mark.slow] if every or not usual else []
                test = f"test_a_caller_sees_eagers[{mode}]"
                marks = [*directive_marks(info, test, "torch", "cpu", main_dtype(info)), *slow]
                yield pytest.param(
                    info, mode, every, marks=marks, id=f"{info.name}-{mode}-{'every sample' if every else 'one sample'}"
                )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "every" in metafunc.fixturenames:
        metafunc.parametrize("info,mode,every", list(_instances(metafunc.config)))


@pytest.mark.one_in(4)
def test_a_caller_sees_eagers(info: OpInfo, mode: str, every: bool) -> None:
    """Aliasing, strides, mutation, autograd's flags; if no gradient is recorded, bitwise equal values."""
    found = list(samples(info, "cpu", main_dtype(info)))
    try:
        for sample in found if every else found[:1]:
            _check(info, sample, mode)
    finally:
        torch._dynamo.reset()


def _check(info: OpInfo, sample: Sample, mode: str) -> None:
    changed = changed_inputs(info, sample)
    wanted = [] if mode == "plain" else differentiable_inputs(info, sample, changed)
    eager = _Seen(info.reference or info.op, sample, mode, wanted, changed)
    ours = _Seen(_compiled(info, sample, mode, wanted, changed), sample, mode, wanted, changed)
    assert ours.flags == eager.flags
    assert ours.memory == eager.memory, "which memory results show"
    assert ours.strides == eager.strides
    assert ours.versions == eager.versions, "which inputs were changed, and how often"
    if gives_unspecified_values(forge.trace(info.op, *copy_of(sample).args, **copy_of(sample).kwargs)):
        return
    assert_same(ours.inputs, eager.inputs)
    assert_same(ours.results, eager.results)
    if not wanted or mode in ("no_grad", "inference"):
        _assert_bitwise(ours, eager)


class _Seen:
    """A caller's view of one call."""

    def __init__(self, function: Callable, sample: Sample, mode: str, wanted: list[int], changed: list[int]) -> None:
        fresh = _given(sample, mode, wanted, changed)
        self.inputs = tensors_in((fresh.args, fresh.kwargs))
        before = [tensor._version for tensor in self.inputs]
        seed(1)
        with MODES[mode]():
            self.results = function(*fresh.args, **fresh.kwargs)
        outputs = tensors_in(self.results)
        self.versions = [tensor._version - version for tensor, version in zip(self.inputs, before, strict=True)]
        self.strides = [tensor.stride() for tensor in outputs]
        self.memory = _memory(self.inputs, outputs)
        self.flags = [
            {
                "requires_grad": tensor.requires_grad,
                "is_leaf": tensor.is_leaf,
                "is_inference": tensor.is_inference(),
                "is_conj": tensor.is_conj(),
                "is_neg": tensor.is_neg(),
            }
            for tensor in (*outputs, *self.inputs)
        ]


def _given(sample: Sample, mode: str, wanted: list[int], changed: list[int]) -> Sample:
    """Return a copy of the sample whose tensors at these positions require a gradient."""
    if mode in ("grad", "dynamic"):
        return Inputs(sample, wanted, changed).sample
    fresh = copy_of(sample)
    tensors = tensors_in((fresh.args, fresh.kwargs))
    for position in wanted:
        tensors[position].requires_grad_()
    return fresh


def _memory(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> list[tuple[int, int, int]]:
    """Return, for each output, the first tensor, inputs before outputs, that is the same object, the first that lies in
    the same memory, and the offset from it."""
    every = [*inputs, *outputs]
    found = []
    for output in outputs:
        same = next(i for i, tensor in enumerate(every) if tensor is output)
        place = next(i for i, tensor in enumerate(every) if _place(tensor) == _place(output))
        found.append((same, place, output.storage_offset() - every[place].storage_offset()))
    return found


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _compiled(info: OpInfo, sample: Sample, mode: str, wanted: list[int], changed: list[int]) -> Callable:
    """Return the op through forge.jit as one graph without eager parts; if Dynamo refuses it, traced directly."""
    jitted = forge.jit(info.op, executors=["torch"], strict=True, fullgraph=True, dynamic=mode == "dynamic")
    fresh = _given(sample, mode, wanted, changed)
    seed(1)
    try:
        with MODES[mode]():
            jitted(*fresh.args, **fresh.kwargs)
    except Exception as error:
        tolerated = mode == "dynamic" and isinstance(error, (*NOT_CAPTURED, forge.StrictError))
        if not tolerated and not _refused_by_dynamo(info, sample, dynamic=mode == "dynamic"):
            raise
        return Direct(info.op, executors=["torch"])
    assert not handle_of(jitted).eager, "forge.jit ran it in eager"
    return jitted


def _refused_by_dynamo(info: OpInfo, sample: Sample, *, dynamic: bool) -> bool:
    """Return whether Dynamo alone, with a backend that compiles nothing, refuses the call."""
    fresh = copy_of(sample)
    try:
        torch.compile(info.op, backend="eager", fullgraph=True, dynamic=dynamic)(*fresh.args, **fresh.kwargs)
    except NOT_CAPTURED:
        return True
    return False


def _assert_bitwise(ours: _Seen, eager: _Seen) -> None:
    theirs = [*tensors_in(eager.results), *eager.inputs]
    for one, other in zip([*tensors_in(ours.results), *ours.inputs], theirs, strict=True):
        if not one.is_meta:
            torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=0, equal_nan=True)
