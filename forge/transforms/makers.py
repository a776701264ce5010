"""The producers of the values of a trace, at its top level and inside of composites."""

from collections.abc import Iterator

from forge.ir import BoundSymbol, Tag, Trace


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


def is_view(bound: BoundSymbol) -> bool:
    """Return whether a call consists of views alone."""
    return all(Tag.VIEW in call.symbol.tags for call in innermost(bound))
