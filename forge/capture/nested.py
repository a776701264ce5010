"""forge.grad of a function inside a function that is being traced: its gradients become part of the trace."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from forge import clang, prims, torchlang
from forge.ir import TensorProxy, Trace, check, current_trace, recording
from forge.ir.pytree import rename, tensors
from forge.ir.symbol import substitute
from forge.torch_internals.pytree import torch_pytree
from forge.transforms.double import show_inside
from forge.transforms.grad import backward, differentiate
from forge.transforms.split import free_names


def value_and_gradients(
    function: Callable, args: Sequence[Any], kwargs: dict, positions: Sequence[int], scalar: Callable[[Any], Any]
) -> tuple[Any, list[Any]]:
    """Return (the result of function(*args, **kwargs), the gradients of the arguments at `positions`), traced.

    scalar: selects the value to differentiate from the function's result. Raises NotImplementedError if the function
    mutates its arguments, or a call has no gradient rule.
    """
    outer = current_trace()
    trace = Trace("computation", stage="recorded")
    trace.names, trace.counter, trace.source = set(outer.names), outer.counter, outer.source
    trace.memory = outer.memory  # of the values that the function closes over
    bindings: dict[str, TensorProxy] = {}
    with recording(trace, torchlang.language):
        stand_ins, options = _stand_ins((tuple(args), kwargs), outer, trace, bindings)
        result = function(*stand_ins, **options)
        changed = [storage.root for storage in trace.memory.dirty if storage.root.name in bindings]
        check(
            not changed,
            lambda: f"forge.grad: inside of a traced function, {function} changes its argument {changed[0]} in place",
            NotImplementedError,
        )
        value = trace.memory.read(scalar(result))
    targets = [tensors(torch_pytree.tree_leaves(stand_ins[position])) for position in positions]
    _join(outer, trace)
    with recording(outer, clang.language):
        seed = prims.full((), 1, value.dtype, value.device)
    trace.names.add(seed.name)
    gradients = _inline(outer, trace, {value.name: seed}, bindings, targets)
    spec = [torch_pytree.tree_structure(args[position]) for position in positions]
    return rename(result, bindings), [torch_pytree.tree_unflatten(*pair) for pair in zip(gradients, spec, strict=True)]


def _stand_ins(tree: Any, outer: Trace, trace: Trace, bindings: dict[str, TensorProxy]) -> Any:
    """Return the arguments as inputs of the inner trace; `bindings` maps each to its outer value."""

    def make(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            leaf = outer.add_constant(leaf)
            trace.names.add(leaf.name)
        if not isinstance(leaf, TensorProxy):
            return leaf
        with recording(outer):
            value = outer.memory.read(leaf)
        trace.names |= outer.names
        fresh = trace.add_input(trace.tensor(value.shape, value.dtype, value.device, strides=value.strides))
        bindings[fresh.name] = value
        return fresh

    return torch_pytree.tree_map(make, tree)


def _join(outer: Trace, inner: Trace) -> None:
    """Add the names and constants of the inner trace to the outer one."""
    outer.names |= inner.names
    outer.counter = max(outer.counter, inner.counter)
    outer.constants.update(inner.constants)


def _inline(
    outer: Trace,
    trace: Trace,
    seeds: dict[str, TensorProxy],
    bindings: dict[str, TensorProxy],
    targets: Sequence[Sequence[TensorProxy]],
) -> list[list[TensorProxy]]:
    """Record the inner trace's calls and those of its backward in the outer one."""
    flat = [proxy for each in targets for proxy in each]
    joint = differentiate(trace, [proxy.name for proxy in flat], again=True)
    back = backward(joint, seeds, flat)
    calls, copied = show_inside(back, joint.forward.bound_symbols, set(free_names(back, set())))
    calls += [substitute(bound, copied) for bound in back.bound_symbols]
    _join(outer, back)
    with recording(outer, clang.language):
        for bound in calls:
            outer.record(substitute(bound, bindings))
        gradients = iter(rename(back.output, copied))
        return [[_own(next(gradients), proxy, bindings) for proxy in each] for each in targets]


def _own(gradient: TensorProxy | None, argument: TensorProxy, bindings: dict[str, TensorProxy]) -> TensorProxy:
    if gradient is None:
        return prims.full(argument.shape, 0, argument.dtype, argument.device)
    return prims.clone(bindings[gradient.name]) if gradient.name in bindings else gradient
