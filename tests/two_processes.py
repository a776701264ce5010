"""Processes, two or more, that run functions of importable modules over gloo on the loopback."""

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.api import CheckpointException

WAIT = 300  # seconds for one function, however busy the machine is


class Pair:
    """Two processes of one group, or `size`.

    `run(function, *args, **options)` calls function(rank, *args, **options) in each and returns the results.

    Raises AssertionError with the traceback of a failure, or if a process does not answer.
    """

    def __init__(self, folder: Path, size: int = 2) -> None:
        context = torch.multiprocessing.get_context("spawn")  # autograd's threads do not survive a fork
        pipes = [context.Pipe() for _ in range(size)]
        self._ends = [own for own, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(rank, size, theirs, str(folder / "store")), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        self._asked = 0

    def run(self, function: Callable, *args: Any, **options: Any) -> list[Any]:
        self._asked += 1
        for end in self._ends:
            end.send((self._asked, function, args, options))
        answers = [self._answer(rank, function) for rank in range(len(self._ends))]
        for rank, (failure, _) in enumerate(answers):
            assert failure is None, f"process {rank}: {failure}"
        return [result for _, result in answers]

    def _answer(self, rank: int, function: Callable) -> Any:
        """Return a process's answer to the last function, skipping those to functions that were not awaited."""
        answered = None
        while answered != self._asked:
            assert self._ends[rank].poll(WAIT), f"process {rank} does not answer: {function.__name__} still runs"
            answered, answer = self._ends[rank].recv()
        return answer

    def end(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join()


class _OneThread(getattr(distributed_c10d, "ProcessGroupGloo", object)):  # type: ignore[misc]  # torch may have no gloo
    """A gloo backend with one thread. Two threads assign the names of completed operations to one string without a
    lock, and long names (reduce_scatter's) are occasionally freed twice (ProcessGroupGloo.cpp, runLoop)."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        options = self._Options()
        options._devices = [self.create_default_device()]
        options._timeout, options._threads = timeout, 1
        super().__init__(store, rank, size, options)


def _serve(rank: int, size: int, end: Any, store: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    found = torch.distributed.FileStore(store, size)
    distributed_c10d.ProcessGroupGloo = _OneThread
    torch.distributed.init_process_group("gloo", store=found, rank=rank, world_size=size)
    while True:
        asked, function, args, options = end.recv()
        torch.manual_seed(0)
        torch.compiler.reset()
        try:
            answer = None, function(rank, *args, **options)
        except (Exception, CheckpointException):  # the latter is a BaseException
            answer = traceback.format_exc(), None
        end.send((asked, answer))
