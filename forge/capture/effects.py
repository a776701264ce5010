"""The side effects of functions without torchlang symbols, and their conversion to pure functions.

A function runs once on fake tensors, and its operators tell its side effects (forge/torchlang/fake_execution.py).
If it cannot, its schema or its name must tell.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from forge.compiler.program import Unsupported
from forge.ir import Tag, TensorProxy
from forge.ir.pytree import leaves, tree_map
from forge.torch_internals.dispatch import HigherOrderOperator, OpOverload, OpOverloadPacket, find_schema, packet_name
from forge.torchlang.fake_execution import observe_effects

# they change their tensor's shape, which a handle cannot
_RESHAPERS = frozenset(
    "as_strided_ resize_ resize_as_ set_ squeeze_ swapaxes_ swapdims_ t_ transpose_ unsqueeze_".split()
)


_OPERATORS = (OpOverload, OpOverloadPacket)

# whose operators communicate with other processes
_COLLECTIVES = frozenset("_c10d_functional _c10d_functional_autograd c10d symm_mem".split())

# their graphs have no side effects, and torch differentiates them
_HIGHER_ORDER = frozenset("associative_scan cond flex_attention map map_impl scan while_loop".split())


class Effects(NamedTuple):
    """The leaves of a call's arguments that it mutates, by position, those of them that it mutates without grad, and
    the tags of the call."""

    changed: list[int]
    tags: frozenset[Tag]
    silently: list[int]


def effects(function: Callable, name: str, args: tuple, kwargs: dict) -> Effects:
    """Return the side effects of a call. Raises Unsupported for one that a program cannot have."""
    if isinstance(function, HigherOrderOperator) and function.name() not in _HIGHER_ORDER:
        raise Unsupported(f"the graph calls {function.name()}, which forge does not know")
    if name.rpartition(".")[2] == "_autograd_grad":  # between graphs: inside of one it is in a transform's scope
        raise Unsupported(f"{name} differentiates what was computed before the graph")
    if "out" in kwargs or name.rpartition(".")[2] in _RESHAPERS or "triton_kernel_wrapper" in name:
        raise Unsupported(f"{name} may change its arguments in a way that forge cannot follow")
    if getattr(function, "communicates", False):
        return Effects([], frozenset({Tag.EFFECT}), [])
    if isinstance(function, _OPERATORS) and _qualified_name(function).partition("::")[0] in _COLLECTIVES:
        return Effects(_by_schema(function, name, args, kwargs), frozenset({Tag.EFFECT}), [])
    observation = observe_effects(function, args, kwargs)
    if observation is None:
        return Effects(_by_schema(function, name, args, kwargs), frozenset(), [])
    if observation.reshapes:
        raise Unsupported(f"{name} changes the shape or the memory of a tensor that it is given")
    tags = {Tag.RANDOM: observation.random, Tag.EFFECT: observation.acts}
    return Effects(observation.changed, frozenset(tag for tag, holds in tags.items() if holds), observation.silently)


def _qualified_name(operator: OpOverload | OpOverloadPacket) -> str:
    return operator.name() if isinstance(operator, OpOverload) else packet_name(operator)


def _by_schema(function: Callable, name: str, args: tuple, kwargs: dict) -> list[int]:
    """Return the leaves that a function mutates by its schema, or by torch's naming of in-place functions."""
    flat = list(leaves((args, kwargs)))

    def positions(subset: list[Any]) -> list[int]:
        if not all(isinstance(each, TensorProxy) for each in subset):
            raise Unsupported(f"{name} may change its arguments in a way that forge cannot follow")
        return [i for i, leaf in enumerate(flat) if any(leaf is each for each in subset)]

    schema = find_schema(function)
    if schema is not None:
        values = [*args, *[kwargs.get(each.name) for each in schema.arguments[len(args) :]]]
        write_flags = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
        targets = [value for value, is_written in zip(values, write_flags, strict=False) if is_written]
        return positions([leaf for leaf in leaves(targets) if leaf is not None])
    in_place = name.endswith("_") and not name.endswith("__")
    return positions(list(args[:1])) if in_place else []


class Functional:
    """A function that mutates leaves of its arguments as a pure one: runs on clones of them, and returns (result, the
    mutated clones). A result that is one of the clones is None."""

    def __init__(self, function: Callable, changed: list[int]) -> None:
        self.function = function
        self.changed = changed

    def __call__(self, *args: Any, **kwargs: Any) -> tuple:
        flat = list(leaves((args, kwargs)))
        clones = {id(flat[i]): flat[i].clone() for i in self.changed}
        args, kwargs = tree_map(lambda leaf: clones.get(id(leaf), leaf), (args, kwargs))
        result = self.function(*args, **kwargs)
        own = {id(clone) for clone in clones.values()}
        result = tree_map(lambda leaf: None if id(leaf) in own else leaf, result)
        return result, tuple(clones[id(flat[i])] for i in self.changed)
