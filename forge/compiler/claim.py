"""The claim pass: assign every call of a trace to an executor, trying the highest level first.

Earlier passes that depend on the executor of a call, such as gradients, query the same choice here. The fusion pass
(forge/compiler/fusion.py) forms regions of the calls that fusion executors claim.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from forge import clang
from forge.compiler.fallback import Fallback
from forge.executors.contracts import call_in_words, check_arguments, check_metadata
from forge.executors.executor import (
    Declined,
    Executor,
    FusionExecutor,
    Implementation,
    ProductExecutor,
    call_checker,
    is_own,
    operators_of,
)
from forge.executors.registry import known_executors
from forge.executors.torchex.core import torchex
from forge.ir import BoundSymbol, Proxy, Tag, Trace, check, recording
from forge.ir.printing import in_words
from forge.ir.pytree import proxies
from forge.ir.source import Source
from forge.ir.symbol import substitute
from forge.torchlang.opaque import opaque_rule
from forge.transforms.dce import live_calls
from forge.transforms.grad import Choice, Choose
from forge.transforms.products import ProductSymbol

Reasons = list[tuple[str, str]]
Candidate = Implementation | FusionExecutor
Excluded = Mapping[Candidate, str]  # why candidates do not get a call that they accept
_NONE_EXCLUDED: Excluded = MappingProxyType({})


class Selection(Protocol):
    """Choice of the candidates excluded from a call, with the reasons: others were measured to be faster."""

    def __call__(
        self,
        bound: BoundSymbol,
        executors: Sequence[Executor],
        active: Collection[str] = (),
        measured: BoundSymbol | None = None,
    ) -> Excluded:
        """Return the excluded candidates. active: the arguments that a gradient flows to, if the call will be
        differentiated. measured: a composite of the call and others, measured in its place."""


def in_order(
    bound: BoundSymbol,
    executors: Sequence[Executor],
    active: Collection[str] = (),
    measured: BoundSymbol | None = None,
) -> Excluded:
    """Exclude no executor, so that the first one that accepts a call gets it."""
    return _NONE_EXCLUDED


@dataclass(slots=True, eq=False)
class Claim:
    """The executor that runs one call, and the reasons of those that declined it. It has only names of the call:
    a program's claims live as long as the program.

    results: the metadata of `outputs`, in words. region: the fused region of the final trace that contains the call.
    fallback: the executor that runs it if the region fails.
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
        """Return the claim of a call."""
        by_name = {proxy.name: proxy for proxy in proxies(bound.output)}
        outputs = tuple(bound.outputs)
        results = tuple([in_words(by_name[name]) for name in outputs])
        return cls(bound.symbol.id, outputs, results, bound.source, executor, declined, level, region, fallback)


@dataclass(slots=True)
class ClaimedCall:
    """A call of the program and the executors' calls that run it; `fuser` takes it into a region, if one pays."""

    bound: BoundSymbol
    fuser: FusionExecutor | None
    declined: Reasons
    level: int
    calls: list[BoundSymbol]
    claims: list[Claim]


def claim_calls(
    trace: Trace, executors: Sequence[Executor], earlier: Mapping[str, Reasons], select: Selection
) -> tuple[Trace, list[ClaimedCall]]:
    """Return the trace with every call replaced by operator executors' calls, and the claimed calls, each with the
    fusion executor that may take it into a region."""
    new = trace.derive("claim")
    walker = _ClaimPass(executors, new, select)
    with recording(new, clang.language):
        for bound in trace.bound_symbols:
            reasons = [reason for name in bound.outputs for reason in earlier.get(name, ())]
            walker.visit(bound, executors, reasons, 0)
    new.bound_symbols.extend(call for each in walker.claimed for call in each.calls)
    return new, walker.claimed


