"""The report on the processes of a group when one of them waits for a collective without end.

torch's flight recorder records the last collectives of each process, with the lines that called them. A thread of each
process answers, through the store of the process group, requests for its last collectives and its current line. A
process sends a request when a collective of a compiled program fails, and when it has waited for one for
FORGE_COLLECTIVE_WARNING seconds (60 by default; 0: never).
"""

import contextlib
import faulthandler
import json
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed

from forge.ir.printing import sources_at
from forge.torch_internals.distributed import clone_store, recorded_collectives

WARNING = "FORGE_COLLECTIVE_WARNING"
ANSWERED_WITHIN = 8.0  # seconds; each process checks for requests once per second
_SECONDS = 60.0
_INTERVAL = 1.0
_LOOKS = 6  # checks of the pending collectives within the time of a warning
_LAST = 3  # collectives that a process reports
_TENSORS = 2  # of a collective whose shapes are reported
_ROOT = str(Path(__file__).parents[1])
_TORCH = os.path.dirname(torch.__file__)
_LIBRARIES = (_TORCH, _ROOT, "<frozen", "<string>", os.path.dirname(threading.__file__))
_COMPILING = (os.path.join(_ROOT, "compiler", "pipeline.py"), os.path.join(_TORCH, "_dynamo", "convert_frame.py"))
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_log = logging.getLogger("forge.distributed")


class CollectiveError(getattr(torch.distributed, "DistBackendError", RuntimeError)):  # type: ignore[misc]
    """A collective of a compiled program failed; the message names the last collectives of each rank."""

    __module__ = "forge.distributed"


class _State(NamedTuple):
    """The state of a process that answers. place: the current line of its main thread. collectives: the last ones, in
    order."""

    rank: int
    place: str
    collectives: Sequence[str]


class _Watch:
    """The watch of this process over the collectives of the default group."""

    def __init__(self) -> None:
        self.rank = torch.distributed.get_rank()
        self.size = torch.distributed.get_world_size()
        self.group = torch.distributed.group.WORLD
        self._own = clone_store()  # of the thread; a shared one would wait for others' requests
        self._answered = 0  # the number of answered requests
        self._looked = time.monotonic()
        self._warned: set[Any] = set()
        self.thread = threading.Thread(target=self._run, name="forge collective watch", daemon=True)
        self.thread.start()

    def ask(self) -> list[_State | None]:
        """Return the states of all processes; None for a process that does not answer."""
        store = clone_store()
        number = store.add("forge/collectives/requests", 1)
        until = time.monotonic() + ANSWERED_WITHIN
        states: list[_State | None] = []
        for rank in range(self.size):
            key = key_of_answer(number, rank)
            if rank == self.rank:
                states.append(self._state())
                continue
            while not store.check([key]) and time.monotonic() < until:
                time.sleep(0.05)
            states.append(_State(*json.loads(store.get(key))) if store.check([key]) else None)
        return states

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # the store is gone with its process, or the group is
            while torch.distributed.is_initialized() and torch.distributed.group.WORLD is self.group:
                self._look()
                time.sleep(_INTERVAL)

    def _look(self) -> None:
        self._answer()
        limit = _warning_seconds()
        if not limit or time.monotonic() - self._looked < limit / _LOOKS:
            return
        self._looked = time.monotonic()
        stuck = [each for each in recorded_collectives(frames=False) if not each["retired"] and _age(each) > limit]
        new = [each for each in stuck if each["record_id"] not in self._warned]
        if new:
            self._warned.update(each["record_id"] for each in stuck)
            threading.Thread(target=self._warn, args=(_age(new[0]),), daemon=True).start()

    def _warn(self, seconds: float) -> None:
        """Send a request in a separate thread, so that this process answers meanwhile."""
        with contextlib.suppress(Exception):
            _log.warning("rank %d waits for a collective for %.0f s\n%s", self.rank, seconds, _table(self.ask()))

    def _answer(self) -> None:
        count = self._own.add("forge/collectives/requests", 0)
        for number in range(self._answered + 1, count + 1):
            self._own.set(key_of_answer(number, self.rank), json.dumps(self._state()))
        self._answered = count

    def _state(self) -> _State:
        last = recorded_collectives(frames=True)[-_LAST:]
        return _State(self.rank, _main_thread_location(), [_described(each) for each in last])


