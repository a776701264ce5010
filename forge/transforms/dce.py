"""Dead code elimination."""

from collections.abc import Iterable, Sequence

from forge.ir import BoundSymbol, NumberProxy, Tag, Trace
from forge.ir.pytree import names, tensors

KEPT = frozenset({Tag.EFFECT, Tag.RANDOM})


def live_calls(calls: Sequence[BoundSymbol], needed: Iterable[str]) -> list[BoundSymbol]:
    """Return the calls that `needed` names depend on, and those with side effects, in order. A number that a call reads
    from a tensor is needed if a size depends on it: a backward may read that."""
    live = set(needed)
    numbers = {bound.output.name for bound in calls if isinstance(bound.output, NumberProxy)}
    result = []
    for bound in reversed(calls):
        if not live.isdisjoint(bound.outputs) or not KEPT.isdisjoint(bound.all_tags):
            result.append(bound)
            live.update(bound.inputs)
            if numbers:
                live.update(numbers.intersection(names([x.shape for x in tensors(bound.output)])))
    result.reverse()
    return result


def dce(trace: Trace) -> Trace:
    """Return the trace without calls whose results nothing reads. Random calls stay: they advance the generator."""
    return trace.derive("dce", live_calls(trace.bound_symbols, trace.output_names))
