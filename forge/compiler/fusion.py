"""The fusion pass: partition calls claimed by fusion executors into regions, and compile each region to one call."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from forge.compiler.claim import Claim, ClaimedCall
from forge.compiler.fallback import Fallback, fallback_for, runners, warn_of_fallback
from forge.compiler.layout import RESTRIDED, FakeRun, Layout, Layouts, is_predictable
from forge.compiler.region_artifacts import FusedRegion, compile_once, region_key
from forge.compiler.regions import Node, Region, find_regions
from forge.compiler.unspecified_strides import with_unspecified
from forge.executors.errors import RegionError
from forge.executors.executor import Declined, Executor, FusionExecutor, call_checker, decline, is_own
from forge.ir import BoundSymbol, NumberProxy, Proxy, Symbol, Tag, TensorProxy, Trace
from forge.ir.bounded import BoundedDict
from forge.ir.checks import in_one_line, without_frames
from forge.ir.pytree import names, proxies, rename
from forge.ir.strides import Metadata, contiguous, in_row_major, reinterpreted, same
from forge.ir.symbol import substitute
from forge.support import progress

REASONS = 1024  # the most reasons of failed regions to remember

_warnings: BoundedDict = BoundedDict(REASONS)  # many regions fail at once if a disk is full
_FIXED = (type(None), bool, int, float, tuple)  # types of a region's constants

REINTERPRETED = Symbol(
    "reinterpreted",
    "forge.reinterpreted",
    meta=lambda x, shape, strides, offset: x,
    tags=frozenset({Tag.VIEW}),
    op=reinterpreted,
)
CONTIGUOUS = Symbol(
    "contiguous",
    "forge.contiguous",
    meta=lambda x, metadata=None: x,
    tags=frozenset({Tag.MAY_BE_VIEW}),
    op=in_row_major,
)


class FusionResult(NamedTuple):
    """A trace's calls with fused regions in them.

    unfused: why a call that a fusion executor accepts runs outside of regions, by the call's first output.
    regions: the region that runs a call, by the same. fixed: the values of a region that are not tensors, by
    name. fallbacks: the fallbacks of regions, by the names of their calls. fused: the fused regions.
    """

    calls: list[BoundSymbol]
    unfused: dict[str, str]
    regions: dict[str, str]
    fixed: dict[str, Any]
    fallbacks: dict[str, Fallback]
    fused: list[FusedRegion]


def fuse_claimed(
    trace: Trace,
    claimed: Sequence[ClaimedCall],
    executors: Sequence[Executor],
    layouts: Layouts | None,
    *,
    strict: bool,
) -> tuple[Trace, list[Claim], list[FusedRegion]]:
    """Return the claimed trace with fused regions, the claims, and the fused regions."""
    fuses = any(isinstance(each, FusionExecutor) for each in executors)
    if not fuses or (layouts is None and not any(each.fuser for each in claimed)):
        return trace, [claim for each in claimed for claim in each.claims], []
    layouts = Layouts(trace.inputs) if layouts is None else layouts
    layouts.add_constants(trace.constants)
    nodes: list[Node] = []
    for each in claimed:
        nodes += _nodes(each, layouts)
    new = trace.derive("fuse")
    result = fuse_regions(new, nodes, layouts, strict=strict)
    new.bound_symbols.extend(result.calls)
    new.output = rename(new.output, result.fixed)
    return new, [claim for each in claimed for claim in _claims(each, result)], result.fused


def _nodes(claimed: ClaimedCall, layouts: Layouts) -> list[Node]:
    """Return the nodes of a call for the partition. A call whose strides cannot be known loses its fusion
    executor."""
    ran = [layouts.run(call) for call in claimed.calls]
    if claimed.fuser is not None and claimed.fuser.strided:
        reason = _unknown_at_compile_time(claimed, ran, layouts)
        if reason is not None:
            _decline(claimed, reason)
            claimed.fuser = None
    if claimed.fuser is None:
        return [Node(call, [call], None) for call in claimed.calls]
    node = Node(claimed.bound, claimed.calls, claimed.fuser)
    pairs = zip(claimed.calls, ran, strict=True)
    node.view = bool(claimed.calls) and all(None not in _output_aliases(call, each) for call, each in pairs)
    return [node]


def _unknown_at_compile_time(claimed: ClaimedCall, ran: list[FakeRun], layouts: Layouts) -> str | None:
    """Return why a claimed call cannot be part of code generated now; None if it can."""
    if not all(each.is_exact for each in ran):
        others = [call.symbol.executor for call in claimed.calls if not is_own(call.symbol.op)]
        name = next((each.name for each in others if each is not None), None)
        cause = "" if name is None else f": outside of a region executor {name} runs it, whose function may give any"
        return f"the strides of its results are not known{cause}"
    if any(each.is_turned for each in ran):
        return "an index of symbolic sizes decides the order of its result"
    others = [each for each in proxies(claimed.bound.args) if not isinstance(each, (TensorProxy, NumberProxy))]
    if not all(proxy.name in layouts.fixed for proxy in others):
        return "the call reads a value that is known only when the program runs"
    runtime_values = [value for each in ran for value in each.outputs if not isinstance(value, (Layout, *_FIXED))]
    return "the call saves a value that exists only when the program runs" if runtime_values else None


def _output_aliases(call: BoundSymbol, ran: FakeRun) -> list[int | None]:
    """Return, for each tensor of a call's output, the argument that it aliases."""
    return [share for value, share in zip(ran.outputs, ran.shares, strict=True) if isinstance(value, Layout)] or [None]


