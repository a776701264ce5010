"""The rows of forge.explain, one line each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from forge.compiler.claim import Claim
from forge.debug.profiling import Cost
from forge.transforms.split import SavedValue


@dataclass(frozen=True)
class Row:
    """One operation that runs.

    graph: which graph, counted from 0. phase: "forward" or "backward". operation: the symbol that was claimed.
    executor: who claimed it. declined: (executor, reason) of those asked before. outputs: the names it makes.
    results: their dtypes and shapes, such as "f32[2, 4]". module: the path of the module that makes the call, "" for
    the jitted one itself, None where it is not known. source: the user's line, where it is known. region: the name of
    the fusion that runs it together with others.
    """

    graph: int
    phase: str
    operation: str
    executor: str
    declined: tuple[tuple[str, str], ...]
    outputs: tuple[str, ...]
    results: tuple[str, ...]
    module: str | None
    source: str | None
    region: str | None

    @classmethod
    def of(cls, graph: int, phase: str, claim: Claim) -> "Row":
        """Of what the claim pass decided, or of what runs a call since its region failed."""
        source, executor, declined, region = claim.source, claim.executor, claim.declined, claim.region
        if claim.fallback is not None and claim.fallback.reason is not None:
            declined = [*declined, (executor, claim.fallback.reason)]
            executor, region = claim.fallback.executor, None
        return cls(
            graph,
            phase,
            claim.operation,
            executor,
            tuple(declined),
            claim.outputs,
            claim.results,
            source.module if source else None,
            source.line if source else None,
            region,
        )


@dataclass(frozen=True)
class SavedRow:
    """A tensor that a forward saves for its backward.

    name, result: as in the trace, and its dtype and shape. bytes: None where lengths are symbols. own: whether saving
    it keeps memory that inputs and results of the program do not keep anyway. module, source: where it is made.
    """

    graph: int
    name: str
    result: str
    bytes: int | None
    own: bool
    module: str | None
    source: str | None

    @classmethod
    def of(cls, graph: int, saved: SavedValue) -> "SavedRow":
        """Of what a program saves."""
        module, line = (saved.source.module, saved.source.line) if saved.source else (None, None)
        return cls(graph, saved.name, saved.metadata, saved.bytes, saved.own, module, line)


@dataclass(frozen=True)
class CostRow:
    """What a call takes that runs an operation, or those of a fusion, measured by forge.explain(profile=True).

    operation: the symbol, or the fusion's name. outputs: the names that the operations make. seconds: the median over
    runs, with what lays out or converts the call's arguments before it. bytes: of memory that the results hold.
    """

    graph: int
    phase: str
    operation: str
    executor: str
    outputs: tuple[str, ...]
    seconds: float
    bytes: int

    @classmethod
    def of(cls, rows: Sequence[Row], costs: Sequence[Cost]) -> Iterator["CostRow"]:
        """Of the operations of one phase, and the calls that run them, in order."""
        makers = {name: row for row in rows for name in row.outputs}
        regions: dict[str, list[Row]] = {}
        for row in rows:
            regions.setdefault(row.region or "", []).append(row)
        seconds, size = 0.0, 0
        for cost in costs:
            seconds, size = seconds + cost.seconds, size + cost.bytes
            row = next((makers[name] for name in cost.outputs if name in makers), None)
            if row is not None:
                name = row.region or row.operation
                made = regions[row.region] if row.region else [row]
                outputs = tuple(output for each in made for output in each.outputs)
                yield cls(row.graph, row.phase, name, row.executor, outputs, seconds, size)
                seconds, size = 0.0, 0
