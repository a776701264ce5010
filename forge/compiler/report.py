"""CompileReport: how a program came about, for forge.explain, forge.last_traces and the logs."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from forge.compiler.autotune import Measurement
from forge.compiler.claim import Claim
from forge.compiler.cuda_graph_partition import why_not
from forge.ir import Trace
from forge.ir.printing import DEL
from forge.runtime.cuda_graphs import Graph
from forge.transforms.split import SavedValue

MAX_CALLS = 10_000  # of all stages of a program that are in memory; a call takes 400 bytes
ALL_STAGES = "FORGE_KEEP_STAGES"
SHORTENED = f"of stages of more than {MAX_CALLS} calls the last one alone is kept; {ALL_STAGES}=1 keeps all of them"


class LayerUse(NamedTuple):
    """One call of a module for which a layer was requested.

    how: "traced" or "one call", None where the module's own forward runs; then `reason` says why. layer: "" where the
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
        taken = f"{self.how}, verified" if self.how else f"not used: {self.reason}"
        return f"{self.module}{f' by {self.layer}' if self.layer else ''}: {taken}"


class CompileReport:
    """A record of one program's compilation, and of what runs its calls.

    Attributes:
        traces: the stages of the forward, or of the whole program where no gradient is needed.
        backward_traces: those of the last backward, which is compiled when it is first needed.
        claims, backward_claims: the executor of each call, and who declined it and why.
        opaque_calls: the names of functions that torchlang does not have.
        saved: what a forward saves for its backward.
        frozen, unfrozen: what was folded into weights; what was not, and why.
        measured: times of candidates for calls (select="measured").
        layers: modules for which there are layers.
        double_backwards: the reports of backwards that were compiled as programs, to be differentiated.
        seconds: compile time by phase.
        uncached: why the program is not on disk, None where it is or was not asked for.
        shortened: whether only the last stages are in memory.
        uses_cuda_graphs: whether the program was to run as CUDA graphs.
        wrappers: the names of what runs around the generated functions (forge/runtime/plan.py), the innermost first.
    """

    cached = False  # read from disk (forge/cache/)

    def __init__(self) -> None:
        self.traces: list[Trace] = []
        self.backward_traces: list[Trace] = []
        self.claims: list[Claim] = []
        self.backward_claims: list[Claim] = []
        self.opaque_calls: list[str] = []
        self.saved: list[SavedValue] = []
        self.frozen: list[str] = []
        self.unfrozen: list[str] = []
        self.measured: list[Measurement] = []
        self.layers: list[LayerUse] = []
        self.double_backwards: list[CompileReport] = []
        self.seconds: dict[str, float] = {}
        self.uncached: str | None = None
        self.shortened = False
        self.uses_cuda_graphs = False
        self.wrappers: list[str] = []

    @property
    def edited_files(self) -> list[str]:
        """The files that run in place of what was generated (forge.jit(edit=folder))."""
        return [trace.stage for trace in (*self.traces, *self.backward_traces) if trace.text is not None]

    def cuda_graphs(self) -> tuple[int, list[str]]:
        """Return the number of CUDA graphs, and the reasons for calls outside of them, where CUDA graphs were
        requested."""
        if not self.uses_cuda_graphs:
            return 0, []
        last = [stages[-1] for stages in (self.traces, self.backward_traces) if stages]
        calls = [bound for trace in last for bound in trace.bound_symbols]
        graphs = [bound.symbol.op for bound in calls if isinstance(bound.symbol.op, Graph)]
        failed = [f"{graph.__name__}: {graph.failed}" for graph in graphs if graph.failed]
        others = [bound for bound in calls if bound.symbol is not DEL and not isinstance(bound.symbol.op, Graph)]
        reasons = [(bound.symbol.id, why_not(bound)) for bound in others]
        alone = [f"{name}: {reason}" for name, reason in reasons if reason is not None]
        return len(graphs) - len(failed), [*failed, *alone]

    def promote(
        self,
        traces: Sequence[Trace],
        claims: Sequence[Claim],
        backward_traces: Sequence[Trace] = (),
        backward_claims: Sequence[Claim] = (),
    ) -> None:
        """Report the program's second tier, which runs from now on."""
        self.traces += traces
        self.claims[:] = claims
        self.backward_traces += backward_traces
        self.backward_claims[:] = backward_claims

    def shorten(self) -> None:
        """Drop all stages of a large program but the last, and the decompositions of its calls."""
        every = [*self.traces, *self.backward_traces]
        if sum(len(trace.bound_symbols) for trace in every) > MAX_CALLS and os.environ.get(ALL_STAGES) != "1":
            self.shortened = True
            for stages in (self.traces, self.backward_traces):
                stages[:] = map(_without_decompositions, stages[-1:])

    @contextmanager
    def time_phase(self, phase: str) -> Iterator[None]:
        """Add the time that passes inside to `seconds[phase]`."""
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