def _claims(claimed: ClaimedCall, result: FusionResult) -> list[Claim]:
    if claimed.fuser is None:
        return claimed.claims
    name = claimed.bound.outputs[0]
    reason = result.unfused.get(name)
    if reason is None:
        region = result.regions.get(name)
        fallback = None if region is None else result.fallbacks.get(region)
        return [Claim.of(claimed.bound, claimed.fuser.name, claimed.declined, claimed.level, region, fallback)]
    _decline(claimed, reason)
    return claimed.claims


def _decline(claimed: ClaimedCall, reason: str) -> None:
    """Record why the fusion executor that claimed a call leaves it to later executors."""
    assert claimed.fuser is not None
    for claim in claimed.claims:
        claim.declined.append((claimed.fuser.name, reason))


def fuse_regions(trace: Trace, nodes: Sequence[Node], layouts: Layouts, *, strict: bool = False) -> FusionResult:
    """Return the calls that run a trace: its regions, and the calls of nodes outside of regions. strict: a region
    that fails is an error."""
    writer = _Writer(trace, nodes, layouts, strict=strict)
    plan = find_regions(nodes, trace.output_names)
    progress.expect(sum(isinstance(item, Region) for item in plan))
    for item in plan:
        if isinstance(item, Region):
            writer.region(item)
            progress.advance()
        else:
            writer.single(item)
    writer.ready(trace.output_names)
    fixed = {name: layouts.values[name] for name in writer.fixed}
    layouts.fixed.update(fixed)
    calls = [substitute(call, fixed) for call in writer.calls]
    fallbacks = {name: each for each in writer.fallbacks.values() if each is not None for name in each.regions}
    return FusionResult(calls, writer.unfused, writer.regions, fixed, fallbacks, writer.fused)


