"""How the benchmarks measure time, and show it."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from forge.ir.printing import table


def seconds_per_call(run: Callable[[], Any], repetitions: int) -> float:
    """The mean of a batch of calls, without garbage collection; on a GPU, until its work is done."""
    finish = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    gc.disable()
    finish()
    start = time.perf_counter()
    for _ in range(repetitions):
        run()
    finish()
    elapsed = time.perf_counter() - start
    gc.enable()
    return elapsed / repetitions


def in_turn(runs: dict[str, Callable[[], Any]], *, rounds: int, batch_seconds: float = 0.03) -> dict[str, list[float]]:
    """Seconds per call of each, a batch of that many seconds at a time, one after the other in every round."""
    repetitions = {}
    for name, run in runs.items():
        seconds_per_call(run, 5)
        repetitions[name] = max(1, int(batch_seconds / seconds_per_call(run, 3)))
    found: dict[str, list[float]] = {name: [] for name in runs}
    gc.collect()
    gc.freeze()  # so that the collections below walk only what is new
    for _ in range(rounds):
        gc.collect()
        for name, run in runs.items():
            found[name].append(seconds_per_call(run, repetitions[name]))
    gc.unfreeze()
    return found


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


def ratio(ours: list[float], theirs: list[float]) -> float:
    """The median over rounds of ours over theirs."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def show_table(rows: list[Sequence[str]]) -> None:
    """Columns, aligned."""
    print(*table(rows), sep="\n")
