"""Index expressions that Inductor has simplified, for all regions of a process.

To simplify an index of nested dims (a norm of groups of channels that lie beside each other) takes sympy milliseconds,
and Inductor remembers the results of one graph. The regions of a program have indices in common: of a U-Net's training
step, 73 of 100, and they take 18% of the time in which its regions are lowered.

Lengths that Dynamo computes of others (rows padded to whole chunks) are long expressions of divisions. Of a model with
chunked state spaces, the vectors of loops over such rows took sympy a minute and more.
"""

import operator
from typing import Any

import sympy

from forge.torch_internals.inductor.codegen import cpp, sizevars
from forge.torch_internals.patch import Scope, patch

_MOST = 2**16  # results that are remembered

_cache: dict[tuple[Any, ...], Any] = {}


@patch(
    sizevars.SizeVarAllocator,
    "_simplify_with_ranges",
    scope=Scope.COMPILE,
    why="each region simplifies the index expressions that other regions have, too",
    issue="not reported: it is no bug; forge compiles many regions at once",
    upstream="torch/_inductor/sizevars.py:329@2.13.0, SizeVarAllocator._simplify_with_ranges",
    not_probed="it saves time, and changes no result; test_simplified_indices.py counts them",
)
def remember_simplified(sizes: Any, index: Any, ranges: dict[Any, Any]) -> Any:
    """Return an index expression in its simplest form. Where no length is symbolic, it depends on the ranges alone."""
    if sizes.replacements or not _is_static(index, ranges):
        return remember_simplified.original(sizes, index, ranges)
    key = (index, *ranges.items())
    result = _cache.get(key)
    if result is None:
        if len(_cache) >= _MOST:
            _cache.clear()
        result = _cache[key] = remember_simplified.original(sizes, index, ranges)
    return result


def _is_static(index: Any, ranges: dict[Any, Any]) -> bool:
    """Return whether an expression consists of variables whose ranges are numbers."""
    if any(getattr(length, "free_symbols", ()) for length in ranges.values()):
        return False
    return not getattr(index, "free_symbols", set()) - ranges.keys()


@patch(
    cpp,
    "stride_at_vec_range",
    scope=Scope.COMPILE,
    why="sympy simplifies the divisions of lengths inside an index, of which its stride along a loop says nothing",
    issue="not reported: it is no bug, but slow where lengths are long expressions",
    upstream="torch/_inductor/sizevars.py:198@2.13.0, stride_at_vec_range",
    not_probed="it saves time, and changes no result; test_simplified_indices.py compares them",
)
def stride_of_named_lengths(index: Any, variable: Any, vector: int | None = None) -> Any:
    """Return the stride of an index along a variable, found with a name for each function of lengths in it."""
    lengths: dict[Any, Any] = {}
    expression = _with_names(sympy.sympify(index), variable, lengths)
    stride = stride_of_named_lengths.original(expression, variable, vector)
    return stride.xreplace({name: length for length, name in lengths.items()})


def _with_names(index: Any, variable: Any, names: dict[Any, Any]) -> Any:
    """Return an expression with a name in the place of each function that the variable is not in; `names` gets them."""
    if isinstance(index, sympy.Function) and not index.has(variable):
        if index not in names:
            names[index] = sympy.Symbol(
                f"length_{len(names)}", integer=index.is_integer, nonnegative=index.is_nonnegative
            )
        return names[index]
    if not index.args:
        return index
    args = [_with_names(each, variable, names) for each in index.args]
    return index if all(map(operator.is_, args, index.args)) else index.func(*args)
