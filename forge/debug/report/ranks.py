"""The differences between the programs of several processes, which deadlock unless they communicate in one order."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch.distributed

from forge.ir import check
from forge.ir.printing import quantity

if TYPE_CHECKING:
    from forge.debug.report.explanation import Explanation
    from forge.debug.report.rows import CollectiveRow


def differences(explanation: "Explanation") -> list[str]:
    """Return a line for each difference between the processes of the default group, all of which have to call this.

    Raises:
        RuntimeError: If there is no process group.
    """
    check(
        torch.distributed.is_available() and torch.distributed.is_initialized(),
        lambda: "forge.explain: ranks is True, but there is no process group; call init_process_group first",
        RuntimeError,
    )
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, _facts(explanation))
    return [*_scalars(every), *_collectives([each["collectives"] for each in every])]


def _facts(explanation: "Explanation") -> dict[str, Any]:
    return {
        "graphs": explanation.graphs,
        "operations": ", ".join(f"{name} {count}" for name, count in explanation.executors.items()),
        "opaque calls": len(explanation.opaque_calls),
        "graph breaks": len(explanation.graph_breaks),
        "recompiles": len(explanation.recompiles),
        "run in eager": "; ".join(explanation.eager) or "nothing",
        "bytes saved for the backward": explanation.saved_bytes,
        "collectives": [_described(each) for each in explanation.collectives],
    }


def _described(row: "CollectiveRow") -> str:
    where = f" ({row.source})" if row.source else ""
    return (
        f"{row.operation} of {quantity(row.tensors, 'tensor')}, {row.bytes} B, in group {row.group}, "
        f"in the {row.phase} of graph {row.graph}{where}"
    )


def _scalars(every: Sequence[dict[str, Any]]) -> Iterator[str]:
    for name in every[0]:
        values = [each[name] for each in every]
        if name != "collectives" and any(value != values[0] for value in values):
            yield f"{name}: {by_ranks(values)}"


def _collectives(every: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the first collective in which processes differ; later ones are shifted."""
    for position, values in enumerate(zip_longest(*every, fillvalue="none")):
        if any(value != values[0] for value in values):
            yield f"collective {position}: {by_ranks(values)}"
            return


def by_ranks(values: Sequence[Any]) -> str:
    """Return each value with the ranks that have it, such as `1 on rank 0, 2 on ranks 1 to 3`."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {_rank_ranges(which)}" for value, which in ranks.items())


def _rank_ranges(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 0 to 7, 9`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    listing = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {listing}"
