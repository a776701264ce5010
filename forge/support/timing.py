"""The time of functions: each in turn in every round, so that what slows the machine down slows all of them."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

SECONDS = 0.5  # for all candidates of a call together
_ROUNDS = 31
_BATCH = 2e-3  # seconds of one candidate in one round, where that is several calls


def time_candidates(runs: Mapping[str, Callable[[], Any]], device: torch.device) -> dict[str, float]:
    """Return the seconds per warm call of each, the median over rounds. All take about SECONDS, but each is called six
    times at least."""
    for run in runs.values():
        _seconds_per_call(run, 2, device)
    once = {name: _seconds_per_call(run, 1, device) for name, run in runs.items()}
    calls = {name: max(1, int(_BATCH / max(seconds, 1e-7))) for name, seconds in once.items()}
    a_round = sum(seconds * calls[name] for name, seconds in once.items())
    rounds = min(_ROUNDS, max(3, int(SECONDS / a_round)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(_seconds_per_call(run, calls[name], device))
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def in_turn(
    runs: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    batch_seconds: float = 0.03,
    agree: Callable[[int], int] = int,
) -> dict[str, list[float]]:
    """Return the seconds per call of each in each round, in which they run in turn, for that many seconds each.

    agree: gives the number of calls in a round, of the number that this process would make.
    """
    calls = {}
    for name, run in runs.items():
        seconds_per_call(run, 5)
        calls[name] = agree(max(1, int(batch_seconds / seconds_per_call(run, 3))))
    times: dict[str, list[float]] = {name: [] for name in runs}
    gc.collect()
    gc.freeze()  # so that the collections below walk only what is new
    for _ in range(rounds):
        gc.collect()
        for name, run in runs.items():
            times[name].append(seconds_per_call(run, calls[name]))
    gc.unfreeze()
    return times


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median over rounds of ours over theirs."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def seconds_per_call(run: Callable[[], Any], calls: int) -> float:
    """Return the mean of some calls by the clock on the wall, without garbage collection; on a GPU until its work is
    done."""
    finish = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None

    def time_once() -> float:
        finish()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        finish()
        return time.perf_counter() - start

    return _without_collecting(time_once) / calls


def _seconds_per_call(run: Callable[[], Any], calls: int, device: torch.device) -> float:
    """Return the mean of some calls without garbage collection; on a GPU by its own clock, until its work is done."""
    if device.type != "cuda":
        return seconds_per_call(run, calls)
    return _without_collecting(lambda: _on_gpu(run, calls)) / calls


def _without_collecting(measure: Callable[[], float]) -> float:
    collects = gc.isenabled()
    gc.disable()
    try:
        return measure()
    finally:
        if collects:
            gc.enable()


def _on_gpu(run: Callable[[], Any], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end)
