"""Timing of the benchmarks on a GPU, and tables of the results."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from forge.ir.printing import table
from forge.support.timing import seconds_per_call


def device_seconds(run: Callable[[], Any], *, rounds: int = 9, batch_seconds: float = 5e-4) -> float:
    """Seconds of a call's work on the GPU without its launch: the median over replays of a graph of several calls."""
    calls = max(1, min(30, int(batch_seconds / seconds_per_call(run, 5))))
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    graph.replay()
    found = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e-3 / calls)
    return statistics.median(found)


def show_table(rows: list[Sequence[str]]) -> None:
    """Columns, aligned."""
    print(*table(rows), sep="\n")
