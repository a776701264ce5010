"""Alias analysis: the values of a program that may share memory."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from forge import prims
from forge.ir import BoundSymbol, Tag, Trace
from forge.ir.proxies import hint_of
from forge.ir.pytree import names, tensors


class SharedMemory:
    """Groups of a program's values that may share memory: views and their bases, and in-place writes."""

    def __init__(self, calls: Iterable[BoundSymbol]) -> None:
        self._groups: dict[str, set[str]] = {}
        for bound in _with_inner(calls):
            bases = names(tensors(_shown_by(bound)))
            if bases:
                group = set().union(*map(self._group, (*bases, *bound.outputs)))
                self._groups.update(dict.fromkeys(group, group))

    def _group(self, name: str) -> set[str]:
        return self._groups.get(name, {name})

    def of(self, names: Iterable[str]) -> set[str]:
        """Return these names, and those of their possible aliases."""
        return set().union(*map(self._group, names))


def returned_names(trace: Trace) -> set[str]:
    """Return the names of the values that a program returns, the results of prims.with_data included."""
    result = set(trace.output_names)
    for bound in reversed(trace.bound_symbols):
        if bound.symbol is prims.with_data and not result.isdisjoint(bound.outputs):
            result.update(names(bound.args[1:]))
    return result


_MAY_BE_COPIES = frozenset((prims.reshape, prims.contiguous))


def _shown_by(bound: BoundSymbol) -> tuple[Any, ...]:
    """Return the arguments that the results of a call may alias."""
    if bound.symbol in _MAY_BE_COPIES:
        return () if _copies(bound) else bound.args
    if bound.symbol is prims.with_data:
        return bound.args[1:]
    if Tag.IN_PLACE in bound.symbol.tags:
        return bound.args[:1]
    return () if {Tag.VIEW, Tag.MAY_BE_VIEW}.isdisjoint(bound.symbol.tags) else bound.args


def _with_inner(calls: Iterable[BoundSymbol]) -> Iterator[BoundSymbol]:
    """Yield calls and those inside of them: torch's view_as_real returns a view, the prims inside of it do not."""
    for bound in calls:
        yield bound
        yield from _with_inner(bound.subsymbols)


def _copies(bound: BoundSymbol) -> bool:
    """Return whether a call of contiguous or reshape is known to copy, from the strides of its argument."""
    (x, *_), y = bound.args, bound.output
    if x.strides is None:
        return False
    shape, strides, new = (tuple(map(hint_of, each)) for each in (x.shape, x.strides, y.shape))
    like = torch.empty_strided(shape, strides, dtype=x.dtype, device="meta")
    if bound.symbol is prims.contiguous:
        return not like.is_contiguous()
    try:
        like.view(new)
    except RuntimeError:
        return True
    return False
