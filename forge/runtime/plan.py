"""The parts of a compiled program's call, generated functions and plain data, and their assembly.

A program that was compiled in this process and one that was read from the disk (forge/cache) are put together alike.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from forge import prims
from forge.executors.contracts import expect
from forge.executors.torchex.attention import as_chosen_now
from forge.ir import Trace
from forge.ir.strides import is_expanded
from forge.runtime.autograd import Backward, DifferentiableBackward, DifferentiableCall, LazyBackward, Sources
from forge.runtime.frozen import FoldedWeights
from forge.torchlang import autocast_mode, grad_mode


class GeneratedFunction(NamedTuple):
    """A generated function and the trace that it was printed from; None for one that was read from the disk. read: as
    of a Backward."""

    function: Callable
    trace: Trace | None = None
    read: Collection[int] | None = None

    @property
    def backward(self) -> Backward:
        return Backward(self.function, self.read)


class Backwards(Protocol):
    """Compiles the backwards of a program, each when it is first needed (forge/compiler/backwards.py)."""

    def compile(self, present: tuple, *, batched: bool = False) -> GeneratedFunction:
        """Return the backward of the outputs that are `present`; `batched`: by torch's own functions alone."""

    def compile_differentiable(self, key: tuple) -> DifferentiableBackward:
        """Return the backward, as a differentiable program, of (outputs, those of their gradients that have a history,
        whether it is by torch's own functions alone, the gradients of opaque calls that are None)."""

    def numbers(self) -> Sequence[Any]:
        """Return the symbolic inputs of the program."""


class TrainingPlan(NamedTuple):
    """The parts of a program through which gradients flow, beside its forward.

    backward: that of the `usual` outputs, by position. epilogue: what runs outside of the autograd.Function.
    constants: the positions of outputs without a gradient. split: the forward with what it saves, before it was
    claimed; None for a plan that was read from disk. buckets: the positions of the inputs whose gradients leave the
    backward together, in order; where there are some, each backward is a generator.
    """

    backward: GeneratedFunction
    usual: tuple[bool, ...]
    epilogue: GeneratedFunction | None
    constants: list[int]
    sources: Sources
    backwards: Backwards
    split: Trace | None = None
    buckets: Sequence[Sequence[int]] = ()


class CompiledPlan(NamedTuple):
    """What a program's call is made of. grad: whether grad is enabled where it is called. sets_mode: whether what runs
    outside of the autograd.Function sets the grad mode. attends: whether it has code for the kernel of attention that
    torch chose when it was compiled. folded: what the forward takes beside its inputs, where weights are frozen."""

    forward: GeneratedFunction
    grad: bool
    sets_mode: bool
    training: TrainingPlan | None = None
    attends: bool = False
    folded_weights: FoldedWeights | None = None


def assemble(plan: CompiledPlan, otherwise: Callable | None = None) -> Callable:
    """Return what runs: call(*inputs). otherwise: the same program, where torch might choose another kernel of
    attention."""
    training = plan.training
    for generated in (plan.forward, training and training.backward):
        if generated is not None and generated.trace is not None:
            expect(generated.function, generated.trace)
    call = plan.forward.function if training is None else _differentiable(plan.forward.function, plan, training)
    call = call if plan.folded_weights is None else plan.folded_weights.wrap(call)
    call = grad_mode.restored(call, plan.grad) if plan.sets_mode else call
    return as_chosen_now(call, otherwise) if plan.attends and otherwise is not None else call


def _differentiable(forward: Callable, plan: CompiledPlan, training: TrainingPlan) -> Callable:
    ready, backwards = {training.usual: training.backward.backward}, training.backwards
    region = DifferentiableCall(
        forward,
        training.constants,
        training.sources,
        LazyBackward(lambda present: backwards.compile(present).backward, backwards.numbers, ready),
        LazyBackward(lambda present: backwards.compile(present, batched=True).backward, backwards.numbers),
        LazyBackward(backwards.compile_differentiable, backwards.numbers),
    )
    apply = region.bucketed(training.buckets) if training.buckets else region.apply
    if not plan.grad:
        apply = grad_mode.enabled(apply)
    if training.epilogue is None:
        return apply
    epilogue = training.epilogue.function

    def call(*inputs: Any) -> Any:
        return epilogue(*inputs, *apply(*inputs))

    return call


def with_checks(call: Callable, mutated: Sequence[int], eager: Callable | None, *, assumes: bool = False) -> Callable:
    """Return `call` as a front end runs it, without autocast. `eager` runs instead where mutated inputs `overlap`, and
    where an assumption of the program (assumes: it has some) does not hold."""
    call = autocast_mode.without(call)
    if assumes and eager is not None:
        call = _unless_violated(call, eager)
    return _unless_overlapping(call, mutated, eager) if mutated and eager is not None else call


def _unless_violated(call: Callable, eager: Callable) -> Callable:
    def call_or_fall_back(*inputs: Any) -> Any:
        try:
            return call(*inputs)
        except (prims.Violated, ZeroDivisionError):  # the latter of a number by which another one is divided
            pass
        return eager(*inputs)  # where that has no error of its own, the assumption is one

    return call_or_fall_back


def _unless_overlapping(call: Callable, mutated: Sequence[int], eager: Callable) -> Callable:
    """Run eager where changed inputs overlap: the trace knows every input's memory as its own."""

    def call_or_fall_back(*inputs: Any) -> Any:
        return eager(*inputs) if overlap(inputs, mutated) else call(*inputs)

    return call_or_fall_back


def overlap(inputs: Sequence[Any], mutated: Sequence[int]) -> bool:
    """Return whether an input that a program changes shares memory with another one, or several of its elements do,
    which some of torch's operators refuse to write to and some do not (fill_)."""
    if any(is_expanded(inputs[i]) for i in mutated):
        return True
    storages = [value.untyped_storage()._cdata for value in inputs if isinstance(value, torch.Tensor)]
    if len(set(storages)) == len(storages):
        return False
    changed = {inputs[i].untyped_storage()._cdata for i in mutated}
    return sum(storage in changed for storage in storages) > len(changed)
