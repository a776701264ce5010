"""The claim pass: every call of a trace is given to an executor, at the highest level first."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from forge import clang
from forge.executors.executor import Executor, FusionExecutor, Implementation, OperatorExecutor
from forge.executors.fusion import fuse_regions
from forge.ir import BoundSymbol, Proxy, Tag, Trace, recording
from forge.ir.pytree import proxies
from forge.ir.symbol import substitute
from forge.torchlang.opaque import opaque_rule
from forge.transforms.dce import live_calls
from forge.transforms.grad import Choice

Reasons = list[tuple[str, str]]


class Claim:
    """Who runs one call, and who declined it and why."""

    __slots__ = ("bound", "declined", "executor", "level")

    def __init__(self, bound: BoundSymbol, executor: str, declined: Reasons, level: int) -> None:
        self.bound = bound
        self.executor = executor
        self.declined = list(dict.fromkeys(declined))
        self.level = level


def claim(
    trace: Trace, executors: Sequence[Executor], earlier: Mapping[str, Reasons] = MappingProxyType({})
) -> tuple[Trace, list[Claim]]:
    """The trace with every call an executor's, and who claimed what.

    `earlier` holds, by output name, why calls that were taken apart before this pass had been declined. Fusion
    executors are offered regions before anything is claimed singly, in the order given. Raises
    NotImplementedError naming a prim that nobody claims, with the reasons.
    """
    new = trace.derive("claim")
    claims: list[Claim] = []
    operators = [executor for executor in executors if isinstance(executor, OperatorExecutor)]
    for executor in executors:
        if isinstance(executor, FusionExecutor):
            trace = fuse_regions(trace, executor)
    with recording(new, clang.language):
        for bound in trace.bound_symbols:
            known = [reason for name in bound.outputs for reason in earlier.get(name, ())]
            _claim(bound, operators, new, claims, known, 0)
    return new, claims


def choose(
    bound: BoundSymbol, executors: Sequence[Executor], declined: Reasons
) -> tuple[Executor, Implementation] | None:
    """The first executor that accepts a call as it stands; the others' reasons go to `declined`."""
    for executor in executors:
        if not isinstance(executor, OperatorExecutor):
            continue
        for implementation in executor.candidates(bound.symbol):
            decision = implementation.decide(bound)
            if decision:
                return executor, implementation
            declined.append((implementation.name or executor.name, decision.reason))
    return None


def chooser(executors: Sequence[Executor], declined: dict[str, Reasons]) -> Callable[[BoundSymbol], Choice]:
    """How the executor that will claim a call wants it differentiated; an opaque call has its own rule.

    Why others declined is kept in `declined`, by output name: the call may be taken apart before it is claimed.
    """

    def choice(bound: BoundSymbol) -> Choice:
        reasons: Reasons = []
        chosen = choose(bound, executors, reasons)
        declined.update((name, reasons) for name in bound.outputs if reasons)
        if chosen is None:
            return Choice(opaque_rule(bound))
        return Choice(chosen[1].grad_transform, recompute=chosen[1].grad == "recompute")

    return choice


def _claim(
    bound: BoundSymbol,
    executors: Sequence[OperatorExecutor],
    new: Trace,
    claims: list[Claim],
    inherited: Reasons,
    level: int,
) -> None:
    if bound.symbol.op is not None:  # an executor's operator already, or an opaque call
        new.record(bound)
        claims.append(Claim(bound, _runner(bound), inherited, level))
        return
    declined = list(inherited)
    chosen = choose(bound, executors, declined)
    if chosen is not None:
        executor, implementation = chosen
        claims.append(Claim(bound, implementation.name or executor.name, declined, level))
        _place(bound, implementation, new)
    elif bound.subsymbols:
        for sub in live_calls(bound.subsymbols, bound.outputs):
            _claim(sub, executors, new, claims, declined, level + 1)
    else:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in declined) or "none of them has it"
        names = ", ".join(executor.name for executor in executors)
        raise NotImplementedError(
            f"no executor claims {bound.symbol.id}({', '.join(map(str, bound.args))}); asked {names}: {reasons}"
        )


def _runner(bound: BoundSymbol) -> str:
    """Who runs a call that is no longer to be claimed."""
    symbol = bound.symbol
    if symbol.executor is not None:
        return symbol.executor.name
    return "opaque" if Tag.OPAQUE in symbol.tags else symbol.id.partition(".")[0]


def _place(bound: BoundSymbol, implementation: Implementation, new: Trace) -> None:
    if implementation.execution_transform is None:
        new.record(bound.replace(symbol=implementation.op, subsymbols=(bound,)))
        return
    with new.collecting() as recorded, new.tagged(bound.tags, bound.source):
        output = implementation.execution_transform(*bound.args, **bound.kwargs)
    renamed: dict[str, Proxy] = {}
    for made, kept in zip(proxies(output), proxies(bound.output), strict=True):
        assert made.name not in bound.inputs, f"{bound.symbol.id}: an execution transform returned its input"
        renamed[made.name] = kept
    for call in recorded:
        call = substitute(call, renamed)
        assert call.symbol.op is not None, f"{bound.symbol.id}: an execution transform called {call.symbol.id}"
        new.record(call)
