"""What a compiled program's call is made of: generated functions and plain data, and how they are put together.

A program that was compiled in this process and one that was read from the disk (forge/cache) are put together alike.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch

from forge import prims
from forge.executors.contracts import expect
from forge.executors.torchex.attention import as_chosen_now
from forge.ir import Trace
from forge.ir.strides import is_expanded
from forge.runtime.autograd import Again, Backward, Later, Region, Sources
from forge.runtime.frozen import Folded
from forge.torchlang import autocast_mode, grad_mode


class Generated(NamedTuple):
    """A generated function and the trace that it was printed from; None for one that was read from the disk. read: as
    of a Backward."""

    function: Callable
    trace: Trace | None = None
    read: Collection[int] | None = None

    @property
    def backward(self) -> Backward:
        return Backward(self.function, self.read)


class Training(NamedTuple):
    """What a program has beside its forward where gradients flow through it.

    backward: that of the `usual` outputs, by position. epilogue: what runs outside of the autograd.Function.
    constants: the positions of outputs without a gradient. backward_for: compiles the backward of other outputs, or one
    by torch's own functions alone. again_for: an Again of a set of outputs, those of their gradients that have a
    history, whether it is one by torch's own functions alone, and those of opaque calls that are None. split: the
    forward with what it saves, before it was claimed; None for one that was read from the disk. numbers: gives the
    symbolic inputs. parts:
    the positions of the inputs whose gradients leave the backward together, in order, where they do in parts: then each
    backward is a generator.
    """

    backward: Generated
    usual: tuple[bool, ...]
    epilogue: Generated | None
    constants: list[int]
    sources: Sources
    backward_for: Callable[..., Generated]
    again_for: Callable[[tuple], Again]
    split: Trace | None = None
    numbers: Callable[[], Sequence[Any]] = tuple
    parts: Sequence[Sequence[int]] = ()


class Recipe(NamedTuple):
    """What a program's call is made of. grad: whether grad is enabled where it is called. sets_mode: whether what runs
    outside of the autograd.Function sets the grad mode. attends: whether it has code for the kernel of attention that
    torch chose when it was compiled. folded: what the forward takes beside its inputs, where weights are frozen."""

    forward: Generated
    grad: bool
    sets_mode: bool
    training: Training | None = None
    attends: bool = False
    folded: Folded | None = None


def assemble(recipe: Recipe, otherwise: Callable | None = None) -> Callable:
    """What runs: call(*inputs). otherwise: the same program, where torch might choose another kernel of attention."""
    training = recipe.training
    for generated in (recipe.forward, training and training.backward):
        if generated is not None and generated.trace is not None:
            expect(generated.function, generated.trace)
    call = recipe.forward.function if training is None else _differentiable(recipe.forward.function, recipe, training)
    call = call if recipe.folded is None else recipe.folded.around(call)
    call = grad_mode.restored(call, recipe.grad) if recipe.sets_mode else call
    return as_chosen_now(call, otherwise) if recipe.attends else call


def _differentiable(forward: Callable, recipe: Recipe, training: Training) -> Callable:
    ready, backward_for = {training.usual: training.backward.backward}, training.backward_for
    backwards = Later(lambda present: backward_for(present).backward, training.numbers, ready)
    batched = Later(lambda present: backward_for(present, batched=True).backward, training.numbers)
    agains = Later(training.again_for, training.numbers)
    region = Region(forward, training.constants, training.sources, backwards, batched, agains)
    apply = region.in_parts(training.parts) if training.parts else region.apply
    if not recipe.grad:
        apply = grad_mode.enabled(apply)
    if training.epilogue is None:
        return apply
    epilogue = training.epilogue.function

    def call(*inputs: Any) -> Any:
        return epilogue(*inputs, *apply(*inputs))

    return call


def finished(call: Callable, mutated: Sequence[int], eager: Callable | None, *, assumes: bool = False) -> Callable:
    """`call` as a front end runs it: without autocast. `eager` runs in its place where inputs that it changes
    `overlap`, and where an assumption that it makes (assumes: there are some) does not hold."""
    call = autocast_mode.without(call)
    if assumes and eager is not None:
        call = _unless_violated(call, eager)
    return _unless_overlapping(call, mutated, eager) if mutated and eager is not None else call


def _unless_violated(call: Callable, eager: Callable) -> Callable:
    def checked(*inputs: Any) -> Any:
        try:
            return call(*inputs)
        except (prims.Violated, ZeroDivisionError):  # the latter of a number by which another one is divided
            pass
        return eager(*inputs)  # where that has no error of its own, the assumption is one

    return checked


def _unless_overlapping(call: Callable, mutated: Sequence[int], eager: Callable) -> Callable:
    """Runs eager where changed inputs overlap: the trace knows every input's memory as its own."""

    def checked(*inputs: Any) -> Any:
        return eager(*inputs) if overlap(inputs, mutated) else call(*inputs)

    return checked


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
