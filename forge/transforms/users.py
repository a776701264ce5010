"""Transforms that a user gave: their result is checked, and what a changed call consists of is recorded anew."""

from collections.abc import Callable, Sequence

from forge import torchlang
from forge.ir import BoundSymbol, Tag, Trace, check, recording
from forge.ir.printing import in_words
from forge.ir.pytree import proxies
from forge.ir.symbol import substitute

Transform = Callable[[Trace], Trace]


def run_users(transforms: Sequence[Transform], trace: Trace, stages: list[Trace]) -> Trace:
    """The trace after all of them; each one's result goes to `stages`.

    Raises TypeError where one returns no trace, ValueError where a call does not give what it says it gives.
    """
    for transform in transforms:
        before = trace
        try:
            trace = transform(trace)
        except Exception as error:
            error.add_note(f"raised by forge.jit's transform {getattr(transform, '__name__', repr(transform))}")
            raise
        check(
            isinstance(trace, Trace),
            lambda transform=transform, trace=trace: (
                f"forge.jit: transform {transform} returned {type(trace).__name__}, but must return a Trace"
            ),
            TypeError,
        )
        trace = _with_decompositions(trace, before, transform)
        stages.append(trace)
    return trace


def _with_decompositions(trace: Trace, before: Trace, transform: Transform) -> Trace:
    """The trace, in which a call that was not there before consists of what its symbol makes of its arguments: those
    that take a call and those that take its parts run the same."""
    known = set(map(id, before.bound_symbols))
    if all(id(bound) in known for bound in trace.bound_symbols):
        return trace
    new = trace.derive(trace.stage)
    with recording(new, torchlang.language):
        for bound in trace.bound_symbols:
            derived = bound.symbol.body is not None and bound.symbol.op is None and Tag.OPAQUE not in bound.tags
            new.bound_symbols += _recorded(bound, new, transform) if derived and id(bound) not in known else [bound]
    return new


def _recorded(bound: BoundSymbol, new: Trace, transform: Transform) -> list[BoundSymbol]:
    with new.collecting() as calls, new.tagged(bound.tags, bound.source):
        output = bound.symbol(*bound.args, **bound.kwargs)
    made, kept = list(proxies(output)), list(proxies(bound.output))
    gives, says = [", ".join(map(in_words, each)) for each in (made, kept)]
    check(
        gives == says,
        lambda: f"forge.jit: transform {transform}: the call {bound!r} gives {gives}, and its output says {says}",
    )
    return [substitute(call, dict(zip([proxy.name for proxy in made], kept, strict=True))) for call in calls]
