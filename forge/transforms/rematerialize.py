"""Rematerialization: save or recompute each value that a backward reads, so that the fewest bytes are saved.

The forward is a network from its inputs to what the backward reads. Each value is an edge whose capacity is its bytes;
the minimum cut is what to save, and what lies between the cut and the backward is computed again. Inputs that the
backward reads anyway, and parameters of modules, cost nothing; others are saved as copies, since their memory may
change. Calls that are not cheap to run twice (a matrix product, attention, an embedding), draw random numbers or are
opaque are never on the far side of the cut.

Nor are values that link the layers, such as the hidden states that each layer adds to: to compute the last of them
again is to compute all of them, in one kernel when the backward begins, and to hold them until each layer's turn. By
their *level*, the number of calls that run once between the inputs and a value, a chain of calls that run again ends
where the level rises.

Source: T. Chen et al., Training Deep Nets with Sublinear Memory Cost (2016), for computing again; a cut as in the
partitioners of AOTAutograd (torch._functorch.partitioners).
"""

from collections.abc import Callable, Collection, Iterable, Set

import networkx
from networkx.algorithms.flow import boykov_kolmogorov

from forge.ir import BoundSymbol, Proxy, Tag, TensorProxy, Trace
from forge.ir.proxies import hint_of
from forge.ir.pytree import proxies
from forge.transforms.dce import KEPT, live_calls
from forge.transforms.makers import is_view
from forge.transforms.split import free_names, unfold

_NEVER = KEPT | {Tag.OPAQUE, Tag.UNINITIALIZED, Tag.SYNCHRONIZING, Tag.OPAQUE_TO_PASSES}
_SOURCE, _SINK = "source", "sink"


def rematerialize(
    forward: Trace,
    backward: Trace,
    cheap: Callable[[BoundSymbol], bool],
    copied: Collection[str] = (),
    unread: Set[str] = frozenset(),
    *,
    chains: bool = False,
) -> Trace:
    """Return the forward with the calls that the backward is to run again tagged Tag.RECOMPUTE.

    cheap: whether a call may be run twice. copied: values of which only a copy can be saved. unread: values that no
    call reads again. chains: whether chains of calls may lead through the levels, which saves the fewest bytes.
    """
    sizes = {proxy.name for proxy in forward.inputs if not isinstance(proxy, TensorProxy)}
    read = set(free_names(backward, sizes))
    wanted = {*read, *forward.output_names}
    calls = live_calls(unfold(forward.bound_symbols, wanted), wanted)
    exact = {name for bound in backward.bound_symbols if Tag.NO_FUSE in bound.tags for name in bound.inputs}
    again = [_may_run_again(bound, cheap, exact) and unread.isdisjoint(bound.inputs) for bound in calls]
    if not any(again):
        return forward
    if not chains:
        links = _links(calls, again)
        again = [twice and links.isdisjoint(bound.outputs) for bound, twice in zip(calls, again, strict=True)]
    network = _Network(copied)
    for proxy in forward.inputs:
        network.add(proxy, _bytes(proxy) if proxy.name in copied else 0)
        network.give(proxy.name)
    for name in forward.constants:
        network.add(Proxy(name), 0)
        network.give(name)
    for bound, twice in zip(calls, again, strict=True):
        network.run(bound, twice)
    network.take(name for name in read if name in network.values)
    computed = network.computed_again()
    if not computed:
        return forward
    again = [bool(bound.outputs) and computed.issuperset(bound.outputs) for bound in calls]
    calls = [_to_recompute(bound) if each else bound for bound, each in zip(calls, again, strict=True)]
    return forward.derive("rematerialize", calls)


def _may_run_again(bound: BoundSymbol, cheap: Callable[[BoundSymbol], bool], exact: set[str]) -> bool:
    """exact: values that are compared with what the forward made of them."""
    if not _NEVER.isdisjoint(bound.all_tags):
        return False
    return Tag.RECOMPUTE in bound.tags or (exact.isdisjoint(bound.outputs) and cheap(bound))


def _links(calls: Iterable[BoundSymbol], again: Iterable[bool]) -> set[str]:
    """Return the values that calls of a higher level would read to run again. A value that depends on the inputs alone
    links nothing."""
    levels: dict[str, int] = {}
    computed: set[str] = set()
    links: set[str] = set()
    for bound, twice in zip(calls, again, strict=True):
        level = max((levels.get(name, 0) for name in bound.inputs), default=0)
        if twice:
            links.update(name for name in bound.inputs if name in computed and 0 < levels[name] < level)
            computed.update(bound.outputs)
        elif not is_view(bound):
            level += 1
        levels.update(dict.fromkeys(bound.outputs, level))
    return links


def _to_recompute(bound: BoundSymbol) -> BoundSymbol:
    return bound.replace(tags=bound.tags | {Tag.RECOMPUTE})


class _Network:
    """Values as edges (name, 0) → (name, 1); who may run again leads from what it reads to what it makes."""

    def __init__(self, copied: Collection[str]) -> None:
        self.graph = networkx.DiGraph()
        self.graph.add_nodes_from((_SOURCE, _SINK))
        self.values: set[str] = set()
        self.copied = copied

    def add(self, proxy: Proxy, bytes: int) -> None:
        """Add a value."""
        self.values.add(proxy.name)
        made = proxy.name in self.copied  # of values of one size, one that is there anyway
        self.graph.add_edge((proxy.name, 0), (proxy.name, 1), capacity=bytes + made)

    def give(self, name: str) -> None:
        """Make a value available."""
        self.graph.add_edge(_SOURCE, (name, 0))

    def run(self, bound: BoundSymbol, again: bool) -> None:
        """Add a call of the forward."""
        view = is_view(bound)
        for proxy in proxies(bound.output):
            if proxy.name not in bound.outputs or proxy.name in self.values:
                continue
            self.add(proxy, _bytes(proxy) + view)  # rather than a view, what it shows
            if not again:
                self.give(proxy.name)
            for name in bound.inputs:
                if name in self.values:
                    self.graph.add_edge((name, 1), (proxy.name, 0))

    def take(self, names: Iterable[str]) -> None:
        """Have the backward read these."""
        for name in names:
            self.graph.add_edge((name, 1), _SINK)

    def computed_again(self) -> set[str]:
        """Return the names of the values that are on the backward's side of the cut."""
        if not self.graph.in_degree(_SINK):
            return set()
        _, (near, _) = networkx.minimum_cut(self.graph, _SOURCE, _SINK, flow_func=boykov_kolmogorov)
        return {name for name in self.values if (name, 0) not in near}


def _bytes(proxy: Proxy) -> int:
    """Return a value's bytes; of a symbolic size, what it was when the program was recorded."""
    if not isinstance(proxy, TensorProxy):
        return 8
    count = proxy.element_size()
    for size in proxy.shape:
        count *= hint_of(size)
    return max(int(count), 1)
