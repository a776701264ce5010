"""Timing on a GPU, and tables of results, for the benchmarks."""

import gzip
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from forge.ir.printing import table
from forge.support.timing import seconds_per_call


def device_seconds(run: Callable[[], Any], *, rounds: int = 9, batch_seconds: float = 5e-4) -> float:
    """Return the seconds of a call on the GPU without its launch: the median over replays of a graph of calls."""
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
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / calls)
    return statistics.median(times)


def exposed_seconds(trace: Path) -> float:
    """Return the seconds in which a device does nothing but communicate, in a trace exported by torch.profiler.

    These are the times of NCCL's kernels during which no other kernel or copy runs.
    """
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    work = [each for each in events if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    computed = [each for each in work if "nccl" not in each["name"]]
    return (_covered(work) - _covered(computed)) * 1e-6


def _covered(events: Iterable[dict[str, Any]]) -> float:
    """Return the µs covered by at least one of the events."""
    covered, until = 0.0, -math.inf
    for start, end in sorted((each["ts"], each["ts"] + each["dur"]) for each in events):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def show_table(rows: list[Sequence[str]]) -> None:
    """Print the rows in aligned columns."""
    print(*table(rows), sep="\n")