def choose(
    bound: BoundSymbol, executors: Sequence[Executor], declined: Reasons, excluded: Excluded = _NONE_EXCLUDED
) -> tuple[Executor, Implementation] | None:
    """Return the first executor that accepts a call as it stands; the others' reasons are added to `declined`."""
    for executor in operators_of(executors):
        implementation = _find_implementation(bound, executor, declined, excluded)
        if implementation is not None:
            return executor, implementation
    return None


def runs_in_torch(bound: BoundSymbol, executors: Sequence[Executor]) -> bool:
    """Return whether the torch executor is the first to accept a call, or its decomposition where no executor accepts
    the call; low-priority executors, of which torch is one, are not counted."""
    candidate = choose(bound, executors, [])
    if candidate is None:
        return bool(bound.subsymbols) and all(runs_in_torch(sub, executors) for sub in bound.subsymbols)
    return candidate[0] is torchex or candidate[1].low_priority


def note_declined(declined: dict[str, Reasons], bound: BoundSymbol, reasons: Reasons) -> None:
    """Add the reasons of executors that declined a call to those of the values that it computes."""
    declined.update((name, [*declined.get(name, ()), *reasons]) for name in bound.outputs if reasons)


def chooser(executors: Sequence[Executor], declined: dict[str, Reasons], select: Selection = in_order) -> Choose:
    """Return the choice between an operation's own gradient and its decomposition's, by the executor that will claim
    the call; an opaque call has its own rule.

    `declined` records by output name why executors declined: the call may be decomposed before it is claimed.
    """
    any_fuses_decompositions = any(isinstance(each, FusionExecutor) and each.fuses_decompositions for each in executors)

    def choice(bound: BoundSymbol, active: Collection[str]) -> Choice:
        excluded = select(bound, executors, active)
        if any_fuses_decompositions and getattr(first_fuser(bound, executors, excluded), "fuses_decompositions", False):
            return Choice()
        reasons: Reasons = []
        candidate = choose(bound, executors, reasons, excluded)
        note_declined(declined, bound, reasons)
        if candidate is None:
            return Choice(opaque_rule(bound))
        executor, implementation = candidate
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
        """Assign a call to an executor, or its decomposition where none accepts it."""
        declined = list(inherited)
        if Tag.NO_FUSE in bound.tags:
            executors = operators_of(executors)
        if bound.symbol.op is not None:  # already an executor's operator, or an opaque call
            fuser = _fuser_before(bound.symbol.executor, executors)
            claim = Claim.of(bound, _runner(bound), declined, level)
            if fuser is not None and fusible(bound, fuser, declined):
                self.claimed.append(ClaimedCall(bound, fuser, declined, level, [bound], [claim]))
            else:
                self._put(bound, [bound], claim)
            return
        excluded = _NONE_EXCLUDED if Tag.NO_FUSE in bound.tags else self.select(bound, executors)
        for position, executor in enumerate(executors):
            if isinstance(executor, FusionExecutor):
                parts = fusible(bound, executor, declined, excluded)
                others = executors if isinstance(executor, ProductExecutor) else executors[position + 1 :]
                for part in parts:
                    self._mark(part, executor, others, declined, level + (part is not bound))
                if parts:
                    return
            elif (implementation := _find_implementation(bound, executor, declined, excluded)) is not None:
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

    def _put(self, bound: BoundSymbol, calls: list[BoundSymbol], claim: Claim) -> None:
        self.claimed.append(ClaimedCall(bound, None, [], claim.level, calls, [claim]))

    def _mark(
        self, bound: BoundSymbol, fuser: FusionExecutor, others: Sequence[Executor], declined: Reasons, level: int
    ) -> None:
        """Claim the call for a fusion executor; the `others` run it outside of regions."""
        fallback = _ClaimPass(operators_of(others), self.new, self.select)
        fallback.visit(bound, fallback.executors, declined, level)
        calls = [call for each in fallback.claimed for call in each.calls]
        claims = [claim for each in fallback.claimed for claim in each.claims]
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
    """Return the call, or an equivalent list of its subcalls, if the executor can fuse all of them; else nothing."""
    if executor in excluded:
        declined.append((executor.name, excluded[executor]))
        return []
    if Tag.NO_FUSE in bound.all_tags:
        return []
    if isinstance(executor, ProductExecutor) and not isinstance(bound.symbol, ProductSymbol):  # without a reason
        return []
    try:
        decision = call_checker(executor.can_fuse, bound)
    except Exception as error:
        _blame(error, executor.name, "can_fuse", bound)
        raise
    if decision:
        return [bound]
    declined.append((executor.name, getattr(decision, "reason", "the executor declined without a reason")))
    if isinstance(decision, Declined) and not decision.parts:
        return []
    parts: list[BoundSymbol] = []
    for sub in live_calls(bound.subsymbols, bound.outputs):
        pieces = fusible(sub, executor, [])
        if not pieces:
            return []
        parts += pieces
    return parts


