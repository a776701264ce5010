"""The producers of the values of a trace, at its top level and inside of composites."""

from collections import Counter
from collections.abc import Collection, Iterator
from itertools import chain

from forge.ir import BoundSymbol, Symbol, Tag, TensorProxy, Trace


class Makers:
    """`calls[name]` is the program's own call that produces a value; `prim(name)` the innermost one. Composites are
    expanded on demand; one with a user's gradient rule is not."""

    def __init__(self, trace: Trace) -> None:
        self.calls = {name: bound for bound in trace.bound_symbols for name in bound.outputs}
        self._inside: dict[str, BoundSymbol] = {}

    def prim(self, name: str) -> BoundSymbol | None:
        """Return the prim that produces a value; None for an input of the trace."""
        if name not in self._inside and name in self.calls:
            self._inside.update((output, call) for call in innermost(self.calls[name]) for output in call.outputs)
        return self._inside.get(name)


def innermost(bound: BoundSymbol) -> Iterator[BoundSymbol]:
    """Yield the prims of a call."""
    if not bound.subsymbols or bound.symbol.rule is not None:
        yield bound
        return
    for sub in bound.subsymbols:
        yield from innermost(sub)


def only_prim(bound: BoundSymbol, besides: Collection[Symbol] = ()) -> BoundSymbol | None:
    """Return the prim that a call consists of, besides calls of some symbols; None if there are
    several, or it has several results."""
    inner = [prim for prim in innermost(bound) if prim.symbol not in besides]
    return inner[0] if len(inner) == 1 and isinstance(inner[0].output, TensorProxy) else None


def count_reads(trace: Trace) -> Counter[str]:
    """Return the number of calls that read each value, with one more if the trace returns it."""
    return Counter(chain(trace.output_names, *(set(bound.inputs) for bound in trace.bound_symbols)))


def is_view(bound: BoundSymbol) -> bool:
    """Return whether a call consists of views alone."""
    return all(Tag.VIEW in call.symbol.tags for call in innermost(bound))
