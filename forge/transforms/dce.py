"""Dead code elimination."""

from collections.abc import Iterable

from forge.ir import BoundSymbol, Tag, Trace

KEPT = frozenset({Tag.EFFECT, Tag.RANDOM})


def live_calls(calls: list[BoundSymbol], needed: Iterable[str]) -> list[BoundSymbol]:
    """The calls that `needed` names depend on, and those with effects, in order."""
    wanted = set(needed)
    kept = []
    for bound in reversed(calls):
        if not wanted.isdisjoint(bound.outputs) or not KEPT.isdisjoint(bound.all_tags):
            kept.append(bound)
            wanted.update(bound.inputs)
    kept.reverse()
    return kept


def dce(trace: Trace) -> Trace:
    """The trace without calls whose results nobody reads. Random calls stay: they move the generator."""
    return trace.derive("dce", live_calls(trace.bound_symbols, trace.output_names))
