"""Rematerialization: save or recompute each value that a backward reads, so that the fewest bytes are saved.

The forward is a network from its inputs to the backward's reads. Each value is an edge whose capacity is its bytes; the
minimum cut is the set to save, and the values between the cut and the backward are recomputed. Inputs that the backward
reads anyway, and parameters of modules, cost nothing; others are saved as copies, since their memory may change. Calls
that are expensive (a matrix product, attention, an embedding), draw random numbers or are opaque are never on the far
side of the cut.

Nor are values that link the layers, such as the hidden states that each layer adds to: to recompute the last of them
is to recompute all of them, in one kernel when the backward begins, and to keep them until each layer's turn. By
their *level*, the number of calls that run once between the inputs and a value, a chain of recomputed calls ends
where the level rises. A reduction whose small result is saved raises none: its input would be saved in the form in
which it reads it, in float32.

A call that computes statistics and a value normalized by them is split (`register_parted`): its statistics are saved,
the rest is cheap to recompute.

Source: T. Chen et al., Training Deep Nets with Sublinear Memory Cost (2016), for recomputation; a cut as in the
partitioners of AOTAutograd (torch._functorch.partitioners).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set

import networkx
from networkx.algorithms.flow import boykov_kolmogorov

from forge import clang
from forge.ir import BoundSymbol, Proxy, Symbol, Tag, TensorProxy, Trace, recording
from forge.ir.proxies import hint_of
from forge.ir.pytree import proxies
from forge.ir.symbol import substitute
from forge.transforms.dce import KEPT, live_calls
from forge.transforms.makers import is_view
from forge.transforms.split import free_names, unfold
from forge.transforms.unshards import is_unshard

_NEVER = KEPT | {Tag.OPAQUE, Tag.UNINITIALIZED, Tag.SYNCHRONIZING, Tag.OPAQUE_TO_PASSES}
_SOURCE, _SINK = "source", "sink"
_parted: dict[Symbol, Callable[[BoundSymbol], TensorProxy | None]] = {}


def register_parted(symbol: Symbol, last: Callable[[BoundSymbol], TensorProxy | None]) -> None:
    """Register a split of a symbol's calls whose first result is cheap to compute from the others.

    last: records one call, which computes the first result from the others, and returns its result; None if the
    result would differ.
    """
    assert symbol not in _parted
    _parted[symbol] = last


def rematerialize(
    forward: Trace,
    backward: Trace,
    cheap: Callable[[BoundSymbol], bool],
    copied: Collection[str] = (),
    unread: Set[str] = frozenset(),
    *,
    fused: Callable[[BoundSymbol], bool] = lambda bound: False,
    chains: bool = False,
) -> Trace:
    """Return the forward with the calls that the backward recomputes tagged Tag.RECOMPUTE.

    cheap: whether a call may be recomputed. copied: values of which only a copy can be saved. unread: values that no
    recomputed call reads. fused: whether a call may be split, since its parts run as one. chains: whether chains of
    calls may lead through the levels, which saves the fewest bytes.
    """
    sizes = {proxy.name for proxy in forward.inputs if not isinstance(proxy, TensorProxy)}
    read = set(free_names(backward, sizes))
    live = {*read, *forward.output_names}
    exact = {name for bound in backward.bound_symbols if Tag.NO_FUSE in bound.tags for name in bound.inputs}
    new = forward.derive("rematerialize", [])
    new.names |= backward.names
    parted = _part(
        new,
        live_calls(unfold(forward.bound_symbols, live), live),
        lambda bound: Tag.RECOMPUTE not in bound.tags and fused(bound) and _may_run_again(bound, cheap, exact),
    )
    calls = new.bound_symbols
    again = [
        id(bound) not in parted and _may_run_again(bound, cheap, exact) and unread.isdisjoint(bound.inputs)
        for bound in calls
    ]
    if not any(again):
        return forward
    if not chains:
        small = [
            not twice and id(bound) not in parted and _NEVER.isdisjoint(bound.all_tags) and fused(bound)
            for bound, twice in zip(calls, again, strict=True)
        ]
        links = _links(calls, again, small)
        again = [twice and links.isdisjoint(bound.outputs) for bound, twice in zip(calls, again, strict=True)]
    while True:
        computed = _cut(forward, calls, again, read, copied)
        partly = [twice and not computed.isdisjoint(bound.outputs) for bound, twice in zip(calls, again, strict=True)]
        entire = [bool(bound.outputs) and computed.issuperset(bound.outputs) for bound in calls]
        if partly == entire:
            break  # else a call runs for all of its results or for none
        again = [twice and (whole or not part) for twice, part, whole in zip(again, partly, entire, strict=True)]
    if not computed:
        return forward
    tagged = [_to_recompute(bound) if each else bound for bound, each in zip(calls, entire, strict=True)]
    return new.derive("rematerialize", _join(tagged, parted))


def _cut(
    forward: Trace, calls: Sequence[BoundSymbol], again: Iterable[bool], read: set[str], copied: Collection[str]
) -> set[str]:
    """Return the names of the values to recompute."""
    network = _Network(copied)
    # of gathered parameters, the same on every rank: all ranks recompute the same gathers
    parts = {bound.args[0].name: _bytes(bound.output) // bound.args[5][0] for bound in calls if is_unshard(bound)}
    for proxy in forward.inputs:
        network.add(proxy, parts.get(proxy.name, _bytes(proxy)) if proxy.name in copied else 0)
        network.give(proxy.name)
    for name in forward.constants:
        network.add(Proxy(name), 0)
        network.give(name)
    for bound, twice in zip(calls, again, strict=True):
        network.run(bound, twice)
    network.take(name for name in read if name in network.values)
    return network.computed_again()


def _part(
    new: Trace, calls: Iterable[BoundSymbol], can_split: Callable[[BoundSymbol], bool]
) -> dict[int, tuple[BoundSymbol, BoundSymbol]]:
    """Record the calls, split in two if the first result is cheap to compute from the others. Return each such call
    and its last part by the id of its first part, which computes these others and runs once."""
    parted: dict[int, tuple[BoundSymbol, BoundSymbol]] = {}
    with recording(new, clang.language):
        for bound in calls:
            last = _last_part(new, bound) if bound.symbol in _parted and can_split(bound) else None
            if last is None:
                new.record(bound)
                continue
            result = last.output
            first = substitute(bound, {result.name: new.tensor(result.shape, result.dtype, result.device)})
            new.record(first)
            new.record(last)
            parted[id(first)] = bound, last
    return parted


def _last_part(new: Trace, bound: BoundSymbol) -> BoundSymbol | None:
    """Return the call that computes another one's first result from its other results, if there is one."""
    with new.set_tags(bound.tags, bound.source), new.collecting() as recorded:
        result = _parted[bound.symbol](bound)
    if result is None:
        return None
    (call,) = recorded
    return substitute(call, {result.name: proxies(bound.output)[0]})


