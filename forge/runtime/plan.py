"""The parts of a compiled program's call, generated functions and plain data, and their assembly.

A program that was compiled in this process and one that was read from the disk (forge/cache) are put together alike.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from forge import prims
from forge.executors.torchex.attention import as_chosen_now
from forge.ir import Trace
from forge.ir.strides import may_overlap_itself
from forge.runtime.autograd import Backward, DifferentiableBackward, DifferentiableCall, LazyBackward, Sources
from forge.runtime.frozen import FoldedWeights
from forge.runtime.tiering import TieredProgram
from forge.torch_internals.tensors import storage_id, storage_ids
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
    """The parts of a compiled program.

    Attributes:
        forward: The generated forward.
        grad: True if grad mode is on where the program is called.
        sets_mode: True if code outside of the autograd.Function sets the grad mode.
        training: The backwards, for a differentiated program.
        attends: True if the code is for the attention kernel that torch chose when it was compiled.
        folded_weights: The values computed of frozen weights, which the forward takes beside its inputs.
    """

    forward: GeneratedFunction
    grad: bool
    sets_mode: bool
    training: TrainingPlan | None = None
    attends: bool = False
    folded_weights: FoldedWeights | None = None


class CallBoundary(NamedTuple):
    """Additions of a front end to a program's call.

    eager: runs in its place where what the program assumes of its inputs does not hold. graph_constants: tensors that
    the captured graph holds, which the program takes last. compare: makes a call that is compared with eager
    (check="eager"). to_local: makes a call on DTensors, or quantized tensors, of one on the tensors inside.
    """

    eager: Callable | None = None
    graph_constants: Sequence[torch.Tensor] = ()
    compare: Callable[[Callable], Callable] | None = None
    to_local: Callable[[Callable], Callable] | None = None


class ProgramCall(NamedTuple):
    """All that decides how a program is called.

    Attributes:
        plan: The compiled parts.
        recompile: Compiles the program again. It runs where torch chooses another attention kernel than the one
            that the plan was compiled for, which can happen to a program from the cache and to a second tier.
        tiered: Runs the first tier until the second is ready.
        mutated: The positions of inputs that the program changes.
        assumes: True if the program assumes properties of its numbers, and checks them when it runs.
        boundary: Additions of the front end.
    """

    plan: CompiledPlan
    recompile: Callable | None = None
    tiered: TieredProgram | None = None
    mutated: Sequence[int] = ()
    assumes: bool = False
    boundary: CallBoundary = CallBoundary()

    def assemble(self) -> tuple[Callable, list[str]]:
        """Return the callable of the plan, call(*inputs), and the names of the wrappers in it, the innermost first."""
        call, active = self.plan.forward.function, []
        for wrapper in WRAPPERS:
            operand = wrapper.operand(self)
            if operand is not None:
                call = wrapper.wrap(call, operand)
                active.append(wrapper.name)
        return call, active


class Wrapper(NamedTuple):
    """A function around a program's call. operand: what it works with, None for a call that goes without it."""

    name: str
    operand: Callable[[ProgramCall], Any]
    wrap: Callable[[Callable, Any], Callable]


def _differentiable(forward: Callable, training: TrainingPlan) -> Callable:
    ready, backwards = {training.usual: training.backward.backward}, training.backwards
    function = DifferentiableCall(
        forward,
        training.constants,
        training.sources,
        LazyBackward(lambda present: backwards.compile(present).backward, backwards.numbers, ready),
        LazyBackward(lambda present: backwards.compile(present, batched=True).backward, backwards.numbers),
        LazyBackward(backwards.compile_differentiable, backwards.numbers),
    )
    return function.apply_in_buckets(training.buckets) if training.buckets else function.apply


def _with_epilogue(call: Callable, epilogue: GeneratedFunction) -> Callable:
    function = epilogue.function
    return lambda *inputs: function(*inputs, *call(*inputs))


def _with_graph_constants(call: Callable, graph_constants: Sequence[torch.Tensor]) -> Callable:
    return lambda *inputs: call(*inputs, *graph_constants)


