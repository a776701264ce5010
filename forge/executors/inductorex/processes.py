"""Processes that compile for this one, each the leader of a group, so that its compilers end with it."""

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from typing import IO

import filelock  # noqa: F401  (a fork stops its locks first if it is imported later: see below)

from forge.support import child_processes

# Before a fork, handlers run in reverse order of registration. filelock, which Inductor's threads use, then stops all
# lock holders: only after those threads are done, so it is imported above.
no_fork = threading.RLock()  # held by threads that a child would lack: a fork waits for them
os.register_at_fork(before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=no_fork.release)


def command_and_environment() -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a new worker."""
    return child_processes.run_module("forge.executors.inductorex.worker"), child_processes.environment()


def start(command: list[str], environment: dict[str, str], output: IO[bytes]) -> subprocess.Popen:
    """Start a worker, which takes jobs from its standard input; its output goes to a file. Raises OSError."""
    return subprocess.Popen(
        command,
        bufsize=0,
        cwd=tempfile.gettempdir(),
        env=environment,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


def end(process: subprocess.Popen) -> None:
    """Terminate it and its compilers, if it runs."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
    if process.stdin is not None:
        process.stdin.close()