class _Writer:
    def __init__(self, trace: Trace, nodes: Sequence[Node], layouts: Layouts, *, strict: bool) -> None:
        self.trace = trace
        self.strict = strict
        self.layouts = layouts
        self.calls: list[BoundSymbol] = []
        self.unfused: dict[str, str] = {}
        self.regions: dict[str, str] = {}
        self.there = {*trace.input_names, *trace.constants}
        self.makers = {name: node for node in nodes for name in node.makes}
        self.order = {id(node): position for position, node in enumerate(nodes)}
        self.outputs = set(trace.output_names)
        values = [*trace.inputs, *(proxy for node in nodes for proxy in proxies([node.bound.args, node.bound.kwargs]))]
        values += [proxy for node in nodes for proxy in proxies(node.bound.output)]
        self.proxies = {proxy.name: proxy for proxy in values}
        self.numbers = {name: proxy for name, proxy in self.proxies.items() if isinstance(proxy, NumberProxy)}
        self.checks = any(node.fuser is not None and node.fuser.checks_regions for node in nodes)
        self.visible = self._visible(nodes) if self.checks else set()
        self.restrided: dict[str, TensorProxy] = {}
        self.fixed: set[str] = set()
        self.fallbacks: dict[Any, Fallback | None] = {}  # identical regions share one
        self.count = 0
        self.fused: list[FusedRegion] = []

    def _visible(self, nodes: Sequence[Node]) -> set[str]:
        """Return the values whose strides determine those of the program's results."""
        visible = set(map(self._memory, self.outputs))
        for call in (call for node in reversed(nodes) for call in reversed(node.calls)):
            if not visible.isdisjoint(map(self._memory, call.outputs)):
                operands = [name for name in call.inputs if isinstance(self.layouts.values.get(name), Layout)]
                visible.update(self._memory(name) for name in operands if self.layouts.follows(call, [name]))
        return visible

    def _memory(self, name: str) -> str:
        """Return the base of a value: the value whose memory it aliases."""
        return self.layouts.views.get(name, (name, 0))[0]

    def single(self, node: Node) -> None:
        """Write the call as it is."""
        self.ready(node.reads)
        if node.view:
            self.unfused[node.makes[0]] = "a view is read outside of its regions"
        calls = node.calls
        if self.checks:
            calls = [with_unspecified(call, self.layouts, self.visible) for call in calls]
        self.calls.extend(calls)
        self.there.update(node.makes)
        for call in node.calls:
            self.layouts.settle(call)

    def ready(self, targets: Iterable[str]) -> None:
        """Write the views that these names stand for, unless they are already written."""
        for name in targets:
            node = self.makers.get(name)
            if node is not None and node.view and name not in self.there and not self._write_as_strided(name, node):
                self.single(node)

    def _write_as_strided(self, name: str, node: Node) -> bool:
        """Replace a chain of views by one as_strided call, if the base's strides are known and no other code sees
        it. Return whether it did."""
        base, offset = self.layouts.views.get(name, (None, 0))
        if base not in self.there or base in self.layouts.uncertain or name in self.outputs or self.layouts.is_symbolic:
            return False
        memory, layout = self.layouts.values[base], self.layouts.values[name]
        if not isinstance(layout, Layout) or memory.dtype != layout.dtype or not (memory.is_plain and layout.is_plain):
            return False
        self.unfused[node.makes[0]] = "a view is read outside of its regions"
        args = (self._proxy(base), layout.shape, layout.strides, offset)
        self.calls.append(BoundSymbol(REINTERPRETED, args, {}, self.proxies[name], source=node.bound.source))
        self.there.add(name)
        return True

    def region(self, region: Region) -> None:
        """Write one call for the whole region, or its calls if the executor declines."""
        escaping = list(self._escaping_names(region))
        if not escaping:
            return
        outputs = [name for name in escaping if isinstance(self.layouts.values[name], Layout)]
        body, inputs = self._body(region)
        self.ready(inputs)
        key, function = self._artifact(region, body, inputs, outputs)
        if isinstance(function, Declined):
            if function.error is not None:
                self._warn_of_failure(region, function.error)
            self.unfused.update((node.makes[0], function.reason) for node in region.nodes)
            for node in region.nodes:
                self.single(node)
            return
        self.fused.append(FusedRegion(region.fuser, function))
        name = self._name()
        arguments = [self._region_input(region.fuser, each) for each in inputs]
        results = tuple(self.proxies[each] for each in outputs)
        fallback = self._fallback(region, (region.fuser, key or name), body, inputs, results)
        symbol = Symbol(
            name,
            f"{region.fuser.name}.{name}",
            meta=lambda *args: results,
            executor=region.fuser,
            op=function,
            fallback=fallback,
        )
        if fallback is not None:
            fallback.regions.append(symbol.id)
        args = (arguments,) if region.fuser.boxed else tuple(arguments)
        inside = [node.bound for node in body]
        self.regions.update((node.makes[0], symbol.id) for node in body)
        self.calls.append(BoundSymbol(symbol, args, {}, results, inside, source=region.nodes[0].bound.source))
        self.there.update(escaping)
        self.fixed.update(name for name in escaping if name not in outputs)
        if region.fuser.strided:
            own = {each for node in body for each in node.makes}
            self.layouts.uncertain -= {each for each in self.layouts.uncertain if self._memory(each) in own}
        else:
            self.layouts.uncertain.update(outputs)

    def _name(self) -> str:
        self.count += 1
        return f"fusion{self.count - 1}"

    def _warn_of_failure(self, region: Region, error: Exception) -> None:
        """Warn, once per process and reason, of a region that failed to compile. Raises RegionError under
        `strict`."""
        sources = [node.bound.source for node in region.nodes]
        source = next((each for each in sources if each is not None and each.place is not None), None)
        what = f"{region.fuser.name}.{self._name()} cannot be compiled"
        reason = in_one_line(error)
        if self.strict:
            at = "" if source is None else f"{source.line}: "
            raise RegionError(f"forge: {what}: {at}{reason}") from error
        if (region.fuser.name, reason) not in _warnings:
            _warnings[region.fuser.name, reason] = True
            warn_of_fallback(what, runners(call for node in region.nodes for call in node.calls), error, source)
        without_frames(error)

    def _escaping_names(self, region: Region) -> Iterator[str]:
        """Yield the names that consumers outside of the region read, through views too."""
        inside = set(map(id, region.nodes))
        for node in region.nodes:
            for name in node.makes:
                if self._escapes(name, node, inside, region.fuser):
                    yield name

    def _escapes(self, name: str, node: Node, inside: set[int], fuser: FusionExecutor) -> bool:
        if name in self.outputs:
            return True
        for reader in node.readers:
            if name not in reader.reads or id(reader) in inside:
                continue
            if not reader.view or reader.fuser is not fuser:
                return True
            if any(self._escapes(view, reader, inside, fuser) for view in reader.makes):
                return True
        return False

    def _body(self, region: Region) -> tuple[list[Node], list[str]]:
        """Return the region's calls with the views that it reads, in order, and the names of its inputs."""
        definitions = {name for node in region.nodes for name in node.makes}
        body = list(region.nodes)
        inputs: dict[str, None] = {}
        waiting = [name for node in reversed(region.nodes) for name in reversed(self._reads(node))]
        while waiting:
            name = waiting.pop()
            if name in definitions or name in inputs:
                continue
            maker = self.makers.get(name)
            if maker is not None and maker.view and maker.fuser is region.fuser:
                body.append(maker)
                definitions.update(maker.makes)
                waiting += self._reads(maker)
            else:
                inputs[name] = None
        inputs = {name: None for name in inputs if name not in self.layouts.fixed}
        body.sort(key=lambda node: self.order[id(node)])
        sizes = [each for name in inputs for each in names(self.layouts.values[name]) if each in self.numbers]
        return body, list(dict.fromkeys([*inputs, *(each for each in sizes if each in self.there)]))

    def _reads(self, node: Node) -> list[str]:
        return [name for name in node.bound.reads(self.numbers) if name in self.proxies or name in self.trace.constants]

    def _region_input(self, fuser: FusionExecutor, name: str) -> Proxy:
        """Return the input of a region: with the strides that its code is compiled for, in memory that holds the
        values."""
        proxy = self._proxy(name)
        if not isinstance(proxy, TensorProxy):
            return proxy
        layout = self.layouts.values[name]
        uncertain = fuser.strided and name in self.layouts.uncertain
        if not uncertain and layout.is_plain:
            return proxy
        if name not in self.restrided:
            new = self.trace.tensor(proxy.shape, proxy.dtype, proxy.device, name=f"{name}_restrided")
            if _is_contiguous(layout):  # for all sizes
                self.calls.append(BoundSymbol(CONTIGUOUS, (proxy, *self._metadata(name)), {}, new))
            else:
                self.calls.append(BoundSymbol(RESTRIDED, (proxy, layout.strides, *self._metadata(name)), {}, new))
            self.restrided[name] = new
        return self.restrided[name]

    def _metadata(self, name: str) -> tuple[Metadata, ...]:
        """Return the metadata to require at run time of the result of a call that does not run on fake tensors; empty
        for other values."""
        base, maker = self.proxies[name], self.makers.get(name)
        if maker is None or not isinstance(base, TensorProxy) or is_predictable(maker.bound):
            return ()
        there = (self.there.issuperset(names(length)) for length in base.shape)
        shape = tuple(length if is_there else None for length, is_there in zip(base.shape, there, strict=True))
        return ((maker.bound.symbol.id, base.dtype, shape),)

    def _can_be_restrided(self, name: str) -> bool:
        layout = self.layouts.values[name]
        if name not in self.layouts.uncertain or not isinstance(layout, Layout) or _is_contiguous(layout):
            return True
        return self.there.issuperset(names(layout.strides))

    def _proxy(self, name: str) -> Proxy:
        return self.proxies[name] if name in self.proxies else self.trace.constant_proxy(name)

    def _artifact(
        self, region: Region, body: list[Node], inputs: list[str], outputs: list[str]
    ) -> tuple[tuple[Any, ...] | None, Callable[..., Any] | Declined]:
        """Return the key that identical regions share, or None, and the region's function."""
        if not outputs:
            return None, decline("the region returns no tensor")
        pays = call_checker(region.fuser.is_profitable, [node.bound for node in region.nodes])
        if not pays:
            size = len(region.nodes)
            slower = "one call is slower than the call" if size == 1 else f"{size} calls is slower than the calls"
            return None, pays if isinstance(pays, Declined) else decline(f"not fused: a region of {slower}")
        if region.fuser.strided and not all(map(self._can_be_restrided, inputs)):
            return None, decline("the strides of its inputs are not known")
        calls = self._without_fixed(node.bound for node in body)
        key = region_key(calls, inputs, outputs, self.layouts)
        trace = partial(self._region_trace, region, calls, inputs, outputs)
        return compile_once(region.fuser, key, trace, strict=self.strict)

    def _fallback(
        self, region: Region, key: Any, body: list[Node], inputs: list[str], outputs: tuple[Proxy, ...]
    ) -> Fallback | None:
        """Return the fallback that runs the region's calls if its function fails. `key` is that of identical
        regions."""
        if key not in self.fallbacks:
            calls = self._without_fixed(call for node in body for call in node.calls)
            how = {"boxed": region.fuser.boxed, "strict": self.strict}
            self.fallbacks[key] = fallback_for(calls, list(map(self._proxy, inputs)), outputs, **how)
        return self.fallbacks[key]

    def _without_fixed(self, calls: Iterable[BoundSymbol]) -> list[BoundSymbol]:
        """Return the calls with values known at compile time substituted for their names."""
        fixed = {name: self.layouts.values[name] for name in self.layouts.fixed}
        return [substitute(call, fixed) for call in calls]

    def _region_trace(self, region: Region, calls: list[BoundSymbol], inputs: list[str], outputs: list[str]) -> Trace:
        trace = self.trace.derive(
            f"region of {region.fuser.name}",
            calls,
            name="region",
            inputs=[self._with_strides(name) for name in inputs],
            output=tuple(map(self._with_strides, outputs)),
        )
        trace.boxed = False
        trace.constants.clear()
        return trace

    def _with_strides(self, name: str) -> Proxy:
        layout = self.layouts.values[name]
        if not isinstance(layout, Layout):
            return self.proxies[name]
        return TensorProxy(name, layout.shape, layout.dtype, layout.device, strides=layout.strides)


def _is_contiguous(layout: Layout) -> bool:
    return same(layout.strides, contiguous(layout.shape))
