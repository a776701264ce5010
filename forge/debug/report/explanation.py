"""forge.explain: the executor of every operation, with the reasons."""

import dataclasses
import json
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult

from forge.capture.handles import JitHandle, eager_modules, handles_of
from forge.capture.history import breaks_of_process
from forge.compiler.autotune import Measurement
from forge.compiler.collectives import collectives_of, overlap
from forge.compiler.program import StrictError
from forge.compiler.report import CompileReport, LayerUse
from forge.debug.profiling import can_profile, costs
from forge.debug.report import page, text
from forge.debug.report.ranks import differences
from forge.debug.report.rows import CollectiveRow, CostRow, Row, SavedRow
from forge.executors.executor import Declined
from forge.ir import Trace

_PHASES = "forward", "backward"
IN_TRAINING = "weights have gradients: what is made of them is computed at each call until optimizer.zero_grad()"


class Explanation:
    """A report of a jitted function or module, printed as text that fits the terminal and as HTML in a notebook.

    Attributes:
        name: The name of the target.
        captured: True if Dynamo captured a call.
        ungiven: True if the target is of torch.compile(backend="forge") and Dynamo passed no graph to forge;
            `graph_breaks` then has those that Dynamo counted in this process.
        rows: A Row for each operation that runs.
        saved: A SavedRow for each tensor that a backward needs.
        collectives: A CollectiveRow for each message to other processes, in the order in which they start.
        costs: A CostRow for each call, with `profile=True`.
        unprofiled: Reasons why graphs or calls have no cost.
        graphs: The number of graphs.
        graph_breaks: A line for each graph break, the last ones if there are many.
        recompiles: A line for each recompile, the last ones if there are many.
        opaque_calls: Names of torch functions without a torchlang symbol.
        eager: Reasons why graphs or calls run in eager.
        skipped: Functions that Dynamo does not capture, with the reason.
        outside: The parts of a module that are not jitted.
        seconds: Compile time by stage.
        cached: The number of graphs loaded from the cache on disk.
        uncached: Reasons why graphs are not cached.
        recorded: The number of CUDA graphs.
        unrecorded: Reasons why calls are in no CUDA graph, by name.
        frozen: Folds of weights under freeze=True.
        unfrozen: Reasons why other weights are not folded.
        edited: Files that run in place of generated programs (forge.jit(edit=folder)).
        measured: Times of the candidates for a call and the one that runs (forge.jit(select="measured")).
        layers: The outcome for each module for which a layer exists.
        ranks: A line for each fact in which the processes differ, with `ranks=True`.
        numerics: The rounding of regions, "fast" or "eager".
        shortened: True if forge.last_traces has the last stages alone.
    """

    def __init__(
        self, name: str, records: list[JitHandle], *, profile: bool = False, outside: Sequence[str] = ()
    ) -> None:
        self.name = name
        self.captured = any(record.history.captured or record.reports for record in records)
        self.ungiven = all(record.by_torch and not record.history.graphs for record in records) and bool(records)
        self.rows: list[Row] = []
        self.saved: list[SavedRow] = []
        self.collectives: list[CollectiveRow] = []
        self.opaque_calls: list[str] = []
        self.graphs = 0
        self.graph_breaks: list[str] = []
        self.recompiles: list[str] = []
        self.eager: list[str] = []
        self.skipped: list[str] = []
        self.outside: list[str] = list(outside)
        self.seconds: dict[str, float] = {}
        self.cached = 0
        self.uncached: list[str] = []
        self.recorded = 0
        self.unrecorded: list[str] = []
        self.frozen: list[str] = []
        self.unfrozen: list[str] = []
        self.edited: list[str] = []
        self.measured: list[Measurement] = []
        self.layers: list[LayerUse] = []
        self.ranks: list[str] = []
        self.numerics = next((record.numerics for record in records if record.numerics != "fast"), "fast")
        self.shortened = False
        self.costs: list[CostRow] = []
        self.unprofiled: list[str] = []
        self._programs: list[weakref.ref[CompileReport] | None] = []  # one per graph, only for the page
        for record in records:
            self._add(record)
        if self.ungiven:
            self.graph_breaks += breaks_of_process()
        if profile:
            for number, report in enumerate(self._still_there()):
                self._measure(number, report)

    def _add(self, record: JitHandle) -> None:
        first = self.graphs
        self.graphs += len(record.reports) + len(record.eager)
        self.graph_breaks += record.history.graph_breaks
        self.recompiles += record.history.recompiles
        self.eager += record.eager + record.history.limits
        self.skipped += record.history.skipped
        for number, report in enumerate(record.reports, first):
            self.rows += [Row.of(number, "forward", claim) for claim in report.claims]
            self.rows += [Row.of(number, "backward", claim) for claim in report.backward_claims]
            self.saved += [SavedRow.of(number, saved) for saved in report.saved]
            for phase, collectives in zip(_PHASES, report.collectives(), strict=True):
                self.collectives += [CollectiveRow.of(number, phase, each) for each in collectives]
            self._programs.append(weakref.ref(report))
            self.opaque_calls += report.opaque_calls
            self.cached += report.cached
            self.shortened |= report.shortened
            self.uncached += [report.uncached] if report.uncached else []
            recorded, unrecorded = report.cuda_graphs()
            self.recorded += recorded
            self.unrecorded += unrecorded
            self.frozen += report.frozen
            self.unfrozen += report.unfrozen
            self.edited += report.edited_files
            self.measured += report.measured
            self.layers += report.layers
            for stage, seconds in report.seconds.items():
                self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        self.unfrozen += [IN_TRAINING for weights in record.folded_weights() if weights.in_training]
        self._programs += [None] * len(record.eager)

    def _measure(self, number: int, report: CompileReport | None) -> None:
        if report is None or not report.traces:
            return
        traces = [stages[-1] for stages in (report.traces, report.backward_traces) if stages]
        decision = can_profile(*traces)
        if isinstance(decision, Declined):
            self.unprofiled.append(f"graph {number}: {decision.reason}")
            return
        costs_by_phase, left_out = costs(traces[0], traces[1] if len(traces) > 1 else None)
        self.unprofiled += [f"graph {number}: {reason}" for reason in left_out]
        for phase, trace, call_costs in zip(_PHASES, traces, costs_by_phase, strict=False):
            rows = [row for row in self.rows if (row.graph, row.phase) == (number, phase)]
            self.costs += CostRow.of(rows, call_costs)
            self._time_overlap(
                number, phase, trace, {cost.outputs[0]: cost.seconds for cost in call_costs if cost.outputs}
            )

    def _time_overlap(self, number: int, phase: str, trace: Trace, seconds: Mapping[str, float]) -> None:
        """Add the time of the calls that overlap with each collective of a trace."""
        places = [i for i, each in enumerate(self.collectives) if (each.graph, each.phase) == (number, phase)]
        for place, each in zip(places, collectives_of(trace), strict=True):
            calls = overlap(trace, each.start, each.wait)
            overlap_seconds = sum(seconds.get(bound.outputs[0], 0.0) for bound in calls if bound.outputs)
            self.collectives[place] = dataclasses.replace(self.collectives[place], overlap_seconds=overlap_seconds)

    @property
    def executors(self) -> dict[str, int]:
        """Return the number of operations that each executor runs."""
        return dict(Counter(row.executor for row in self.rows))

    @property
    def regions(self) -> dict[tuple[int, str, str], list[Row]]:
        """The operations of each fusion, by (graph, phase, name)."""
        regions: dict[tuple[int, str, str], list[Row]] = {}
        for row in self.rows:
            if row.region is not None:
                regions.setdefault((row.graph, row.phase, row.region), []).append(row)
        return regions

    @property
    def saved_bytes(self) -> int:
        """Return the bytes that a backward keeps in memory beyond inputs, parameters and results; tensors of symbolic
        sizes are not counted."""
        return sum(each.bytes or 0 for each in self.saved if each.own)

    def require(self, executor: str) -> None:
        """Raise an error unless an executor or a kernel of this name runs an operation.

        Raises:
            StrictError: With the reason of each call that it declined.
        """
        if executor in self.executors:
            return
        declined = [(name, reason, row) for row in self.rows for name, reason in row.declined]
        reasons = dict.fromkeys(
            f"\n  it declined {row.operation}{f' ({row.source})' if row.source else ''}: {reason}"
            for name, reason, row in declined
            if name == executor
        )
        why = "it runs no operation" + "".join(reasons)
        if not self.rows:
            why = text.summary(self)
        elif not reasons:
            candidates = sorted({*self.executors, *(name for name, _, _ in declined)})
            why = f"no operation was offered to it; asked were {', '.join(candidates)}"
        raise StrictError(f"forge.explain(...).require({executor!r}): {why}")

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain lists, dicts, strings and numbers."""
        tables = ("rows", "saved", "collectives", "measured", "costs")
        others = (*tables, "layers", "_programs")
        facts = {name: value for name, value in vars(self).items() if name not in others}
        fields = {name: list(map(dataclasses.asdict, getattr(self, name))) for name in tables}
        fields["layers"] = [each._asdict() for each in self.layers]
        return {**facts, "executors": self.executors, "saved_bytes": self.saved_bytes, **fields}

    def to_json(self, path: str | Path | None = None) -> str:
        """Return all of it as JSON; written to `path` as well, where one is given."""
        content = json.dumps(self.to_dict(), indent=2)
        if path is not None:
            Path(path).write_text(content)
        return content

    def to_html(self, path: str | Path | None = None) -> str:
        """Return all of it as one page that needs nothing else, with the traces of the graphs that are still there;
        written to `path` as well, where one is given."""
        content = page.page(self, self._still_there())
        if path is not None:
            Path(path).write_text(content, encoding="utf-8")
        return content

    def _repr_html_(self) -> str:
        return page.frame(self, self._still_there())

    def _still_there(self) -> list[CompileReport | None]:
        """Return the graphs, None for graphs that Dynamo has dropped and for graphs that run in eager."""
        return [None if program is None else program() for program in self._programs]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from text.render(self)

    def __str__(self) -> str:
        return text.plain(self)

    __repr__ = __str__


def explain(target: Any = None, *, profile: bool = False, ranks: bool = False) -> Explanation:
    """Return a report: the executor of each operation, the reasons of those that declined, fusions, and saved tensors.

    The report also has graph breaks, recompiles, graphs that run in eager, and the compile time by stage.

    Args:
        target: A result of forge.jit; a module that contains some, such as DistributedDataParallel; a result of
            torch.compile(backend="forge"); or None for every jitted function of the process.
        profile: Run each program again for about a second, on random tensors of the same metadata, and report the
            time and memory of each call. Nothing is sent to other processes.
        ranks: Compare the programs of all processes of torch.distributed's default group, each of which calls this.

    Returns:
        The report: it prints as text, has its rows as data, and writes a page with `to_html`.

    Raises:
        TypeError: For another target.
        RuntimeError: With `ranks=True`, if there is no process group.
    """
    name, records = handles_of(target)
    explanation = Explanation(name, records, profile=profile, outside=eager_modules(target))
    if ranks:
        explanation.ranks += differences(explanation)
    return explanation
