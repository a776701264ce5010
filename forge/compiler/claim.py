"""The claim pass: every call of a trace is assigned to an executor, at the highest level first."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, TypeVar

from forge import clang
from forge.compiler.fallback import Fallback
from forge.compiler.fusion import FusedRegion, FusionResult, discard_failed, fuse_regions
from forge.compiler.layout import Layout, Layouts, Ran
from forge.compiler.regions import Node
from forge.executors.contracts import call_in_words, check_arguments, check_metadata
from forge.executors.executor import (
    Declined,
    Executor,
    FusionExecutor,
    Implementation,
    call_checker,
    is_own,
    operators_of,
)
from forge.executors.torchex.core import torchex
from forge.ir import BoundSymbol, NumberProxy, Proxy, Tag, TensorProxy, Trace, check, recording
from forge.ir.printing import in_words
from forge.ir.proxies import Dim
from forge.ir.pytree import proxies, rename
from forge.ir.source import Source
from forge.ir.symbol import substitute
from forge.support import progress
from forge.torchlang.opaque import opaque_rule
from forge.transforms.dce import live_calls
from forge.transforms.grad import Choice, Choose

_FIXED = (type(None), bool, int, float, tuple)  # what may be a constant of a region

T = TypeVar("T")
Reasons = list[tuple[str, str]]
Candidate = Implementation | FusionExecutor
Excluded = Mapping[Candidate, str]  # why candidates do not get a call that they would take
_NONE_EXCLUDED: Excluded = MappingProxyType({})


class Selection(Protocol):
    """Which of those that would take a call are not to get it, and why: because others were measured to be faster."""

    def __call__(self, bound: BoundSymbol, executors: Sequence[Executor], active: Collection[str] = ()) -> Excluded:
        """active: the arguments that a gradient flows to, where the call is to be differentiated."""


def in_order(bound: BoundSymbol, executors: Sequence[Executor], active: Collection[str] = ()) -> Excluded:
    """Exclude no executor, so that the first one that takes a call gets it."""
    return _NONE_EXCLUDED


@dataclass(slots=True, eq=False)
class Claim:
    """The executor that runs one call, and the reasons of those that declined it. It refers to the call by name, not by
    object: a program's claims live as long as the program.

    results: the metadata of `outputs`, in words. region: the call of the final trace that runs it with others.
    fallback: what runs it where that fails.
    """

    operation: str
    outputs: tuple[str, ...]
    results: tuple[str, ...]
    source: Source | None
    executor: str
    declined: Reasons
    level: int
    region: str | None = None
    fallback: Fallback | None = None

    def __post_init__(self) -> None:
        self.declined = list(dict.fromkeys(self.declined))

    @classmethod
    def of(
        cls,
        bound: BoundSymbol,
        executor: str,
        declined: Reasons,
        level: int,
        region: str | None = None,
        fallback: Fallback | None = None,
    ) -> "Claim":
        """Of a call."""
        made = {proxy.name: proxy for proxy in proxies(bound.output)}
        outputs = tuple(bound.outputs)
        results = tuple([in_words(made[name]) for name in outputs])
        return cls(bound.symbol.id, outputs, results, bound.source, executor, declined, level, region, fallback)


@dataclass(slots=True)
class ClaimedCall:
    """A call of the program and the executors' calls that run it; `fuser` takes it into a region, where one pays."""

    bound: BoundSymbol
    fuser: FusionExecutor | None
    declined: Reasons
    level: int
    calls: list[BoundSymbol]
    claims: list[Claim]


def claim(
    trace: Trace,
    executors: Sequence[Executor],
    earlier: Mapping[str, Reasons] = MappingProxyType({}),
    layouts: Layouts | None = None,
    select: Selection = in_order,
    *,
    strict: bool = False,
) -> tuple[Trace, list[Claim]]:
    """Return the trace with every call claimed by an executor, and the claims.

    Executors are offered each call in order, at the highest level first. A call that a fusion executor accepts is
    claimed by a later executor as well, which runs it where no region pays.

    Args:
        trace: The program.
        executors: Executors in order of priority.
        earlier: By output name, the reasons why calls that were decomposed before this pass had been declined.
        layouts: The strides of the inputs; those of every value are added.
        select: Excludes executors from calls that they would take.
        strict: Whether a region that fails is an error.

    Raises:
        NotImplementedError: naming a prim that nobody claims, with the reasons.
    """

    def attempt() -> tuple[tuple[Trace, list[Claim]], list[FusedRegion]]:
        claimed, calls = claim_calls(trace, executors, earlier, select)
        fused, claims, regions = fuse_claimed(claimed, calls, executors, layouts, strict=strict)
        return (fused, claims), regions

    return compile_until_stable(attempt)