def _join(calls: Sequence[BoundSymbol], parted: Mapping[int, tuple[BoundSymbol, BoundSymbol]]) -> list[BoundSymbol]:
    """Return the calls, those whole whose last part is not recomputed, as the same objects."""
    same = set(map(id, calls))
    whole = {first: bound for first, (bound, last) in parted.items() if id(last) in same}
    dropped = {id(last) for _, last in parted.values() if id(last) in same}
    return [whole.get(id(bound), bound) for bound in calls if id(bound) not in dropped]


def _may_run_again(bound: BoundSymbol, cheap: Callable[[BoundSymbol], bool], exact: set[str]) -> bool:
    """Return whether a call may be recomputed. exact: values compared with those that the forward computed."""
    if not _NEVER.isdisjoint(bound.all_tags):
        return False
    return Tag.RECOMPUTE in bound.tags or (exact.isdisjoint(bound.outputs) and cheap(bound))


def _links(calls: Iterable[BoundSymbol], again: Iterable[bool], small: Iterable[bool]) -> set[str]:
    """Return the values that calls of a higher level would read when recomputed. A value that depends on the inputs
    alone links nothing. small: whether a call runs once because its result is small; it raises no level."""
    levels: dict[str, int] = {}
    computed: set[str] = set()
    links: set[str] = set()
    for bound, twice, is_small in zip(calls, again, small, strict=True):
        level = max((levels.get(name, 0) for name in bound.inputs), default=0)
        if twice:
            links.update(name for name in bound.inputs if name in computed and 0 < levels[name] < level)
            computed.update(bound.outputs)
        elif not is_view(bound) and not is_small:
            level += 1
        levels.update(dict.fromkeys(bound.outputs, level))
    return links


def _to_recompute(bound: BoundSymbol) -> BoundSymbol:
    return bound.replace(tags=bound.tags | {Tag.RECOMPUTE})


class _Network:
    """Values as edges (name, 0) → (name, 1); recomputable calls have edges from their operands to their results."""

    def __init__(self, copied: Collection[str]) -> None:
        self.graph = networkx.DiGraph()
        self.graph.add_nodes_from((_SOURCE, _SINK))
        self.values: set[str] = set()
        self.copied = copied

    def add(self, proxy: Proxy, bytes: int) -> None:
        """Add a value."""
        self.values.add(proxy.name)
        is_copied = proxy.name in self.copied  # of values of one size, prefer one that exists anyway
        self.graph.add_edge((proxy.name, 0), (proxy.name, 1), capacity=bytes + is_copied)

    def give(self, name: str) -> None:
        """Make a value available."""
        self.graph.add_edge(_SOURCE, (name, 0))

    def run(self, bound: BoundSymbol, again: bool) -> None:
        """Add a call of the forward."""
        view = is_view(bound)
        for proxy in proxies(bound.output):
            if proxy.name not in bound.outputs or proxy.name in self.values:
                continue
            self.add(proxy, _bytes(proxy) + view)  # its base is preferred to a view
            if not again:
                self.give(proxy.name)
            for name in bound.inputs:
                if name in self.values:
                    self.graph.add_edge((name, 1), (proxy.name, 0))

    def take(self, names: Iterable[str]) -> None:
        """Add the backward's reads."""
        for name in names:
            self.graph.add_edge((name, 1), _SINK)

    def computed_again(self) -> set[str]:
        """Return the names of the values on the backward's side of the cut."""
        if not self.graph.in_degree(_SINK):
            return set()
        _, (near, _) = networkx.minimum_cut(self.graph, _SOURCE, _SINK, flow_func=boykov_kolmogorov)
        return {name for name in self.values if (name, 0) not in near}


def _bytes(proxy: Proxy) -> int:
    """Return a value's bytes; symbolic sizes have their values at recording time."""
    if not isinstance(proxy, TensorProxy):
        return 8
    count = proxy.element_size()
    for size in proxy.shape:
        count *= hint_of(size)
    return max(int(count), 1)
