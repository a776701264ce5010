"""Instrumented traces: a function is called before or after each call of a claimed trace, as it runs."""

from collections.abc import Callable, Sequence

from forge.ir import BoundSymbol, Proxy, Symbol, Trace

Note = tuple[Callable, Sequence[Proxy | tuple[Proxy, ...]]]


MakeNote = Callable[[int, BoundSymbol], Note | None]


def instrument(trace: Trace, stage: str, note: MakeNote, before: MakeNote | None = None) -> Trace:
    """Return the trace with a call inserted after each of its calls.

    note: maps a call's number and the call to the function to insert and the program's values to pass to it; None to
    insert nothing. before: the same for a function inserted before the call.
    """
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
    function, arguments = note
    symbol = Symbol(name, f"forge.{name}", meta=lambda *values: None, op=function)
    return [BoundSymbol(symbol, tuple(arguments), {}, None)]