def compile_until_stable(attempt: Callable[[], tuple[T, list[FusedRegion]]]) -> T:
    """Return what `attempt` gives, once all regions that it compiled, in other processes too, can be called.

    attempt: returns (result, its regions). Where a region cannot be called after all, it is declined from then on and
    the program is lowered again.
    """
    with progress.display():
        while True:
            result, regions = attempt()
            if not discard_failed(regions):
                return result


def claim_calls(
    trace: Trace, executors: Sequence[Executor], earlier: Mapping[str, Reasons], select: Selection
) -> tuple[Trace, list[ClaimedCall]]:
    """Return the trace with every call that of an operator executor, and those calls with the fusion executors that
    take them into a region."""
    new = trace.derive("claim")
    walker = _ClaimPass(executors, new, select)
    with recording(new, clang.language):
        for bound in trace.bound_symbols:
            known = [reason for name in bound.outputs for reason in earlier.get(name, ())]
            walker.visit(bound, executors, known, 0)
    new.bound_symbols.extend(call for each in walker.claimed for call in each.calls)
    return new, walker.claimed


def fuse_claimed(
    trace: Trace,
    claimed: Sequence[ClaimedCall],
    executors: Sequence[Executor],
    layouts: Layouts | None,
    *,
    strict: bool,
) -> tuple[Trace, list[Claim], list[FusedRegion]]:
    """Return the claimed trace with its regions, the claims, and the regions."""
    fuses = any(isinstance(each, FusionExecutor) for each in executors)
    if not fuses or (layouts is None and not any(each.fuser for each in claimed)):
        return trace, [made for each in claimed for made in each.claims], []
    layouts = Layouts(trace.inputs) if layouts is None else layouts
    layouts.add_constants(trace.constants)
    nodes: list[Node] = []
    for each in claimed:
        nodes += _nodes(each, layouts)
    new = trace.derive("claim")
    fused = fuse_regions(new, nodes, layouts, strict=strict)
    new.bound_symbols.extend(fused.calls)
    new.output = rename(new.output, fused.fixed)
    return new, [made for each in claimed for made in _claims(each, fused)], fused.used


def _nodes(claimed: ClaimedCall, layouts: Layouts) -> list[Node]:
    """Return what a call is to the search for regions; no longer a fusion executor's where its strides cannot be
    known."""
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


def _unknown_at_compile_time(claimed: ClaimedCall, ran: list[Ran], layouts: Layouts) -> str | None:
    """Return why a claimed call cannot be part of code generated now; None where it can."""
    if not all(each.known for each in ran):
        return "the strides of its results are not known"
    others = [each for each in proxies(claimed.bound.args) if not isinstance(each, (TensorProxy, NumberProxy))]
    if not all(proxy.name in layouts.fixed for proxy in others):
        return "it reads a value that is known only when the program runs"
    kept = [value for each in ran for value in each.outputs if not isinstance(value, (Layout, *_FIXED))]
    return "it saves a value that exists only when the program runs" if kept else None


def _output_aliases(call: BoundSymbol, ran: Ran) -> list[int | None]:
    """Return, for each tensor of a call's output, the argument whose memory it shares."""
    return [share for value, share in zip(ran.outputs, ran.shares, strict=True) if isinstance(value, Layout)] or [None]


def _claims(claimed: ClaimedCall, fused: FusionResult) -> list[Claim]:
    if claimed.fuser is None:
        return claimed.claims
    name = claimed.bound.outputs[0]
    reason = fused.unfused.get(name)
    if reason is None:
        region = fused.regions.get(name)
        fallback = None if region is None else fused.fallbacks.get(region)
        return [Claim.of(claimed.bound, claimed.fuser.name, claimed.declined, claimed.level, region, fallback)]
    _decline(claimed, reason)
    return claimed.claims


def _decline(claimed: ClaimedCall, reason: str) -> None:
    """Note why the fusion executor that claimed a call leaves it to the executors after it."""
    assert claimed.fuser is not None
    for made in claimed.claims:
        made.declined.append((claimed.fuser.name, reason))


def choose(
    bound: BoundSymbol, executors: Sequence[Executor], declined: Reasons, excluded: Excluded = _NONE_EXCLUDED
) -> tuple[Executor, Implementation] | None:
    """Return the first executor that accepts a call as it stands; the others' reasons go to `declined`."""
    for executor in operators_of(executors):
        implementation = _accepting(bound, executor, declined, excluded)
        if implementation is not None:
            return executor, implementation
    return None


def runs_in_torch(bound: BoundSymbol, executors: Sequence[Executor]) -> bool:
    """Return whether the torch executor is the first that accepts a call, or what it calls where nobody does; one that
    gives way, as torch does, is not counted."""
    chosen = choose(bound, executors, [])
    if chosen is None:
        return bool(bound.subsymbols) and all(runs_in_torch(sub, executors) for sub in bound.subsymbols)
    return chosen[0] is torchex or chosen[1].low_priority


