"""Calls with symbolic sizes, as data: a program of such a call runs at other sizes than those of its first run, too."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from forge.executors.calls import Call, Meta, call_of
from forge.ir import SYMBOLIC_TYPES
from forge.torch_internals.sympy import ValueRanges, int_oo

LEAST = 2  # sizes of 0 and 1 have programs of their own


@dataclass(frozen=True)
class SymbolicCall:
    """A call whose sizes are expressions in symbols, and the least and greatest size of each symbol; the greatest is
    None if there is none. Symbols are named by their order, so that equal calls of different programs are equal."""

    call: Call
    ranges: tuple[tuple[int, int | None], ...]

    @property
    def sizes(self) -> set[int]:
        """Return the constant sizes."""
        return {size for meta in self.call.metas for size in meta.shape if isinstance(size, int)}

    def allows(self, position: int, size: int) -> bool:
        """Return whether the symbol at a position may have a size."""
        least, greatest = self.ranges[position]
        return least <= size and (greatest is None or size <= greatest)

    def at(self, sizes: Mapping[int, int]) -> Call:
        """Return the call with sizes for symbols, by position; the others have their least size."""
        values = {_symbol(i): sizes.get(i, least) for i, (least, _) in enumerate(self.ranges)}
        number = lambda value: int(value.xreplace(values)) if isinstance(value, sympy.Basic) else value
        return self.call.map(lambda leaf: leaf.map(number) if isinstance(leaf, Meta) else number(leaf))


def symbolic_call(args: tuple, kwargs: dict) -> SymbolicCall | None:
    """Return a call on proxies in terms of its symbols; None for a call without symbolic sizes."""
    renamed: dict[Any, Any] = {}
    ranges: list[tuple[int, int | None]] = []

    def express(value: Any) -> Any:
        if not isinstance(value, torch.SymInt):
            return value.node.hint if isinstance(value, SYMBOLIC_TYPES) else value
        expression = value.node.expr
        for symbol in sorted(expression.free_symbols - renamed.keys(), key=str):
            renamed[symbol] = _symbol(len(ranges))
            ranges.append(_range(symbol, value.node.shape_env))
        return expression.xreplace(renamed) if renamed else int(expression)

    call = call_of(args, kwargs, express)
    return SymbolicCall(call, tuple(ranges)) if ranges else None


def _symbol(position: int) -> Any:
    return sympy.Symbol(f"n{position}", positive=True, integer=True)


def _range(symbol: Any, environment: Any) -> tuple[int, int | None]:
    span = environment.var_to_range.get(symbol, ValueRanges(LEAST, int_oo))
    return max(int(span.lower), LEAST), None if span.upper == int_oo else int(span.upper)
