"""Partition of a claimed program into CUDA graphs, which become calls of the program."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from forge import prims
from forge.executors.torchex import recurrent
from forge.executors.torchex.cudnn_rnn import steps
from forge.ir import BoundSymbol, NumberProxy, Proxy, Symbol, Tag, TensorProxy, Trace
from forge.ir.printing import STATEMENTS
from forge.ir.proxies import SYMBOLIC_TYPES
from forge.ir.pytree import proxies, tensors
from forge.runtime.cuda_graphs import Graph
from forge.runtime.cuda_memory import Pool
from forge.runtime.cuda_recorder import recorder
from forge.transforms.makers import innermost, is_view

LIST = Symbol("list", "python.list", meta=lambda values: None, op=list)  # the arguments of a graph
_FEWEST = 2  # calls: launching a graph of one costs as much as the call, unless the call has steps
_OUTSIDE_SHARE = 0.2  # the largest share of a program's calls outside of graphs, if CUDA graphs were not requested
_OUTSIDE = {
    Tag.OPAQUE: "the call is an opaque call",
    Tag.EFFECT: "the call has an effect",
    Tag.SYNCHRONIZING: "the call reads values back to Python",
    Tag.DONATES: "whether it writes to its argument is decided when it runs",
}


Generate = Callable[[Trace], Callable[..., Any]]


def record(
    trace: Trace,
    pool: Pool,
    generate: Generate,
    escapes: Collection[str] = (),
    trusted: Collection[str] = (),
    transient: Collection[str] = (),
    *,
    is_requested: bool = True,
) -> Trace:
    """Return the claimed trace with each run of recordable calls as one call of a Graph, whose function `generate`
    returns.

    Args:
        trace: The claimed trace.
        pool: The memory pool of its graphs.
        generate: Returns the function of a trace.
        escapes: Outputs that may outlive the call.
        trusted: Inputs whose metadata are the same at each call, if their sizes are.
        transient: Inputs that are different tensors at each call.
        is_requested: False if CUDA graphs were not requested.
    """
    first, others = _calls_that_run_first(trace, escapes)
    pieces: list[list[BoundSymbol]] = [[]]
    for bound in others:
        if why_not(bound) is None:
            pieces[-1].append(bound)
        else:
            pieces += [[bound], []]
    make = partial(Graph, pool=pool, is_requested=is_requested)
    writer = _Writer(trace, make, generate, frozenset(escapes), frozenset(trusted), frozenset(transient))
    writer.calls += first
    for piece in pieces:
        writer.piece(piece)
    return trace.derive("cuda_graphs", writer.calls) if writer.graphs else trace


def has_symbolic_sizes(trace: Trace) -> bool:
    """Return whether an input has a symbolic size."""
    return any(isinstance(length, SYMBOLIC_TYPES) for proxy in tensors([*trace.inputs]) for length in proxy.shape)


def can_record(trace: Trace) -> bool:
    """Return whether most calls of a claimed trace can be recorded."""
    _, others = _calls_that_run_first(trace, ())
    calls = [bound for bound in others if bound.symbol not in STATEMENTS and not is_view(bound)]
    outside = sum(why_not(bound) is not None for bound in calls)
    return not _are_few(calls) and outside <= len(calls) * _OUTSIDE_SHARE


def _are_few(calls: list[BoundSymbol]) -> bool:
    """Return whether there are too few calls for a graph."""
    return len(calls) < _FEWEST and sum(map(steps, calls)) < _FEWEST


def _calls_that_run_first(trace: Trace, escapes: Collection[str]) -> tuple[list[BoundSymbol], list[BoundSymbol]]:
    """Return the calls that run before all graphs, so that they do not split them, and the others.

    The first are the calls whose outputs are views of inputs, since a graph would return a view of its copy of the
    input, and calls on other devices that depend on no later call, such as draws of random numbers on the CPU.
    """
    makers = {name: bound for bound in trace.bound_symbols for name in bound.outputs}
    inputs = {proxy.name for proxy in trace.inputs}
    views: dict[int, BoundSymbol] = {}
    for name in escapes:
        base, chain = _through_views(name, makers)
        if base in inputs:
            views.update((id(bound), bound) for bound in chain)
    available = inputs | trace.constants.keys()
    keeps_draws = False  # an earlier call that does not run first may draw on another device
    first: list[BoundSymbol] = []
    others: list[BoundSymbol] = []
    for bound in trace.bound_symbols:
        is_elsewhere = _OUTSIDE.keys().isdisjoint(bound.all_tags) and bool(tensors(bound.output))
        is_elsewhere = is_elsewhere and all(x.device.type != recorder().device_type for x in tensors([bound.output]))
        is_draw = Tag.RANDOM in bound.all_tags
        is_elsewhere = is_elsewhere and available.issuperset(bound.inputs) and not (is_draw and keeps_draws)
        if id(bound) in views or is_elsewhere:
            first.append(bound)
            available |= set(bound.outputs)
        else:
            others.append(bound)
            keeps_draws |= (is_draw or Tag.OPAQUE in bound.all_tags) and why_not(bound) is not None
    return first, others


def _through_views(name: str, makers: Mapping[str, BoundSymbol]) -> tuple[str, list[BoundSymbol]]:
    """Return the base of a value, and the views between them."""
    chain: list[BoundSymbol] = []
    while name in makers and is_view(makers[name]) and len(tensors([makers[name].args])) == 1:
        chain.append(makers[name])
        name = tensors([makers[name].args])[0].name
    return name, chain


def why_not(bound: BoundSymbol) -> str | None:
    """Return why a call is in no graph."""
    declined = recurrent.why_not_recorded(bound)
    if declined is not None:
        return declined
    writes = _writes_alone(bound)
    for tag, reason in _OUTSIDE.items():
        if tag in bound.all_tags and not (writes and tag is Tag.EFFECT):
            return reason
    operands = tensors([bound.args, bound.kwargs, bound.output])
    if not tensors(bound.output) and not writes:
        return "the call returns no tensor"
    for proxy in operands:
        if proxy.device.type != recorder().device_type:
            return f"{proxy.name} is on {proxy.device}"
    return "the call's tensors are on several devices" if len({proxy.device for proxy in operands}) > 1 else None


def _writes_alone(bound: BoundSymbol) -> bool:
    """Return whether a call only copies tensors into the memory of others."""
    return all(call.symbol is prims.copy_ for call in innermost(bound))


class _Writer:
    def __init__(
        self,
        trace: Trace,
        make: Callable[..., Graph],
        generate: Generate,
        escapes: frozenset[str],
        trusted: frozenset[str],
        transient: frozenset[str],
    ) -> None:
        self.trace = trace
        self.make = make
        self.generate = generate
        self.escapes = escapes
        self.trusted = set(trusted)
        self.transient = transient
        self.calls: list[BoundSymbol] = []
        self.graphs = 0
        self.outputs = set(trace.output_names)
        self.proxies = {proxy.name: proxy for proxy in trace.inputs}
        self.lengths = {proxy.name for proxy in trace.inputs if isinstance(proxy, NumberProxy)}
        self.readers: dict[str, list[int]] = {}
        self.makers = {name: bound for bound in trace.bound_symbols for name in bound.outputs}
        self.last_readers: dict[str, int] = {}
        for bound in trace.bound_symbols:
            self.last_readers.update(dict.fromkeys(bound.inputs, id(bound)))
            self.proxies.update((proxy.name, proxy) for proxy in proxies(bound.output))
            for name in bound.reads(self.lengths):
                self.readers.setdefault(name, []).append(id(bound))

    def piece(self, calls: list[BoundSymbol]) -> None:
        """Write one call for the whole run, or the calls themselves."""
        if _are_few(calls):
            self.calls += calls
            return
        definitions = [proxy for bound in calls for proxy in proxies(bound.output)]
        inside = set(map(id, calls))
        outputs = {
            proxy.name: proxy
            for proxy in definitions
            if proxy.name in self.outputs or any(reader not in inside for reader in self.readers.get(proxy.name, ()))
        }
        inputs = self._inputs_of(calls, {proxy.name for proxy in definitions})
        results = tuple(outputs.values())
        name = f"graph{self.graphs}"
        body = self.trace.derive(f"of {name}", calls, name=name, inputs=inputs, output=results)
        body.boxed = True
        body.constants.clear()
        checked = [
            place
            for place, proxy in enumerate(inputs)
            if isinstance(proxy, TensorProxy) and (proxy.name not in self.trusted or _may_differ(proxy))
        ]
        writes = [call for bound in calls if _writes_alone(bound) for call in innermost(bound)]
        writes += [bound for bound in calls if Tag.IN_PLACE in bound.all_tags]
        targets = {_through_views(each.name, self.makers)[0] for call in writes for each in tensors([call.args[0]])}
        graph = self.make(
            name,
            self.generate(body),
            returned=[proxy.name in self.escapes for proxy in results],
            checked=checked,
            writes=[
                place for place, proxy in enumerate(inputs) if _through_views(proxy.name, self.makers)[0] in targets
            ],
            last=[place for place, proxy in enumerate(inputs) if self._dies_in(proxy.name, inside)],
            transient=[place for place, proxy in enumerate(inputs) if proxy.name in self.transient],
            has_symbolic_sizes=bool(self.lengths),
        )
        self.trusted |= outputs.keys()
        boxed = Proxy(self.trace.fresh_name(f"{name}_inputs"))
        self.calls.append(BoundSymbol(LIST, (inputs,), {}, boxed))
        symbol = Symbol(name, f"forge.{name}", meta=lambda boxed: results, op=graph)
        self.graphs += 1
        self.calls.append(BoundSymbol(symbol, (boxed,), {}, results, calls, source=calls[0].source))

    def _dies_in(self, name: str, calls: Collection[int]) -> bool:
        """Return whether one of these calls is the last user of a value that does not escape."""
        is_held = name in self.outputs or name in self.trace.constants
        is_held |= name in self.trace.input_names and not self.trace.boxed
        return not is_held and self.last_readers.get(name) in calls

    def _inputs_of(self, calls: list[BoundSymbol], definitions: set[str]) -> list[Proxy]:
        read = dict.fromkeys(name for bound in calls for name in bound.reads(self.lengths) if name not in definitions)
        return [self._proxy(name) for name in read if name in self.proxies or name in self.trace.constants]

    def _proxy(self, name: str) -> Proxy:
        return self.proxies[name] if name in self.proxies else self.trace.constant_proxy(name)


def _may_differ(proxy: TensorProxy) -> bool:
    """Return whether sizes or strides are symbolic, or unknown."""
    return proxy.strides is None or any(isinstance(each, SYMBOLIC_TYPES) for each in (*proxy.shape, *proxy.strides))
