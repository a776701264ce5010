"""The passes `claim` and `fuse` by themselves, for a trace that is not a program."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from forge.compiler.claim import Claim, Reasons, Selection, in_order
from forge.compiler.config import Config
from forge.compiler.context import Form, Kind
from forge.compiler.layout import Layouts
from forge.compiler.pipeline import context_of, run_passes
from forge.compiler.program import Program
from forge.compiler.region_artifacts import FusedRegion, compile_until_stable
from forge.compiler.report import CompileReport
from forge.executors.executor import Executor
from forge.ir import Trace


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
    claimed by a later executor as well, which runs it if no region pays.

    Args:
        trace: The program.
        executors: Executors in order of priority.
        earlier: By output name, the reasons for which calls decomposed before this pass were declined.
        layouts: The strides of the inputs; those of every value are added.
        select: Excludes executors from calls that they would take.
        strict: True if a region that fails is an error.

    Raises:
        NotImplementedError: No executor claims a prim; names it, with the reasons.
    """
    config, report = Config(executors=tuple(executors), selection=select, strict=strict), CompileReport()
    program = Program(trace, None, [], grad=False)

    def attempt() -> tuple[tuple[Trace, list[Claim]], list[FusedRegion]]:
        context = context_of(Kind.STANDALONE, config, program, report)
        context.declined, context.layouts = dict(earlier), layouts
        claimed = run_passes(trace, context, Form.PROGRAM, Form.FUSED)
        return (claimed, context.claims), context.regions

    return compile_until_stable(attempt)
