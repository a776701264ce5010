"""Processes that compile for this one, each the leader of a group, so that its compilers end with it."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO


def start(*arguments: str, folder: Path | None = None, log: IO[bytes] | None = None) -> subprocess.Popen:
    """A worker with these arguments, in a folder; what it prints goes to `log`. Raises OSError."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "forge.executors.inductorex.worker", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(os.path.isabs, sys.path))},
        stdin=subprocess.DEVNULL,
        stdout=log or subprocess.DEVNULL,
        stderr=log or subprocess.DEVNULL,
        start_new_session=True,
    )


def end(process: subprocess.Popen) -> None:
    """Ends it and its compilers, if it runs."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
