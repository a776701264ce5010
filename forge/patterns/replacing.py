"""The transform that makes each site of a pattern one call."""

from collections.abc import Callable, Sequence

from forge import torchlang
from forge.ir import BoundSymbol, Trace, recording
from forge.ir.pytree import tensors
from forge.patterns.matching import Match, find_matches
from forge.patterns.ordering import in_order
from forge.patterns.reference import Pattern
from forge.transforms.dce import live_calls


def replace_patterns(
    trace: Trace, patterns: Sequence[Pattern], is_taken: Callable[[BoundSymbol], bool] = lambda bound: True
) -> tuple[Trace, list[Match]]:
    """Return the trace with every site of `patterns` one call of the pattern's symbol, and the sites.

    is_taken: Returns whether an executor takes such a call; a site whose call none takes stays as it is.
    """
    declined: set[tuple[Pattern, str]] = set()
    while matches := find_matches(trace, patterns, declined):
        new, replacements = _replace_matches(trace, matches)
        calls = {name: bound for bound in new.bound_symbols for name in bound.outputs}
        sites = [(match.site, calls.get(match.outputs[-1].name)) for match in replacements]
        refused = {site for site, call in sites if call is not None and not is_taken(call)}
        if not refused:
            return new, replacements
        declined |= refused
    return trace, []


def _replace_matches(trace: Trace, matches: list[Match]) -> tuple[Trace, list[Match]]:
    """Return the trace with those of the matches replaced that can be together, and these."""
    while matches:
        new, places = _replace(trace, matches)
        calls, remainder = in_order(new.bound_symbols, [*trace.input_names, *trace.constants])
        if not remainder:
            new.bound_symbols[:] = live_calls(calls, new.output_names)
            return new, matches
        late = [name for bound in remainder for name in bound.outputs]  # two sites, each of which needs the other
        first = next(places[name] for name in late if name in places and len(places[name].outputs) > 1)
        matches = [match for match in matches if match is not first]
    return trace, []


def _replace(trace: Trace, matches: list[Match]) -> tuple[Trace, dict[str, Match]]:
    """Return the trace with each match in place of its first output's call, and which that is; perhaps before its
    inputs."""
    places = {match.outputs[0].name: match for match in matches}
    outputs = {proxy.name for match in matches for proxy in match.outputs}
    new = trace.derive("patterns")
    with recording(new, torchlang.language):
        for bound in trace.bound_symbols:
            match = next((places[name] for name in bound.outputs if name in places), None)
            if match is not None:
                _place(match, bound, new)
            elif outputs.isdisjoint(bound.outputs):
                new.record(bound)
    return new, places


def _place(match: Match, bound: BoundSymbol, new: Trace) -> None:
    with new.set_tags(bound.tags, bound.source):
        output = match.pattern.symbol(*[match.binding[name] for name in match.pattern.parameters])
    for proxy, original in zip(tensors(output), match.outputs, strict=True):
        new.names.discard(proxy.name)
        proxy.name = original.name
