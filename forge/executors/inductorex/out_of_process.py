"""Graphs that other processes compile: a few at a time, with the settings of this one.

A process costs some seconds, once for all waiting graphs, but costs the running program nothing: no time under the
interpreter's lock, no thread that a fork would lose.

Inductor's own way lacks forge's patches: see ALTERNATIVES of forge/torch_internals/patch.py.
"""

import atexit
import logging
import os
import pickle
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
    """A graph that is being compiled; once `state` returns True, a function of one list.

    strides: the strides of its results if the artifact's differ. A compilation without remaining waiters ends.
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
        """Return True if it can be called, False while it is being compiled, Declined if that failed."""
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
    """One graph, in a separate folder, which a worker compiles."""

    def __init__(self, data: bytes) -> None:
        self.owner = os.getpid()
        self.stopped = False
        self.failed: Decision = False
        self.worker: _Worker | None = None
        self._data = data
        self._folder: tempfile.TemporaryDirectory | None = None
        self._is_done = False

    def start(self, worker: "_Worker") -> None:
        """Pass it to a worker. Raises OSError."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="forge-", ignore_cleanup_errors=True)
            (Path(self._folder.name) / "job").write_bytes(self._data)
            self._data = b""
        worker.take(self._folder.name)
        self.worker = worker

    @property
    def is_done(self) -> bool:
        """True if the worker wrote a result."""
        if not self._is_done and self._folder is not None:
            folder = Path(self._folder.name)
            self._is_done = (folder / "artifact").exists() or (folder / "error").exists()
        return self._is_done

    def result(self) -> bytes | Decision:
        """Return the artifact's bytes, Declined, or False while there is none yet."""
        if self.stopped or self.owner != os.getpid():
            return decline("the compile process belongs to another process, or was stopped")
        if self.worker is None or self._folder is None:
            return self.failed
        exit_code = self.worker.returncode  # read before the files are checked: its output is complete
        if not self.is_done and exit_code is None:
            return False
        if not self.is_done and exit_code == 0:  # it had been idle, and did not take this one
            self.worker = None
            _queue.put(self)
            return False
        folder = Path(self._folder.name)
        try:
            if (folder / "artifact").exists():
                return (folder / "artifact").read_bytes()
            _log.debug("%s", self.worker.printed())
            why = (folder / "error").read_text() if self.is_done else f"the process ended with {exit_code}"
            return decline(f"the region could not be compiled: {why}")
        finally:
            self._folder.cleanup()

    def stop(self) -> None:
        """Terminate its worker, if it runs there."""
        self.stopped = True
        if self.owner == os.getpid() and self.worker is not None and not self.is_done:
            self.worker.end()


class _Worker:
    """A process that compiles one job after another, and exits after some idle time. Raises OSError if none can be
    started."""

    def __init__(self) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (as long as this lives)
        self._started_as = processes.command_and_environment()
        self.process = processes.start(*self._started_as, self._output)
        weakref.finalize(self, self._output.close)

    @property
    def returncode(self) -> int | None:
        """The exit status; None while it runs."""
        return self.process.poll()

    @property
    def is_current(self) -> bool:
        """True if a new worker would have the same modules and environment."""
        return self._started_as == processes.command_and_environment()

    def take(self, folder: str) -> None:
        """Send it the job of a folder. Raises BrokenPipeError if it has exited."""
        assert self.process.stdin is not None
        self.process.stdin.write(os.fsencode(f"{folder}\n"))

    def printed(self) -> str:
        """Return its output."""
        self._output.seek(0)
        return self._output.read().decode(errors="replace")

    def end(self) -> None:
        """Terminate it and its compilers."""
        processes.end(self.process)


class _Queue:
    """The jobs in order of arrival; half of the CPU's cores work for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[_Job] = deque()
        self._running: dict[_Worker, _Job] = {}  # by worker, its last job
        self._limit = max(1, (os.cpu_count() or 1) // 2)

    def put(self, job: _Job) -> None:
        self._waiting.append(job)
        self.advance()

    def advance(self) -> None:
        """Start the jobs that can start now."""
        with self._lock:
            self._running = {worker: job for worker, job in self._running.items() if worker.returncode is None}
            idle = [worker for worker, job in self._running.items() if job.is_done]
            for worker in [each for each in idle if self._waiting and not each.is_current]:
                worker.end()
                idle.remove(worker)
                del self._running[worker]
            while self._waiting and (idle or len(self._running) < self._limit):
                job = self._waiting.popleft()
                if not job.stopped:
                    self._start(job, idle)

    def _start(self, job: _Job, idle: list[_Worker]) -> None:
        try:
            if idle and self._start_on(idle.pop(), job):
                return
            worker = _Worker()
            if not self._start_on(worker, job):
                job.failed = decline(f"the process ended with {worker.process.wait()}")
        except OSError as error:  # no disk space, no more processes
            job.failed = decline(f"no process could be started: {error}")

    def _start_on(self, worker: _Worker, job: _Job) -> bool:
        """Return whether the worker took the job; an idle one may have exited."""
        try:
            job.start(worker)
        except BrokenPipeError:
            return False
        self._running[worker] = job
        return True

    def stop(self) -> None:
        """Terminate all workers."""
        for job in [*self._waiting, *self._running.values()]:
            job.stopped = True
        for worker in self._running:
            worker.end()


_queue = _Queue()
atexit.register(lambda: _queue.stop())


def _in_child() -> None:
    """Reset the state after a fork: the processes are the parent's."""
    global _queue
    _queue = _Queue()


os.register_at_fork(after_in_child=_in_child)