def _unless_violated(call: Callable, eager: Callable) -> Callable:
    def call_or_fall_back(*inputs: Any) -> Any:
        try:
            return call(*inputs)
        except (prims.ViolatedAssumption, ZeroDivisionError):  # the latter of a number by which another one is divided
            pass
        return eager(*inputs)  # where that has no error of its own, the assumption is one

    return call_or_fall_back


def _unless_overlapping(call: Callable, operand: tuple[Callable, Sequence[int]]) -> Callable:
    """Run eager where changed inputs overlap: the trace knows every input's memory as its own.

    Inputs that are where those of the last call were do not overlap if those did not: their sizes and strides are
    guarded, or follow from numbers among them. Only those that moved are looked at.
    """
    eager, mutated = operand
    separate: list[Any] = []  # the places of the last call's inputs

    def call_or_fall_back(*inputs: Any) -> Any:
        nonlocal separate
        places = _places(inputs)
        if places != separate:
            moves = [i for i, place in enumerate(places) if place != separate[i]] if separate else range(len(places))
            if _overlap_after_moves(inputs, mutated, moves):
                return eager(*inputs)
            separate = places
        return call(*inputs)

    return call_or_fall_back


def _places(inputs: Sequence[Any]) -> list[Any]:
    """Return the address of each tensor, and the other inputs themselves."""
    try:
        return list(map(_ADDRESS, inputs))
    except TypeError:
        return [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in inputs]


_ADDRESS = torch.Tensor.data_ptr  # whose map has no step of Python's for each


def _overlap_after_moves(inputs: Sequence[Any], mutated: Sequence[int], moves: Sequence[int]) -> bool:
    """Return `overlap`, of inputs of which only some are elsewhere than those of a call that did not overlap."""
    others = [inputs[i] for i in moves]
    if not all(isinstance(each, torch.Tensor) for each in others) or not set(moves).isdisjoint(mutated):
        return overlap(inputs, mutated)
    return not set(storage_ids([inputs[i] for i in mutated])).isdisjoint(storage_ids(others))


def overlap(inputs: Sequence[Any], mutated: Sequence[int]) -> bool:
    """Return whether an input that a program changes shares memory with another one, or several of its elements may,
    which some of torch's operators refuse to write to and some do not (fill_)."""
    if any(may_overlap_itself(inputs[i]) for i in mutated):
        return True
    storages = storage_ids([value for value in inputs if isinstance(value, torch.Tensor)])
    if len(set(storages)) == len(storages):
        return False
    changed = {storage_id(inputs[i]) for i in mutated}
    return sum(storage in changed for storage in storages) > len(changed)


# every function around the generated one, in order, the innermost first
WRAPPERS: tuple[Wrapper, ...] = (
    Wrapper("autograd", lambda of: of.plan.training, _differentiable),
    Wrapper(
        "grad enabled",
        lambda of: True if of.plan.training and not of.plan.grad else None,
        lambda call, _: grad_mode.with_grad(call),
    ),
    Wrapper("epilogue", lambda of: of.plan.training and of.plan.training.epilogue, _with_epilogue),
    Wrapper("frozen weights", lambda of: of.plan.folded_weights, lambda call, folded: folded.wrap(call)),
    Wrapper("grad mode restored", lambda of: of.plan.grad if of.plan.sets_mode else None, grad_mode.restore_on_error),
    Wrapper("attention kernel", lambda of: of.recompile if of.plan.attends else None, as_chosen_now),
    Wrapper("tiering", lambda of: of.tiered, lambda call, tiered: tiered.wrap(call)),
    Wrapper(
        "without autocast",
        lambda of: True if autocast_mode.is_enabled() else None,
        lambda call, _: autocast_mode.without(call),
    ),
    Wrapper("assumptions", lambda of: of.boundary.eager if of.assumes else None, _unless_violated),
    Wrapper(
        "overlap",
        lambda of: (of.boundary.eager, of.mutated) if of.boundary.eager and of.mutated else None,
        _unless_overlapping,
    ),
    Wrapper("check", lambda of: of.boundary.compare, lambda call, compare: compare(call)),
    Wrapper("held tensors", lambda of: of.boundary.graph_constants or None, _with_graph_constants),
    Wrapper("subclasses", lambda of: of.boundary.to_local, lambda call, to_local: to_local(call)),
)
