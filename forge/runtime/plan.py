"""The parts of a compiled program's call, generated functions and plain data, and their assembly.

Programs compiled in this process and programs read from disk (forge/cache) are assembled alike.
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
    """A generated function and the trace that it was printed from; None for one read from disk. read: as in a
    Backward."""

    function: Callable
    trace: Trace | None = None
    read: Collection[int] | None = None

    @property
    def backward(self) -> Backward:
        return Backward(self.function, self.read)


class Backwards(Protocol):
    """Compiler of the backwards of a program, each on first use (forge/compiler/backwards.py)."""

    def compile(self, present: tuple, *, batched: bool = False) -> GeneratedFunction:
        """Return the backward of the outputs that are `present`; `batched`: by torch's own functions alone."""

    def compile_differentiable(self, key: tuple) -> DifferentiableBackward:
        """Return the backward, as a differentiable program, of (outputs, those of their gradients that have a history,
        whether it uses torch's own functions alone, the gradients of opaque calls that are None)."""

    def numbers(self) -> Sequence[Any]:
        """Return the symbolic inputs of the program."""


class TrainingPlan(NamedTuple):
    """The parts of a differentiated program, beside its forward.

    backward: the backward of the `usual` outputs, by position. epilogue: runs outside of the autograd.Function.
    constants: the positions of outputs without a gradient. split: the forward with its residuals, before it was
    claimed; None for a plan read from disk. buckets: the positions of the inputs whose gradients leave the
    backward together, in order; if there are any, each backward is a generator.
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
        grad: True if grad mode is on at the call of the program.
        sets_mode: True if code outside of the autograd.Function sets the grad mode.
        training: The backwards, for a differentiated program.
        attends: True if the code is for the attention kernel that torch selected at compile time.
        folded_weights: The values computed from frozen weights, which the forward takes beside its inputs.
    """

    forward: GeneratedFunction
    grad: bool
    sets_mode: bool
    training: TrainingPlan | None = None
    attends: bool = False
    folded_weights: FoldedWeights | None = None


class CallBoundary(NamedTuple):
    """Additions of a front end to a program's call.

    eager: runs instead if the program's assumptions about its inputs do not hold. graph_constants: tensors in the
    captured graph, which the program takes last. compare: makes a call that is compared with eager (check="eager").
    to_local: turns a call on local tensors, or parts, into one on DTensors, or quantized tensors.
    """

    eager: Callable | None = None
    graph_constants: Sequence[torch.Tensor] = ()
    compare: Callable[[Callable], Callable] | None = None
    to_local: Callable[[Callable], Callable] | None = None


class ProgramCall(NamedTuple):
    """The plan of a program's call, and all that wraps it.

    Attributes:
        plan: The compiled parts.
        recompile: Recompiles the program. It runs if torch selects another attention kernel than the plan was
            compiled for, which can happen to a program from the cache and to a second tier.
        tiered: Runs the first tier until the second is ready.
        mutated: The positions of inputs that the program mutates.
        assumes: True if the program assumes properties of its numbers, and checks them at run time.
        boundary: Additions of the front end.
    """

    plan: CompiledPlan
    recompile: Callable | None = None
    tiered: TieredProgram | None = None
    mutated: Sequence[int] = ()
    assumes: bool = False
    boundary: CallBoundary = CallBoundary()

    def assemble(self) -> tuple[Callable, list[str]]:
        """Return the callable of the plan, call(*inputs), and the names of the wrappers in it, innermost first."""
        call, active = self.plan.forward.function, []
        for wrapper in WRAPPERS:
            operand = wrapper.operand(self)
            if operand is not None:
                call = wrapper.wrap(call, operand)
                active.append(wrapper.name)
        return call, active


class Wrapper(NamedTuple):
    """A function around a program's call. operand: its configuration, None if the call does not need it."""

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
        except (prims.ViolatedAssumption, ZeroDivisionError):  # the latter of a division by a number
            pass
        return eager(*inputs)  # without an error there, this is an assumption

    return call_or_fall_back


def _unless_overlapping(call: Callable, operand: tuple[Callable, Sequence[int]]) -> Callable:
    """Run eager if mutated inputs overlap: the trace assumes that inputs do not alias.

    Inputs at the addresses of the last call do not overlap if those did not: their sizes and strides are guarded, or
    determined by numbers among them. Only those that moved are checked.
    """
    eager, mutated = operand
    separate: list[Any] = []  # the addresses of the last call's inputs

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


_ADDRESS = torch.Tensor.data_ptr  # mapping it runs no Python code per tensor


def _overlap_after_moves(inputs: Sequence[Any], mutated: Sequence[int], moves: Sequence[int]) -> bool:
    """Return `overlap` of inputs, only some of which have moved since a call without overlap."""
    others = [inputs[i] for i in moves]
    if not all(isinstance(each, torch.Tensor) for each in others) or not set(moves).isdisjoint(mutated):
        return overlap(inputs, mutated)
    return not set(storage_ids([inputs[i] for i in mutated])).isdisjoint(storage_ids(others))


def overlap(inputs: Sequence[Any], mutated: Sequence[int]) -> bool:
    """Return whether an input that a program mutates aliases another one, or may have elements that alias each other,
    which some of torch's operators refuse to write to and some do not (fill_)."""
    if any(may_overlap_itself(inputs[i]) for i in mutated):
        return True
    storages = storage_ids([value for value in inputs if isinstance(value, torch.Tensor)])
    if len(set(storages)) == len(storages):
        return False
    changed = {storage_id(inputs[i]) for i in mutated}
    return sum(storage in changed for storage in storages) > len(changed)


# every wrapper of the generated function in order, innermost first
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
