"""Claiming and fusing one trace outside of the pipeline."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from forge.compiler.claim import Claim, Reasons, Selection, claim_calls, in_order
from forge.compiler.fusion import fuse_claimed
from forge.compiler.layout import Layout, Layouts
from forge.compiler.region_artifacts import FusedRegion, compile_until_stable
from forge.executors.executor import Executor
from forge.executors.torchex.core import torchex
from forge.ir import Trace
from forge.ir.proxies import Dim


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
        strict: True if a region that fails is an error.

    Raises:
        NotImplementedError: naming a prim that nobody claims, with the reasons.
    """

    def attempt() -> tuple[tuple[Trace, list[Claim]], list[FusedRegion]]:
        claimed, calls = claim_calls(trace, executors, earlier, select)
        fused, claims, regions = fuse_claimed(claimed, calls, executors, layouts, strict=strict)
        return (fused, claims), regions

    return compile_until_stable(attempt)


def strides_in_torch(trace: Trace) -> dict[str, tuple[Dim, ...]]:
    """Return the strides that torch's own functions give the values of a trace, by name."""
    values = Layouts.of(claim(trace, [torchex])[0]).values
    return {name: value.strides for name, value in values.items() if isinstance(value, Layout)}