def key_of_answer(number: int, rank: int) -> str:
    """Return the key, in the store of the default group, of a process's answer to a request."""
    return f"forge/collectives/request {number}/rank {rank}"


_watch: _Watch | None = None


def watch() -> None:
    """Make this process answer other processes' requests, and log their states when it waits for them."""
    global _watch
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    if _watch is None or not _watch.thread.is_alive():
        backend = torch.distributed.get_backend()
        _watch = _Watch() if torch.distributed.get_world_size() > 1 and backend != "fake" else None


def last_collectives() -> str:
    """Return a line for each process of the default group: its last collectives, and the line at which it is.

    One that does not answer within seconds has ended, or holds Python's lock.

    Raises:
        RuntimeError: If there is no process group of several processes.
    """
    watch()
    if _watch is None:
        raise RuntimeError("last_collectives: there is no process group of several processes")
    return _table(_watch.ask())


def collective_error(error: RuntimeError) -> RuntimeError:
    """Return an error that also names the last collectives of each rank."""
    try:
        report = last_collectives()
    except Exception as reason:  # the store is gone with its process
        report = f"the last collectives of other ranks are not known: {reason}"
    return CollectiveError(f"{error}\n{report}")


def _table(states: Sequence[_State | None]) -> str:
    lines = []
    for rank, state in enumerate(states):
        if state is None:
            lines.append(f"rank {rank} does not answer: its process has ended, or holds Python's lock")
            continue
        lines.append(f"rank {rank} is at {state.place}; its last collectives:")
        lines += [f"  {each}" for each in state.collectives or ["none"]]
    return "\n".join(lines)


def _warning_seconds() -> float:
    try:
        return float(os.environ.get(WARNING, _SECONDS))
    except ValueError:
        return _SECONDS


def _age(entry: dict[str, Any]) -> float:
    return time.time() - entry["time_created_ns"] / 1e9


def _described(entry: dict[str, Any]) -> str:
    """Return `7: gloo:all_reduce of float[4] in default_pg, ended, at model.py:10  h = x @ w`."""
    operands = zip(entry["input_dtypes"][:_TENSORS], entry["input_sizes"], strict=False)
    shapes = [f"{dtype.lower()}{list(shape)}" for dtype, shape in operands]
    others = len(entry["input_sizes"]) - len(shapes)
    tensors = ", ".join([*shapes, f"{others} more"] if others else shapes)
    state = "ended" if entry["retired"] else f"running for {_age(entry):.0f} s"
    name, description = entry["process_group"]
    group = f"group {name} ({description})" if description not in ("", "undefined") else f"group {name}"
    payload = f" of {tensors}" if tensors else ""
    return f"{entry['collective_seq_id']}: {entry['profiling_name']}{payload} in {group}, {state}{_location(entry)}"


def _location(entry: dict[str, Any]) -> str:
    """Return the user's line of a collective; in a program of forge, the line that the generated call stands for."""
    for frame in entry.get("frames", ()):
        name, line = frame["filename"], frame["line"]
        sources = sources_at(name, line)
        if sources:
            return f", at {sources[0].line}{f' and {len(sources) - 1} other lines' if len(sources) > 1 else ''}"
        if not name.startswith((*_LIBRARIES, "<forge")):
            return f", at {os.path.basename(name)}:{line}"
    return ""


def _main_thread_location() -> str:
    """Return the user's current line in the main thread, and whether it is compiling.

    It uses faulthandler, which makes no frame objects: those of sys._current_frames outlive the frames that Dynamo
    runs.
    """
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        threads = file.read().split("\n\n")
    ident = f"hread 0x{threading.main_thread().ident or 0:016x} "
    frames = [match for thread in threads if ident in thread.splitlines()[0] for match in _FRAME.findall(thread)]
    compiles = any(path.startswith(_COMPILING) for path, _, _ in frames)
    for path, line, function in frames:
        if not path.startswith((*_LIBRARIES, "<forge")):
            return f"{os.path.basename(path)}:{line} in {function}{', which compiles' if compiles else ''}"
    return "a line of a library"