def strides_in_torch(trace: Trace) -> dict[str, tuple[Dim, ...]]:
    """Return the strides that torch's own functions give the values of a trace, by name."""
    values = Layouts.of(claim(trace, [torchex])[0]).values
    return {name: value.strides for name, value in values.items() if isinstance(value, Layout)}


def chooser(executors: Sequence[Executor], declined: dict[str, Reasons], select: Selection = in_order) -> Choose:
    """Return how the executor that will claim a call wants it differentiated; an opaque call has its own rule.

    Why others declined is kept in `declined`, by output name: the call may be taken apart before it is claimed.
    """
    any_by_parts = any(isinstance(each, FusionExecutor) and each.by_parts for each in executors)

    def choice(bound: BoundSymbol, active: Collection[str]) -> Choice:
        excluded = select(bound, executors, active)
        if any_by_parts and getattr(first_fuser(bound, executors, excluded), "by_parts", False):
            return Choice()
        reasons: Reasons = []
        chosen = choose(bound, executors, reasons, excluded)
        declined.update((name, reasons) for name in bound.outputs if reasons)
        if chosen is None:
            return Choice(opaque_rule(bound))
        executor, implementation = chosen
        rule, name = implementation.grad_transform, implementation.name or executor.name
        blame = None if rule is None or is_own(rule) else lambda error: _blame(error, name, "grad_transform", bound)
        return Choice(rule, recompute=implementation.grad == "recompute", blame=blame)

    return choice


class _ClaimPass:
    """One walk over a trace that assigns each call to an executor."""

    def __init__(self, executors: Sequence[Executor], new: Trace, select: Selection) -> None:
        self.executors = executors
        self.new = new
        self.select = select
        self.claimed: list[ClaimedCall] = []

    def visit(self, bound: BoundSymbol, executors: Sequence[Executor], inherited: Reasons, level: int) -> None:
        """Ask the executors for a call, and for its parts where none takes it."""
        declined = list(inherited)
        if Tag.NO_FUSE in bound.tags:
            executors = operators_of(executors)
        if bound.symbol.op is not None:  # an executor's operator already, or an opaque call
            fuser = _fuser_before(bound.symbol.executor, executors)
            made = Claim.of(bound, _runner(bound), declined, level)
            if fuser is not None and fusible(bound, fuser, declined):
                self.claimed.append(ClaimedCall(bound, fuser, declined, level, [bound], [made]))
            else:
                self._put(bound, [bound], made)
            return
        excluded = _NONE_EXCLUDED if Tag.NO_FUSE in bound.tags else self.select(bound, executors)
        for position, executor in enumerate(executors):
            if isinstance(executor, FusionExecutor):
                parts = fusible(bound, executor, declined, excluded)
                for part in parts:
                    self._mark(part, executor, executors[position + 1 :], declined, level + (part is not bound))
                if parts:
                    return
            elif (implementation := _accepting(bound, executor, declined, excluded)) is not None:
                name = implementation.name or executor.name
                calls = call_checker(_calls_of, bound, implementation, name, self.new)
                if not isinstance(calls, Declined):
                    self._put(bound, calls, Claim.of(bound, name, declined, level))
                    return
                declined.append((name, calls.reason))
        if not bound.subsymbols:
            raise NotImplementedError(_no_executor_message(bound, self.executors, declined))
        for sub in live_calls(bound.subsymbols, bound.outputs):
            self.visit(sub, executors, declined, level + 1)

    def _put(self, bound: BoundSymbol, calls: list[BoundSymbol], made: Claim) -> None:
        self.claimed.append(ClaimedCall(bound, None, [], made.level, calls, [made]))

    def _mark(
        self, bound: BoundSymbol, fuser: FusionExecutor, others: Sequence[Executor], declined: Reasons, level: int
    ) -> None:
        """Claim the call for a fusion executor; the `others` run it where it is in no region."""
        fallback = _ClaimPass(operators_of(others), self.new, self.select)
        fallback.visit(bound, fallback.executors, declined, level)
        calls = [call for each in fallback.claimed for call in each.calls]
        claims = [made for each in fallback.claimed for made in each.claims]
        self.claimed.append(ClaimedCall(bound, fuser, list(declined), level, calls, claims))


def _fuser_before(executor: Executor | None, executors: Sequence[Executor]) -> FusionExecutor | None:
    """Return the fusion executor that precedes the executor of a call's operator."""
    if executor not in executors:
        return None
    before = executors[: executors.index(executor)]
    return next((each for each in before if isinstance(each, FusionExecutor)), None)


