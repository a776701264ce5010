"""forge.explain: what became of every operation of a jitted function, and why."""

from dataclasses import dataclass
from typing import Any

from forge.executors.claim import Claim
from forge.executors.selection import Measured
from forge.frontend.layers import LayerUse
from forge.ir.printing import counted, source_line, table
from forge.jit import NOT_KEPT, record_of

IN_TRAINING = "weights have gradients: what is made of them is computed at each call until optimizer.zero_grad()"


@dataclass(frozen=True)
class Row:
    """One operation that runs.

    graph: which graph, counted from 0. phase: "forward" or "backward". operation: the symbol that was claimed.
    executor: who claimed it. declined: (executor, reason) of those asked before. outputs: the names it makes.
    source: the user's line, where it is known.
    """

    graph: int
    phase: str
    operation: str
    executor: str
    declined: tuple[tuple[str, str], ...]
    outputs: tuple[str, ...]
    source: str | None


class Explanation:
    """What forge made of a function so far; prints as a table of every operation.

    rows: a Row for each. opaque_calls: names of the torch functions that torchlang does not have. graphs: how many
    were compiled. graph_breaks, recompiles: the reasons, in words. eager: why graphs run in eager. seconds: by stage.
    cached: how many graphs were found on disk, compiled by another process. uncached: why others are not kept there.
    recorded: how many CUDA graphs run. unrecorded: why calls, by name, are in none.
    frozen: what was folded into weights under freeze=True. unfrozen: what was not, and why.
    measured: what each candidate for a call was measured to take, and which one runs it (forge.jit(select="measured")).
    layers: for each module for which there is a layer, what became of it.
    shortened: whether forge.last_traces has the last stages alone.
    """

    def __init__(self, jitted: Any) -> None:
        record = record_of(jitted)
        self.rows: list[Row] = []
        self.opaque_calls: list[str] = []
        self.seconds: dict[str, float] = {}
        self.recorded = 0
        self.unrecorded: list[str] = []
        self.frozen: list[str] = []
        self.unfrozen: list[str] = []
        self.measured: list[Measured] = []
        self.layers: list[LayerUse] = []
        self.graphs = len(record.compiled) + len(record.eager)
        self.graph_breaks = list(record.history.graph_breaks)
        self.recompiles = list(record.history.recompiles)
        self.eager = list(record.eager)
        self.cached = sum(compiled.cached for compiled in record.compiled)
        self.shortened = any(compiled.shortened for compiled in record.compiled)
        self.uncached = [compiled.uncached for compiled in record.compiled if compiled.uncached]
        for number, compiled in enumerate(record.compiled):
            self.rows += [_row(number, "forward", claim) for claim in compiled.claims]
            self.rows += [_row(number, "backward", claim) for claim in compiled.backward_claims]
            self.opaque_calls += compiled.opaque_calls
            recorded, unrecorded = compiled.recorded()
            self.recorded += recorded
            self.unrecorded += unrecorded
            self.frozen += compiled.frozen
            self.unfrozen += compiled.unfrozen
            folded = compiled.folded()
            if folded is not None and folded.in_training:
                self.unfrozen.append(IN_TRAINING)
            self.measured += compiled.measured
            self.layers += compiled.layers
            for stage, seconds in compiled.seconds.items():
                self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    def __str__(self) -> str:
        if not self.graphs:
            return "nothing was compiled yet: call the function first"
        lines = [self._summary(), *_table(self.rows)]
        for title, reasons in (
            ("opaque calls", self.opaque_calls),
            ("graph breaks", self.graph_breaks),
            ("recompiles", self.recompiles),
            ("run in eager", self.eager),
            ("not kept on disk", self.uncached),
            ("outside of CUDA graphs", self.unrecorded),
            ("frozen", self.frozen),
            ("not frozen", self.unfrozen),
            ("layers", list(map(str, self.layers))),
            ("measured", list(map(str, self.measured))),
            ("stages", [NOT_KEPT] if self.shortened else []),
        ):
            lines += [f"{title}: {reason.strip().splitlines()[0]}" for reason in dict.fromkeys(reasons)]
        return "\n".join(lines)

    __repr__ = __str__

    def _summary(self) -> str:
        by_executor: dict[str, int] = {}
        for row in self.rows:
            by_executor[row.executor] = by_executor.get(row.executor, 0) + 1
        claimed = ", ".join(f"{name} {count}" for name, count in by_executor.items())
        return (
            f"{counted(self.graphs, 'graph')}, {counted(len(self.rows), 'operation')} ({claimed}), "
            f"{counted(len(self.opaque_calls), 'opaque call')}, {counted(len(self.graph_breaks), 'graph break')}, "
            f"{counted(len(self.recompiles), 'recompile')}"
            f"{f', {self.cached} from disk' if self.cached else ''}"
            f"{f', CUDA graphs: {self.recorded}' if self.recorded else ''}"
        )


def explain(jitted: Any) -> Explanation:
    """What forge made of a function or module that forge.jit returned. Raises TypeError for another."""
    return Explanation(jitted)


def _row(graph: int, phase: str, claim: Claim) -> Row:
    line = source_line(claim.source) if claim.source else None
    return Row(graph, phase, claim.operation, claim.executor, tuple(claim.declined), claim.outputs, line)


def _table(rows: list[Row]) -> list[str]:
    header = ("graph", "phase", "result", "operation", "executor", "declined by", "source")
    cells = [
        (
            str(row.graph),
            row.phase,
            ", ".join(row.outputs),
            row.operation,
            row.executor,
            "; ".join(f"{name}: {reason}" for name, reason in row.declined),
            row.source or "",
        )
        for row in rows
    ]
    return table([header, *cells])
