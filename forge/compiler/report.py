"""CompileReport: how a program was compiled, for forge.explain, forge.last_traces and the logs."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from forge.compiler.autotune import Measurement
from forge.compiler.claim import Claim
from forge.compiler.collectives import Collective, collectives_of
from forge.compiler.cuda_graph_partition import LIST, why_not
from forge.ir import Trace
from forge.ir.printing import STATEMENTS
from forge.runtime.cuda_graphs import Graph
from forge.transforms.split import SavedValue

MAX_CALLS = 10_000  # in all stages of a program kept in memory; a call takes 400 bytes
ALL_STAGES = "FORGE_KEEP_STAGES"
SHORTENED = f"of stages of more than {MAX_CALLS} calls the last one alone is kept; {ALL_STAGES}=1 keeps all of them"


class LayerUse(NamedTuple):
    """One call of a module for which a layer was requested.

    how: "traced" or "one call", None if the module's own forward runs; then `reason` says why. layer: "" if the
    module's call does not fit it.
    """

    module: str
    layer: str
    how: str | None
    reason: str = ""

    @property
    def kind(self) -> str:
        """The name of the module's class."""
        return self.module.rpartition("(")[2].removesuffix(")")

    def __str__(self) -> str:
        status = f"{self.how}, verified" if self.how else f"not used: {self.reason}"
        return f"{self.module}{f' by {self.layer}' if self.layer else ''}: {status}"


@dataclass(eq=False, kw_only=True)
class CompileReport:
    """A record of one program's compilation, and of the executors of its calls.

    Set at construction:
        opaque_calls: the names of functions without torchlang symbols.
        layers: modules with layers.
        uses_cuda_graphs: whether the program was to run as CUDA graphs.
        recorded: the forward and the backward with graphs in them, if a program is recorded after it ran without:
            its calls are those of `traces`.
        frozen, unfrozen: what was folded into weights; what was not, and why.

    Added by the compiler:
        traces: the stages of the forward, or of the whole program where no gradient is needed.
        backward_traces: those of the last backward, which is compiled on first use.
        claims, backward_claims: the executor of each call, and who declined it and why.
        saved: the residuals that a forward saves for its backward.
        measured: times of candidates for calls (select="measured").
        double_backwards: the reports of backwards that were compiled as programs, to be differentiated.
        wrappers: the names of the wrappers of the generated functions (forge/runtime/plan.py), innermost first.
        seconds: compile time by phase.
        shortened: whether only the last stages are in memory.

    Set by forge/cache/:
        uncached: why the program is not on disk, None if it is or caching was not requested.
    """

    cached: ClassVar[bool] = False  # read from disk

    opaque_calls: Sequence[str] = ()
    layers: Sequence[LayerUse] = ()
    uses_cuda_graphs: bool = False
    recorded: list[Trace] = field(default_factory=list)
    frozen: Sequence[str] = ()
    unfrozen: Sequence[str] = ()
    traces: list[Trace] = field(default_factory=list)
    backward_traces: list[Trace] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    backward_claims: list[Claim] = field(default_factory=list)
    saved: list[SavedValue] = field(default_factory=list)
    measured: list[Measurement] = field(default_factory=list)
    double_backwards: "list[CompileReport]" = field(default_factory=list)
    wrappers: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    shortened: bool = False
    uncached: str | None = None

    @property
    def edited_files(self) -> list[str]:
        """The files that run in place of what was generated (forge.jit(edit=folder))."""
        return [trace.stage for trace in (*self.traces, *self.backward_traces) if trace.text is not None]

    def collectives(self) -> tuple[list[Collective], list[Collective]]:
        """Return the collectives of the forward, and of the last backward."""
        forward, backward = (collectives_of(each[-1]) if each else [] for each in (self.traces, self.backward_traces))
        return forward, backward

    def cuda_graphs(self) -> tuple[int, list[str]]:
        """Return the number of CUDA graphs, and the reasons for calls outside of them, if CUDA graphs were
        requested."""
        if not self.uses_cuda_graphs:
            return 0, []
        last = self.recorded or [stages[-1] for stages in (self.traces, self.backward_traces) if stages]
        calls = [bound for trace in last for bound in trace.bound_symbols]
        graphs = [bound.symbol.op for bound in calls if isinstance(bound.symbol.op, Graph)]
        failed = [f"{graph.__name__}: {graph.failed}" for graph in graphs if graph.failed]
        own = STATEMENTS | {LIST}
        others = [bound for bound in calls if bound.symbol not in own and not isinstance(bound.symbol.op, Graph)]
        reasons = [(bound.symbol.id, why_not(bound)) for bound in others]
        alone = [f"{name}: {reason}" for name, reason in reasons if reason is not None]
        return len(graphs) - len(failed), [*failed, *alone]

    def add_lowered(
        self,
        traces: Sequence[Trace],
        claims: Sequence[Claim],
        backward_traces: Sequence[Trace] = (),
        backward_claims: Sequence[Claim] = (),
    ) -> None:
        """Report the program's lowered form, which runs from now on: its first tier, then its second."""
        self.traces += traces
        self.claims[:] = claims
        self.backward_traces += backward_traces
        self.backward_claims[:] = backward_claims

    def replace_backward(self, traces: Sequence[Trace], claims: Sequence[Claim]) -> None:
        """Report another backward, which was compiled on first use."""
        self.backward_traces[:], self.backward_claims[:] = traces, claims

    def shorten(self) -> None:
        """Drop all stages of a large program but the last, and the decompositions of its calls."""
        every = [*self.traces, *self.backward_traces]
        if sum(len(trace.bound_symbols) for trace in every) > MAX_CALLS and os.environ.get(ALL_STAGES) != "1":
            self.shortened = True
            for stages in (self.traces, self.backward_traces):
                stages[:] = map(_without_decompositions, stages[-1:])

    @contextmanager
    def time_phase(self, phase: str) -> Iterator[None]:
        """Add the time spent in the context to `seconds[phase]`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


def _without_decompositions(trace: Trace) -> Trace:
    calls = [
        bound.replace(subsymbols=[sub.replace(subsymbols=()) for sub in bound.subsymbols])
        for bound in trace.bound_symbols
    ]
    return trace.derive(trace.stage, calls)