def fusible(
    bound: BoundSymbol, executor: FusionExecutor, declined: Reasons, excluded: Excluded = _NONE_EXCLUDED
) -> list[BoundSymbol]:
    """Return the call, or the parts of it that do what it does, all of which the executor can fuse; none otherwise."""
    if executor in excluded:
        declined.append((executor.name, excluded[executor]))
        return []
    if Tag.NO_FUSE in bound.all_tags:
        return []
    try:
        decision = call_checker(executor.can_fuse, bound)
    except Exception as error:
        _blame(error, executor.name, "can_fuse", bound)
        raise
    if decision:
        return [bound]
    declined.append((executor.name, getattr(decision, "reason", "it declined without a reason")))
    if isinstance(decision, Declined) and not decision.parts:
        return []
    parts: list[BoundSymbol] = []
    for sub in live_calls(bound.subsymbols, bound.outputs):
        found = fusible(sub, executor, [])
        if not found:
            return []
        parts += found
    return parts


def is_fused(bound: BoundSymbol, executors: Sequence[Executor], select: Selection = in_order) -> bool:
    """Return whether a fusion executor is the first to take a call."""
    return first_fuser(bound, executors, select(bound, executors)) is not None


def first_fuser(
    bound: BoundSymbol, executors: Sequence[Executor], excluded: Excluded = _NONE_EXCLUDED
) -> FusionExecutor | None:
    """Return the fusion executor that takes a call, or all parts of it, before another executor does."""
    for executor in executors:
        if isinstance(executor, FusionExecutor):
            if fusible(bound, executor, [], excluded):
                return executor
        elif _accepting(bound, executor, [], excluded) is not None:
            return None
    return None


def _accepting(
    bound: BoundSymbol, executor: Executor, declined: Reasons, excluded: Excluded = _NONE_EXCLUDED
) -> Implementation | None:
    for implementation in executor.candidates(bound.symbol):
        if implementation in excluded:
            declined.append((implementation.name or executor.name, excluded[implementation]))
            continue
        try:
            decision = implementation.decide(bound)
        except Exception as error:
            _blame(error, implementation.name or executor.name, "checker", bound)
            raise
        if not isinstance(decision, Declined):
            return implementation
        declined.append((implementation.name or executor.name, decision.reason))
    return None


def _blame(error: Exception, executor: str, what: str, bound: BoundSymbol) -> None:
    """Add a note that says whose function raised, and for which call."""
    error.add_note(f"raised by executor {executor}: its {what}, for {call_in_words(bound)}")


def _no_executor_message(bound: BoundSymbol, executors: Sequence[Executor], declined: Reasons) -> str:
    reasons = "; ".join(f"{name}: {reason}" for name, reason in declined) or "none of them has it"
    names = ", ".join(executor.name for executor in executors) or "no executor"
    advice = '; add "torch" to executors, which runs all that torch has' if torchex not in executors else ""
    return f"no executor claims {bound.symbol.id}({', '.join(map(str, bound.args))}); asked {names}: {reasons}{advice}"


def _runner(bound: BoundSymbol) -> str:
    """Return the name of the executor of a call that is claimed already."""
    symbol = bound.symbol
    if symbol.executor is not None:
        return symbol.executor.name
    return "opaque" if Tag.OPAQUE in symbol.tags else symbol.id.partition(".")[0]


def _calls_of(bound: BoundSymbol, implementation: Implementation, name: str, new: Trace) -> list[BoundSymbol]:
    """Return the executor's calls that run a call by an implementation. Raises ValueError or TypeError where it
    cannot."""
    if implementation.execution_transform is None:
        operator = implementation.op
        assert operator is not None and operator.op is not None
        check_arguments(name, operator.op, bound)
        return [bound.replace(symbol=operator, subsymbols=(bound,))]
    what = f"executor {name}: its execution_transform"
    try:
        with new.collecting() as recorded, new.tagged(bound.tags, bound.source):
            output = implementation.execution_transform(*bound.args, **bound.kwargs)
    except Exception as error:
        _blame(error, name, "execution_transform", bound)
        raise
    check_metadata(what, output, bound)
    renamed: dict[str, Proxy] = {}
    for made, kept in zip(proxies(output), proxies(bound.output), strict=True):
        check(
            made.name not in bound.inputs,
            lambda made=made: f"{what} of {call_in_words(bound)} returns its input {made}, but must return new values",
        )
        renamed[made.name] = kept
    calls = [substitute(call, renamed) for call in recorded]
    for call in calls:
        check(
            call.symbol.op is not None,
            lambda call=call: (
                f"{what} of {call_in_words(bound)} calls {call.symbol.id}, but may call the executor's operators alone"
            ),
            TypeError,
        )
    return calls
