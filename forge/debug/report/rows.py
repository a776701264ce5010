"""The rows of forge.explain, one line each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from forge.compiler.claim import Claim
from forge.compiler.collectives import Collective
from forge.debug.profiling import Cost
from forge.transforms.split import SavedValue


@dataclass(frozen=True)
class Row:
    """One operation that runs.

    Attributes:
        graph: The index of the graph.
        phase: "forward" or "backward".
        operation: The symbol that an executor claimed.
        executor: The executor that claimed it.
        declined: (executor, reason) of each executor that declined before.
        outputs: The names of its results.
        results: The dtypes and shapes of its results, such as "f32[2, 4]".
        module: The path of the calling module, "" for the jitted one itself, None if unknown.
        source: The user's line, or None.
        region: The fusion that runs it with other operations, or None.
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
        """Return the row of a decision of the claim pass, or of the executor that runs a call after its region
        failed."""
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

    Attributes:
        graph: The index of the graph.
        name: The name in the trace.
        result: The dtype and shape.
        bytes: The size in bytes; None for symbolic sizes.
        own: True if saving it holds memory that the inputs and results of the program do not hold already.
        module: The path of the module that computes it, or None.
        source: The user's line, or None.
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
        """Return the rows of a program's saved tensors."""
        module, line = (saved.source.module, saved.source.line) if saved.source else (None, None)
        return cls(graph, saved.name, saved.metadata, saved.bytes, saved.own, module, line)


@dataclass(frozen=True)
class CostRow:
    """The cost of one call, of an operation or a fusion, measured by forge.explain(profile=True).

    Attributes:
        graph: The index of the graph.
        phase: "forward" or "backward".
        operation: The symbol, or the name of the fusion.
        executor: The executor that runs it.
        outputs: The names of the results.
        seconds: The median over runs, including layout and dtype conversions of the arguments.
        bytes: Memory that the results hold.
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
        """Yield the rows of the operations of one phase, and of the calls that run them, in order."""
        makers = {name: row for row in rows for name in row.outputs}
        regions: dict[str, list[Row]] = {}
        for row in rows:
            regions.setdefault(row.region or "", []).append(row)
        seconds, size = 0.0, 0
        for cost in costs:
            seconds, size = seconds + cost.seconds, size + cost.bytes
            maker = next((makers[name] for name in cost.outputs if name in makers), None)
            if maker is not None:
                name = maker.region or maker.operation
                members = regions[maker.region] if maker.region else [maker]
                outputs = tuple(output for each in members for output in each.outputs)
                yield cls(maker.graph, maker.phase, name, maker.executor, outputs, seconds, size)
                seconds, size = 0.0, 0


@dataclass(frozen=True)
class CollectiveRow:
    """One message of a program to other processes.

    Attributes:
        graph: The index of the graph.
        phase: "forward" or "backward".
        operation: "all_reduce", "all_gather", "reduce_scatter" or "all_to_all".
        group: The name of the process group.
        group_size: The number of its processes; None if this process does not know the group.
        tensors: The number of tensors that are sent together.
        bytes: The size in bytes of what is gathered, or of what is reduced, scattered or exchanged.
        sent_bytes: The bytes that each process sends by a ring algorithm.
        overlap: The calls that compute while the message is on its way.
        overlap_seconds: The time that these calls take, with `profile=True`; None if it was not measured.
        module: The path of the module that communicates, or None.
        source: The user's line, or None.
    """

    graph: int
    phase: str
    operation: str
    group: str
    group_size: int | None
    tensors: int
    bytes: int
    sent_bytes: int
    overlap: tuple[str, ...]
    overlap_seconds: float | None
    module: str | None
    source: str | None

    @classmethod
    def of(cls, graph: int, phase: str, collective: Collective) -> "CollectiveRow":
        """Return the row of a collective of a program."""
        operation, group, size, tensors, bytes, _, _, overlap, source = collective
        module, line = (source.module, source.line) if source else (None, None)
        return cls(
            graph, phase, operation, group, size, tensors, bytes, collective.sent_bytes, overlap, None, module, line
        )