def is_fused(bound: BoundSymbol, executors: Sequence[Executor], select: Selection = in_order) -> bool:
    """Return whether a fusion executor is the first to take a call."""
    return first_fuser(bound, executors, select(bound, executors)) is not None


def first_fuser(
    bound: BoundSymbol, executors: Sequence[Executor], excluded: Excluded = _NONE_EXCLUDED
) -> FusionExecutor | None:
    """Return the fusion executor that takes a call, or all its parts, before another executor does."""
    for executor in executors:
        if isinstance(executor, FusionExecutor):
            if fusible(bound, executor, [], excluded):
                return executor
        elif _find_implementation(bound, executor, [], excluded) is not None:
            return None
    return None


def _find_implementation(
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
    """Add a note to the exception that names the executor's function that raised, and the call."""
    error.add_note(f"raised by executor {executor}: its {what}, for {call_in_words(bound)}")


def _no_executor_message(bound: BoundSymbol, executors: Sequence[Executor], declined: Reasons) -> str:
    reasons = "; ".join(f"{name}: {reason}" for name, reason in dict.fromkeys(declined)) or "none of them has it"
    names = ", ".join(executor.name for executor in executors) or "no executor"
    advice = '; add "torch" to executors, which runs all that torch has' if torchex not in executors else ""
    others = [each for each in known_executors().values() if each not in executors and each.candidates(bound.symbol)]
    if others and torchex not in others:
        advice = f"; add {' or '.join(repr(each.name) for each in others)} to executors, which has it"
    return f"no executor claims {bound.symbol.id}({', '.join(map(str, bound.args))}); asked {names}: {reasons}{advice}"


def _runner(bound: BoundSymbol) -> str:
    """Return the name of the executor of a call that is already claimed."""
    symbol = bound.symbol
    if symbol.executor is not None:
        name: str = symbol.executor.name
        return name
    return "opaque" if Tag.OPAQUE in symbol.tags else symbol.id.partition(".")[0]


def _calls_of(bound: BoundSymbol, implementation: Implementation, name: str, new: Trace) -> list[BoundSymbol]:
    """Return the executor's calls that run a call by an implementation. Raises ValueError or TypeError if it
    cannot."""
    if implementation.execution_transform is None:
        operator = implementation.op
        assert operator is not None and operator.op is not None
        check_arguments(name, operator.op, bound)
        return [bound.replace(symbol=operator, subsymbols=(bound,))]
    what = f"executor {name}: its execution_transform"
    try:
        with new.collecting() as recorded, new.set_tags(bound.tags, bound.source):
            output = implementation.execution_transform(*bound.args, **bound.kwargs)
    except Exception as error:
        _blame(error, name, "execution_transform", bound)
        raise
    check_metadata(what, output, bound)
    renamed: dict[str, Proxy] = {}
    for result, original in zip(proxies(output), proxies(bound.output), strict=True):
        check(
            result.name not in bound.inputs,
            lambda result=result: (
                f"{what} of {call_in_words(bound)} returns its input {result}, but must return new values"
            ),
        )
        renamed[result.name] = original
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
