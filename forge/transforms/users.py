"""Transforms of the user: their results are checked, and the decompositions of changed calls recorded again."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, count, zip_longest
from typing import Any

from forge import prims, torchlang
from forge.ir import BoundSymbol, Proxy, Symbol, Tag, TensorProxy, Trace, check, recording
from forge.ir.printing import in_words, qualified_name
from forge.ir.pytree import proxies, tree_map
from forge.ir.symbol import substitute
from forge.ir.verifier import name_faults
from forge.transforms.shared_memory import SharedMemory

Transform = Callable[[Trace], Trace]


def run_users(transforms: Sequence[Transform], trace: Trace, stages: list[Trace]) -> Trace:
    """Return the trace after all of them; each one's result is appended to `stages`.

    Raises TypeError if one returns no trace, or a trace with anything but calls of symbols; ValueError if it
    changed its argument, if a call's output is not what its symbol returns, if a value is read that no earlier
    call defines, if one is defined twice, and if inputs or outputs differ. An error of a transform, or of a call that
    it changed, has a note with its name.
    """
    for transform in transforms:
        before, name = trace, getattr(transform, "__name__", repr(transform))
        contents = _contents(before)
        try:
            trace = transform(trace)
        except Exception as error:
            error.add_note(f"raised by forge.jit's transform {name}")
            raise
        check(
            isinstance(trace, Trace),
            lambda name=name, trace=trace: (
                f"forge.jit: transform {name} returned {type(trace).__name__}, but must return a Trace"
            ),
            TypeError,
        )
        check(
            all(now is was for now, was in zip_longest(_contents(before), contents, fillvalue=_contents)),
            lambda name=name: (
                f"forge.jit: transform {name} changed the trace that it was given, but must leave it as it is and "
                "return another one: trace.derive(stage, calls)"
            ),
        )
        _check_calls(trace, name)
        _check_names(trace, before, name)
        trace = _with_decompositions(trace, before, name)
        trace = _with_own_memory(trace, before)
        stages.append(trace)
    return trace


def _contents(trace: Trace) -> list[Any]:
    """Return the inputs and the output of a trace, and the fields of its calls."""
    calls = [(each, each.symbol, each.args, each.kwargs, each.output, each.subsymbols) for each in trace.bound_symbols]
    return [*trace.inputs, trace.output, *chain.from_iterable(calls)]


def _check_calls(trace: Trace, transform: str) -> None:
    """Raise TypeError if a trace has anything but calls of symbols."""
    for index, bound in enumerate(trace.bound_symbols):
        check(
            isinstance(bound, BoundSymbol),
            lambda index=index, bound=bound: (
                f"forge.jit: transform {transform} gives a trace whose call {index} is {bound!r}, a "
                f"{type(bound).__name__}, but must be a BoundSymbol"
            ),
            TypeError,
        )
        check(
            isinstance(bound.symbol, Symbol),
            lambda index=index, symbol=bound.symbol: (
                f"forge.jit: transform {transform} gives a trace whose call {index} is of {symbol!r}, but must be of a "
                f"Symbol: forge.torchlang.find({qualified_name(symbol) or 'torch.sin'}) is that of a torch function"
            ),
            TypeError,
        )


def _check_names(trace: Trace, before: Trace, transform: str) -> None:
    """Raise ValueError if a trace cannot replace the one before."""
    for what, gives, wants in (
        ("inputs", trace.inputs, before.inputs),
        ("outputs", list(proxies(trace.output)), list(proxies(before.output))),
    ):
        check(
            list(map(in_words, gives)) == list(map(in_words, wants)),
            lambda what=what, gives=gives, wants=wants: (
                f"forge.jit: transform {transform} gives a trace whose {what} are ({_list_names(gives)}), "
                f"but they must be ({_list_names(wants)}), as before it"
            ),
        )
    makers = {name: bound for bound in before.bound_symbols for name in bound.outputs}
    fault = next(name_faults(trace), None)
    if fault is not None and fault.is_definition:
        raise ValueError(_made_twice(transform, fault.call, fault.name))
    if fault is not None:
        who = "the program returns" if fault.call is None else f"{fault.call!r} reads"
        raise ValueError(_missing(transform, who, fault.name, makers))


def _missing(transform: str, who: str, name: str, makers: Mapping[str, BoundSymbol]) -> str:
    maker = makers.get(name)
    place = "" if maker is None or maker.source is None or maker.source.line is None else f" ({maker.source.line})"
    was = "no call ever made it" if maker is None else f"before the transform, {maker!r} made it{place}"
    return (
        f"forge.jit: transform {transform}: {who} {name}, which no call before it makes; {was}. To drop a call, "
        "use forge.transforms.rewrite, which renames what reads its results"
    )


def _made_twice(transform: str, bound: BoundSymbol | None, name: str) -> str:
    return (
        f"forge.jit: transform {transform}: {bound!r} makes {name}, which the program has already. A transform that "
        "repeats a call must give it results of its own"
    )


def _list_names(values: Sequence[Proxy]) -> str:
    return ", ".join(f"{each.name}: {in_words(each)}" for each in values)


def _with_decompositions(trace: Trace, before: Trace, transform: str) -> Trace:
    """Return the trace with new calls decomposed by their symbols: executors that take a call and those that take its
    parts run the same."""
    existing = set(map(id, before.bound_symbols))
    if all(id(bound) in existing for bound in trace.bound_symbols):
        return trace
    new = trace.derive(trace.stage)
    with recording(new, torchlang.language):
        for bound in trace.bound_symbols:
            derived = bound.symbol.body is not None and bound.symbol.op is None and Tag.OPAQUE not in bound.tags
            new.bound_symbols += (
                _record_body(bound, new, transform) if derived and id(bound) not in existing else [bound]
            )
    return new


def _record_body(bound: BoundSymbol, new: Trace, transform: str) -> list[BoundSymbol]:
    try:
        with new.collecting() as calls, new.set_tags(bound.tags, bound.source):
            output = bound.symbol(*bound.args, **bound.kwargs)
    except Exception as error:
        error.add_note(f"raised by a call of forge.jit's transform {transform}: {bound!r}")
        raise
    results, originals = list(proxies(output)), list(proxies(bound.output))
    gives, says = [", ".join(map(in_words, each)) for each in (results, originals)]
    check(
        gives == says,
        lambda: f"forge.jit: transform {transform}: the call {bound!r} gives {gives}, and its output says {says}",
    )
    return [substitute(call, dict(zip([proxy.name for proxy in results], originals, strict=True))) for call in calls]


def _with_own_memory(trace: Trace, before: Trace) -> Trace:
    """Return the trace, in which a result that may alias an input, a constant or an earlier result, and did not
    before, is a copy: the caller may change it, and its history is a call."""
    pairs = enumerate(zip(_sharing(trace), _sharing(before), strict=True))
    shared = {position for position, (now, was) in pairs if not now <= was}
    if not shared:
        return trace
    new, position = trace.derive(trace.stage, trace.bound_symbols), count()

    def own(leaf: Any) -> Any:
        return prims.clone(leaf) if isinstance(leaf, Proxy) and next(position) in shared else leaf

    with recording(new, torchlang.language):
        new.output = tree_map(own, trace.output)
    return new


def _sharing(trace: Trace) -> list[set[Any]]:
    """Return, for each result, the inputs and earlier results, by position, and the constants that it may
    alias."""
    memory = SharedMemory(trace.bound_symbols)
    results = list(proxies(trace.output))
    groups = [memory.of([each.name]) if isinstance(each, TensorProxy) else set() for each in results]
    sharing: list[set[Any]] = []
    for position, group in enumerate(groups):
        inputs = {("input", i) for i, each in enumerate(trace.inputs) if each.name in group}
        earlier = {("result", i) for i in range(position) if results[i].name in group}
        sharing.append({*inputs, *earlier, *group.intersection(trace.constants)})
    return sharing
