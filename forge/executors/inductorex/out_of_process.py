"""Graphs that other processes compile: a few at a time, with the settings of this one.

A process costs two seconds of its own, but takes nothing from the program that runs meanwhile: no time under the
interpreter's lock, no thread that a fork would lose.

Inductor's own way lacks forge's patches: see ALTERNATIVES of forge/torch_internals/patch.py.
"""

import atexit
import logging
import os
import pickle
import subprocess
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forge.executors.executor import Decision, decline
from forge.executors.inductorex import processes
from forge.executors.inductorex.artifacts import load_with_strides
from forge.executors.inductorex.graphs import PlainGraph
from forge.executors.inductorex.strides import Strides
from forge.torch_internals.inductor.config import inductor_config

_log = logging.getLogger("forge.inductor")


@dataclass(frozen=True)
class Settings:
    """The settings of this process that Inductor's results depend on."""

    threads: int
    matmul_precision: str
    inductor: dict[str, Any]

    @classmethod
    def current(cls) -> "Settings":
        """Return the settings of this process."""
        return cls(
            torch.get_num_threads(), torch.get_float32_matmul_precision(), inductor_config.save_config_portable()
        )

    def apply(self) -> None:
        """Apply the settings to this process."""
        torch.set_num_threads(self.threads)
        torch.set_float32_matmul_precision(self.matmul_precision)
        inductor_config.load_config(self.inductor)


class Compilation:
    """A graph that is to be compiled; once `state` says so, a function of one list.

    strides: those that its results are given where the artifact's differ. A compilation that nobody waits
    for any longer ends.
    """

    def __init__(self, graph: PlainGraph, strides: Strides) -> None:
        self._strides = strides
        self._job = _Job(pickle.dumps((graph, Settings.current())))
        self._function: Callable | None = None
        self._state: Decision = False
        self._loading: threading.Thread | None = None
        self.on_cpu = all(layout.device.type == "cpu" for layout in graph.inputs)
        _queue.put(self._job)
        weakref.finalize(self, self._job.stop)

    def __call__(self, boxed: list[Any]) -> Any:
        assert self._function is not None
        return self._function(boxed)

    @property
    def function(self) -> Callable | None:
        """Return the compiled function; None until it is loaded."""
        return self._function

    def state(self) -> Decision:
        """Return True where it can be called, False while it is being compiled, Declined where that failed."""
        if self._state is False and self._loading is None:
            _queue.advance()
            result = self._job.result()
            if not isinstance(result, bytes):
                self._state = result
            else:  # its library is built, if another one was, and opened: the program goes on meanwhile
                self._loading = threading.Thread(target=self._load, args=(result,))
                self._loading.start()
        return self._state

    def _load(self, artifact: bytes) -> None:
        try:
            with processes.no_fork:
                self._function = load_with_strides(artifact, self._strides)
            self._state = True
        except Exception as error:
            _log.debug("a compiled graph cannot be loaded", exc_info=True)
            reason = f"what another process compiled cannot be loaded: {type(error).__name__}: {error}"
            self._state = decline(reason)


class _Job:
    """One process's work, in a folder of its own."""

    def __init__(self, data: bytes) -> None:
        self.owner = os.getpid()
        self.stopped = False
        self.failed: Decision = False
        self._data = data
        self._folder: tempfile.TemporaryDirectory
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forge-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        (folder / "job").write_bytes(self._data)
        self._data = b""
        with (folder / "log").open("wb") as log:
            self._process = processes.start(str(folder), folder=folder, log=log)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def result(self) -> bytes | Decision:
        """Return the artifact's bytes, Declined, or False while there is none yet."""
        if self.stopped or self.owner != os.getpid():
            return decline("the compile process belongs to another process, or was stopped")
        if self._process is None or self.is_running:
            return self.failed
        folder = Path(self._folder.name)
        try:
            if (folder / "artifact").exists():
                return (folder / "artifact").read_bytes()
            _log.debug("%s", (folder / "log").read_text(errors="replace"))
            known = (folder / "error").exists()
            why = (folder / "error").read_text() if known else f"the process ended with {self._process.returncode}"
            return decline(f"the region could not be compiled: {why}")
        finally:
            self._folder.cleanup()

    def stop(self) -> None:
        """End it, if it runs."""
        self.stopped = True
        if self.owner == os.getpid() and self._process is not None:
            processes.end(self._process)


class _Queue:
    """The jobs in the order in which they came; half of the processor's cores work for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._limit = max(1, (os.cpu_count() or 1) // 2)

    def put(self, job: _Job) -> None:
        self._waiting.append(job)
        self.advance()

    def advance(self) -> None:
        """Start what may start now."""
        with self._lock:
            self._running = [job for job in self._running if job.is_running]
            while self._waiting and len(self._running) < self._limit:
                job = self._waiting.popleft()
                if not job.stopped:
                    self._start(job)

    def _start(self, job: _Job) -> None:
        try:
            job.start()
            self._running.append(job)
        except OSError as error:  # no room on the disk, no more processes
            job.failed = decline(f"no process could be started: {error}")

    def stop(self) -> None:
        """End all."""
        for job in [*self._waiting, *self._running]:
            job.stop()


_queue = _Queue()
atexit.register(lambda: _queue.stop())


def _in_child() -> None:
    """After a fork: the processes are the parent's."""
    global _queue
    _queue = _Queue()


os.register_at_fork(after_in_child=_in_child)
