"""What a program became: what runs, and how it came about."""

import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from forge.compiler.autotune import Measured
from forge.compiler.claim import Claim, Reasons
from forge.compiler.cuda_graph_partition import why_not
from forge.executors.executor import Executor
from forge.ir import Trace
from forge.ir.printing import DEL
from forge.runtime.cuda_graphs import Graph
from forge.runtime.frozen import Folded
from forge.runtime.plan import Recipe, assemble
from forge.runtime.tiering import Growing, Replacement, is_wanted
from forge.transforms.split import Saved

KEPT_CALLS = 10_000  # of a program's stages, together; a call takes 400 bytes
KEEP_STAGES = "FORGE_KEEP_STAGES"
NOT_KEPT = f"of stages of more than {KEPT_CALLS} calls the last one alone is kept; {KEEP_STAGES}=1 keeps all of them"


class LayerUse(NamedTuple):
    """What became of the layer that was asked for a module's call. how: "traced" or "one call", None where the module's
    own forward runs; then `reason` says why. layer: "" where the module's call does not fit it."""

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


class Compiled:
    """A compiled program: what runs, and every stage of how it came about.

    `call(*inputs)` runs it. `traces` are the stages of the forward (or of the whole, where no gradient is needed),
    `backward_traces` those of the last backward, made on its first use. `claims` and `backward_claims` say who runs
    each call, `opaque_calls` names the functions that torchlang does not have, `seconds` tells the time by stage,
    `saved` what a forward saves for its backward.
    `again` are the backwards that were compiled as programs of their own, to be differentiated (create_graph=True).
    `recipe` is what `call` is made of, until it is handed over. `grow` makes larger regions of a small program,
    `growing` runs it until they are there, and `keep` keeps their recipe on disk, with their executors. `cached` says
    that it was read from the disk (forge/cache), `uncached` why it is not kept there. `shortened`: of the stages the
    last ones alone were kept. `records`: it runs as CUDA graphs. `frozen` says what was folded into weights, `unfrozen`
    what was not and why, where that is wanted; `folded` refers to what was computed of weights.
    `measured`: what was measured of candidates for calls. `layers`: what became of modules for which there are layers.
    """

    cached = False
    shortened = False
    records = False

    def __init__(self) -> None:
        self.call: Callable = _not_compiled
        self.recipe: Recipe | None = None
        self.uncached: str | None = None
        self.grow: Callable[[Callable], Replacement] | None = None
        self.growing: Callable[[], Growing | None] = _nothing
        self.keep: Callable[[Recipe, Sequence[Executor]], None] | None = None
        self.traces: list[Trace] = []
        self.backward_traces: list[Trace] = []
        self.claims: list[Claim] = []
        self.backward_claims: list[Claim] = []
        self.declined: dict[str, Reasons] = {}
        self.opaque_calls: list[str] = []
        self.frozen: list[str] = []
        self.unfrozen: list[str] = []
        self.folded: Callable[[], Folded | None] = _nothing
        self.measured: list[Measured] = []
        self.saved: list[Saved] = []
        self.layers: list[LayerUse] = []
        self.again: list[Compiled] = []
        self.seconds: dict[str, float] = {}

    def handed_over(self) -> Callable:
        """What runs, which from now on its caller alone keeps alive."""
        call, self.call, self.recipe, self.grow = self.call, _not_compiled, None, None
        return call

    def assembled(self) -> Callable:
        """What runs, without what a front end sets around it."""
        return self.grown(assemble(self.recipe))

    def grown(self, call: Callable) -> Callable:
        """`call`, until it has larger regions, if it shall have them."""
        if self.grow is None or not is_wanted():
            return call
        growing = Growing(call, self.grow)
        self.growing = weakref.ref(growing)
        return growing.call

    def recorded(self) -> tuple[int, list[str]]:
        """How many CUDA graphs run, and why calls are in none, where they are wanted."""
        if not self.records:
            return 0, []
        last = [stages[-1] for stages in (self.traces, self.backward_traces) if stages]
        calls = [bound for trace in last for bound in trace.bound_symbols]
        graphs = [bound.symbol.op for bound in calls if isinstance(bound.symbol.op, Graph)]
        failed = [f"{graph.__name__}: {graph.failed}" for graph in graphs if graph.failed]
        others = [bound for bound in calls if bound.symbol is not DEL and not isinstance(bound.symbol.op, Graph)]
        reasons = [(bound.symbol.id, why_not(bound)) for bound in others]
        alone = [f"{name}: {reason}" for name, reason in reasons if reason is not None]
        return len(graphs) - len(failed), [*failed, *alone]

    @property
    def edited(self) -> list[str]:
        """The files that run in the place of what was generated."""
        return [trace.stage for trace in (*self.traces, *self.backward_traces) if trace.text is not None]

    def replace(
        self,
        traces: Sequence[Trace],
        claims: Sequence[Claim],
        backward_traces: Sequence[Trace] = (),
        backward_claims: Sequence[Claim] = (),
    ) -> None:
        """Other traces of the same program run from now on."""
        self.traces += traces
        self.claims[:] = claims
        self.backward_traces += backward_traces
        self.backward_claims[:] = backward_claims

    def shorten(self) -> None:
        """Of a large program's stages the last ones alone are kept, each call with those that it stands for."""
        every = [*self.traces, *self.backward_traces]
        if sum(len(trace.bound_symbols) for trace in every) > KEPT_CALLS and os.environ.get(KEEP_STAGES) != "1":
            self.shortened = True
            for stages in (self.traces, self.backward_traces):
                stages[:] = map(_shallow, stages[-1:])

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Adds the time that passes inside to `seconds[stage]`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


def _shallow(trace: Trace) -> Trace:
    """The trace without its calls' decompositions."""
    calls = [
        bound.replace(subsymbols=[sub.replace(subsymbols=()) for sub in bound.subsymbols])
        for bound in trace.bound_symbols
    ]
    return trace.derive(trace.stage, calls)


def _not_compiled(*inputs: Any) -> Any:
    raise AssertionError("called before it was compiled")


def _nothing() -> None:
    return None
