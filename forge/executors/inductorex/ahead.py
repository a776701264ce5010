"""What Inductor builds once on a machine, built by another process while the first program is captured.

Before its first C++ kernel, Inductor asks the compiler what the processor can do and compiles a header, which takes
longer than a small program's kernels. Who needs them meanwhile waits at Inductor's own locks.
"""

import atexit
import contextlib
import functools
import os
import subprocess
from pathlib import Path

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

from forge.executors.inductorex import processes
from forge.executors.later import is_wanted


@functools.cache
def build() -> None:
    """Starts the process, once, where Inductor's cache has not seen one; FORGE_BACKGROUND=0 keeps it from starting."""
    with contextlib.suppress(OSError):  # no room, no more processes: Inductor builds them when they are needed
        if is_wanted() and not built().exists():
            _start()


def built() -> Path:
    """The file that says that these versions have built theirs."""
    return Path(cache_dir()) / f"forge-{torch.__version__}-{Path(os.environ.get('CXX', 'g++')).name}"


def _start() -> None:
    process = processes.start("--ahead", str(built()))
    atexit.register(_end, process, os.getpid())


def _end(process: subprocess.Popen, owner: int) -> None:
    if owner == os.getpid():
        processes.end(process)
