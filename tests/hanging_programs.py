"""Programs of the two processes of tests/distributed/test_hangs.py, in which one does not take part in a collective."""

import datetime
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import forge
from forge.distributed import CollectiveError, last_collectives
from forge.torch_internals.distributed import clone_store
from forge.torchlang import collective_watch

_LONG, _SHORT = datetime.timedelta(minutes=2), datetime.timedelta(seconds=4)


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _reduced_in(timeout: datetime.timedelta) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a compiled function that has run once, with a collective in a group with this timeout."""
    group = dist.new_group(timeout=timeout)
    jitted = forge.jit(lambda x: functional.all_reduce(x * 2, "sum", group) + 1)
    jitted(torch.ones(3))
    return jitted


def one_is_slow(rank: int) -> tuple[list[str], list[float]]:
    """Return the warnings of a process whose peer takes part late, and the result."""
    messages, logger = _Messages(), logging.getLogger("forge.distributed")
    logger.addHandler(messages)
    os.environ[collective_watch.WARNING] = "1"
    try:
        reduce = _reduced_in(_LONG)
        if rank == 1:
            _work_alone(rank)
        result = reduce(torch.ones(3)).tolist()
        until = time.monotonic() + 60
        while rank == 0 and not messages.lines and time.monotonic() < until:  # a thread writes them
            time.sleep(0.1)
        return messages.lines, result
    finally:
        logger.removeHandler(messages)
        del os.environ[collective_watch.WARNING]


def _work_alone(rank: int) -> None:
    """Wait until the other process has requested and received this one's location."""
    until = time.monotonic() + 60
    store = clone_store()
    key = collective_watch.key_of_answer(store.add("forge/collectives/requests", 0) + 1, rank)
    while not store.check([key]) and time.monotonic() < until:
        time.sleep(0.1)


def one_hangs(rank: int) -> str:
    """Return the error of a process whose peer waits for it in another collective."""
    reduce = _reduced_in(_SHORT)
    try:
        if rank == 0:
            reduce(torch.ones(3))
        dist.barrier()
    except CollectiveError as error:
        dist.barrier()
        return str(error)
    return "no error"


def one_dies(rank: int, folder: str) -> None:
    """Write the error of a process whose peer has ended to a file."""
    reduce = _reduced_in(_LONG)
    if rank == 1:
        os._exit(1)
    try:
        reduce(torch.ones(3))
    except CollectiveError as error:
        Path(folder, "error").write_text(str(error))


def asked(rank: int) -> str:
    """Return one process's report on both, while the other one waits for it."""
    found = last_collectives() if rank == 0 else ""
    dist.barrier()
    return found
