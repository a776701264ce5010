"""The parameters of torch's functions that take numbers but not tensors: a tensor passed for one is read."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, get_args

from forge.ir import NUMBER_TYPES, Symbol, TensorProxy
from forge.ir.pytree import tree_map
from forge.torchlang.core import find

Read = Callable[[TensorProxy], Any]


def read_numbers(function: Any, args: tuple, kwargs: dict, read: Read) -> tuple[tuple, dict]:
    """Return the arguments of a call with `read` applied to each tensor passed as a number: in a size, a number of
    parts, a slice of an index."""
    symbol = find(function)
    takes = _numbers(symbol) if symbol is not None else {}

    def replaced(parameter: int | str, value: Any) -> Any:
        is_number = takes.get(parameter, takes.get("*" if isinstance(parameter, int) else "**", False))
        return _map_tensors(read, value) if is_number else _in_slices(read, value)

    return (
        tuple([replaced(place, value) for place, value in enumerate(args)]),
        {name: replaced(name, value) for name, value in kwargs.items()},
    )


def _map_tensors(read: Read, value: Any) -> Any:
    return tree_map(lambda leaf: read(leaf) if isinstance(leaf, TensorProxy) else leaf, value)


def _in_slices(read: Read, value: Any) -> Any:
    """Return an argument with `read` applied to each tensor in a slice."""
    if isinstance(value, slice):
        return _map_tensors(read, value)
    if type(value) is tuple and any(isinstance(item, slice) for item in value):
        return tuple([_in_slices(read, item) for item in value])
    return value


_OTHERS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


@functools.cache
def _numbers(symbol: Symbol) -> dict[int | str, bool]:
    """Return whether each parameter takes numbers but not tensors, by position and by name; "*" and "**" for the
    rest."""
    takes: dict[int | str, bool] = {}
    for place, (name, parameter) in enumerate(inspect.signature(symbol.definition).parameters.items()):
        is_number = _is_number(parameter.annotation)
        if parameter.kind in _OTHERS:
            takes[_OTHERS[parameter.kind]] = is_number
        else:
            takes[name] = is_number
            if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                takes[place] = is_number
    return takes


def _is_number(annotation: Any) -> bool:
    kinds = _kinds(annotation)
    return TensorProxy not in kinds and not kinds.isdisjoint(NUMBER_TYPES)


def _kinds(annotation: Any) -> set[Any]:
    """Return the types in an annotation."""
    parts = get_args(annotation)
    return set().union(*map(_kinds, parts)) if parts else {annotation}
