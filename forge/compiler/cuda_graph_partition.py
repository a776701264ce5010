"""Partition of a claimed program into CUDA graphs, and the program with those graphs as calls."""

from collections.abc import Callable, Iterable
from typing import Any

from forge.ir import BoundSymbol, NumberProxy, Proxy, Symbol, Tag, Trace
from forge.ir.pytree import proxies, tensors
from forge.runtime.cuda_graphs import Graph, Pool, recorder

_FEWEST = 2  # calls: a graph of one launches as much as the call does
_OUTSIDE = {
    Tag.OPAQUE: "the call is an opaque call",
    Tag.EFFECT: "the call has an effect",
    Tag.SYNCHRONIZING: "the call reads values back to Python",
    Tag.DONATES: "whether it writes to its argument is decided when it runs",
}


Generate = Callable[[Trace], Callable[..., Any]]


def record(trace: Trace, pool: Pool, generate: Generate, kept: Iterable[str] = ()) -> Trace:
    """Return the claimed trace with every run of calls that can be recorded as one call of a Graph, whose function is
    `generate`d. The outputs `kept` are for others to keep: they do not share a graph's memory."""
    pieces: list[list[BoundSymbol]] = [[]]
    for bound in trace.bound_symbols:
        if why_not(bound) is None:
            pieces[-1].append(bound)
        else:
            pieces += [[bound], []]
    writer = _Writer(trace, pool, generate, frozenset(kept))
    for piece in pieces:
        writer.piece(piece)
    return trace.derive("cuda_graphs", writer.calls) if writer.graphs else trace


def why_not(bound: BoundSymbol) -> str | None:
    """Return why a call is in no graph."""
    for tag, reason in _OUTSIDE.items():
        if tag in bound.all_tags:
            return reason
    found = tensors([bound.args, bound.kwargs, bound.output])
    if not tensors(bound.output):
        return "the call returns no tensor"
    for proxy in found:
        if proxy.device.type != recorder().device_type:
            return f"{proxy.name} is on {proxy.device}"
    return "the call's tensors are on several devices" if len({proxy.device for proxy in found}) > 1 else None


class _Writer:
    def __init__(self, trace: Trace, pool: Pool, generate: Generate, kept: frozenset[str]) -> None:
        self.trace = trace
        self.pool = pool
        self.generate = generate
        self.kept = kept
        self.calls: list[BoundSymbol] = []
        self.graphs = 0
        self.outputs = set(trace.output_names)
        self.proxies = {proxy.name: proxy for proxy in trace.inputs}
        self.lengths = {proxy.name for proxy in trace.inputs if isinstance(proxy, NumberProxy)}
        self.readers: dict[str, list[int]] = {}
        for bound in trace.bound_symbols:
            self.proxies.update((proxy.name, proxy) for proxy in proxies(bound.output))
            for name in bound.reads(self.lengths):
                self.readers.setdefault(name, []).append(id(bound))

    def piece(self, calls: list[BoundSymbol]) -> None:
        """One call for all of them, or they themselves."""
        if len(calls) < _FEWEST:
            self.calls += calls
            return
        made = [proxy for bound in calls for proxy in proxies(bound.output)]
        inside = set(map(id, calls))
        wanted = {
            proxy.name: proxy
            for proxy in made
            if proxy.name in self.outputs or any(reader not in inside for reader in self.readers.get(proxy.name, ()))
        }
        given = self._inputs_of(calls, {proxy.name for proxy in made})
        results = tuple(wanted.values())
        name = f"graph{self.graphs}"
        body = self.trace.derive(f"of {name}", calls, name=name, inputs=given, output=results)
        body.boxed = False
        body.constants.clear()
        graph = Graph(name, self.generate(body), self.pool, [proxy.name in self.kept for proxy in results])
        symbol = Symbol(name, f"forge.{name}", meta=lambda *args: results, op=graph)
        self.graphs += 1
        self.calls.append(BoundSymbol(symbol, tuple(given), {}, results, calls, source=calls[0].source))

    def _inputs_of(self, calls: list[BoundSymbol], made: set[str]) -> list[Proxy]:
        read = dict.fromkeys(name for bound in calls for name in bound.reads(self.lengths) if name not in made)
        return [self._proxy(name) for name in read if name in self.proxies or name in self.trace.constants]

    def _proxy(self, name: str) -> Proxy:
        return self.proxies[name] if name in self.proxies else self.trace.constant_proxy(name)
