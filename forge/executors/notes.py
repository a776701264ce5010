"""A claimed trace in which something is told after each of its calls, as it runs."""

from collections.abc import Callable, Sequence

from forge.ir import BoundSymbol, Proxy, Symbol, Trace

Note = tuple[Callable, Sequence[Proxy | tuple[Proxy, ...]]]


def noted(trace: Trace, stage: str, note: Callable[[int, BoundSymbol], Note | None]) -> Trace:
    """The trace with a call after each of its own: `note`, of a call and its number, gives the function that is called
    and what of the program's values it is given; None for nothing."""
    calls: list[BoundSymbol] = []
    for number, bound in enumerate(trace.bound_symbols):
        calls.append(bound)
        found = note(number, bound)
        if found is not None:
            function, given = found
            symbol = Symbol(f"note{number}", f"forge.note{number}", meta=lambda *values: None, op=function)
            calls.append(BoundSymbol(symbol, tuple(given), {}, None))
    return trace.derive(f"{trace.stage}, {stage}", calls)
