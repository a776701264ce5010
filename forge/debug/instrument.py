"""A claimed trace in which something is told before or after each of its calls, as it runs."""

from collections.abc import Callable, Sequence

from forge.ir import BoundSymbol, Proxy, Symbol, Trace

Note = tuple[Callable, Sequence[Proxy | tuple[Proxy, ...]]]


Noting = Callable[[int, BoundSymbol], Note | None]


def noted(trace: Trace, stage: str, note: Noting, before: Noting | None = None) -> Trace:
    """Return the trace with a call after each of its own: `note`, of a call and its number, gives the function that is
    called and what of the program's values it is given; None for nothing. before: the same of a call in front of it."""
    calls: list[BoundSymbol] = []
    for number, bound in enumerate(trace.bound_symbols):
        if before is not None:
            calls += _call(f"before{number}", before(number, bound))
        calls.append(bound)
        calls += _call(f"note{number}", note(number, bound))
    return trace.derive(f"{trace.stage}, {stage}", calls)


def _call(name: str, note: Note | None) -> list[BoundSymbol]:
    if note is None:
        return []
    function, given = note
    symbol = Symbol(name, f"forge.{name}", meta=lambda *values: None, op=function)
    return [BoundSymbol(symbol, tuple(given), {}, None)]
