"""The time of a model's call in several processes that share its work (forge bench --nproc).

Each process runs the same command by torchrun; what is printed are the slowest process's times, by the first one.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import nn

from forge.benchmark.model_bench import EAGER, OURS, Case, System, SystemTiming, compare
from forge.distributed import shard
from forge.support.timing import in_turn


def is_launched() -> bool:
    """Return whether torchrun started this process."""
    return torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()


def launch(arguments: Sequence[str], processes: int) -> dict[str, Any] | None:
    """Run `forge bench --json` with these arguments in several processes of this machine; return what the first one
    prints, None if they failed."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *torchrun, "-m", "forge", "bench", "--json", *arguments]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # as torchrun sets it, which says so
    process = subprocess.run(command, env=environment, check=False, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] | None = json.loads(process.stdout) if process.returncode == 0 else None
    return result


@contextmanager
def process_group(device: torch.device) -> Iterator[torch.device]:
    """Enter the process group that torchrun describes; yield the device of this process."""
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(torch.distributed.get_default_backend_for_device(device))
    try:
        yield device
    finally:
        torch.distributed.destroy_process_group()


def systems(base: Mapping[str, System], plan: str) -> dict[str, System]:
    """Return the systems with a model's work shared by a plan: "ddp", "fsdp" or "shard"."""
    return {name: _shared(each, plan) for name, each in base.items()}


def _shared(system: System, plan: str) -> System:
    def finish(model: Any) -> None:
        system.finish(model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model)

    return replace(system, prepare=partial(_prepare, system, plan), finish=finish)


def _prepare(system: System, plan: str, model: nn.Module) -> Callable[..., Any]:
    from torch.distributed.fsdp import fully_shard  # imports Dynamo

    ours = system.name == OURS
    if plan == "ddp":
        if ours:  # the backward hands out gradients in DDP's buckets
            return nn.parallel.DistributedDataParallel(system.prepare(model))
        return system.prepare(nn.parallel.DistributedDataParallel(model))
    sharded: Any = shard(model) if plan == "shard" and ours else fully_shard(model)
    return sharded if system.name == EAGER else system.prepare(sharded)


def compare_in_processes(case: Case, compared: Sequence[System], rounds: int) -> list[SystemTiming]:
    """Return the times of each system: of each round, that of the slowest process."""
    timings = compare(case, compared, rounds, partial(in_turn, agree=_largest))
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, timings)
    return [_slowest(each) for each in zip(*every, strict=True)]


def _largest(calls: int) -> int:
    """Return the largest number of calls of any process: all of them run as many."""
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, calls)
    return max(every)


def _slowest(timings: Sequence[SystemTiming]) -> SystemTiming:
    failed = [each for each in timings if each.reason is not None]
    if failed:
        return failed[0]
    rounds = [max(each) for each in zip(*[each.seconds for each in timings], strict=True)]
    return SystemTiming(timings[0].system, rounds, max(each.first or 0.0 for each in timings))
