"""What Inductor asks of the machine before its first C++ kernel, asked while the first program is captured.

It has the compiler build a library for what the processor can do, and another process load it, which takes seconds: a
thread waits for them meanwhile.

Source: torch._inductor.cpu_vec_isa.pick_vec_isa, which remembers the answer.
"""

import contextlib
import functools
import importlib
import os
import threading
from pathlib import Path

import torch

from forge.executors.inductorex import processes
from forge.executors.later import is_wanted


@functools.cache
def ask() -> threading.Thread | None:
    """The thread, where there is one: Inductor's cache has not seen the answer yet, and FORGE_BACKGROUND is not 0."""
    with contextlib.suppress(OSError, RuntimeError):  # no room, no threads: who compiles asks
        if is_wanted() and not known().exists():
            thread = threading.Thread(target=_ask, name="forge-ahead")
            thread.start()
            return thread
    return None


def wait() -> None:
    """Until the answer is there, if it was asked for."""
    thread = ask() if ask.cache_info().currsize else None
    if thread is not None:
        thread.join()


def known() -> Path:
    """The file that says that these versions know the answer."""
    folder = importlib.import_module("torch._inductor.runtime.cache_dir_utils").cache_dir()
    return Path(folder) / f"forge-{torch.__version__}-{Path(os.environ.get('CXX', 'g++')).name}"


def _ask() -> None:
    with processes.no_fork, contextlib.suppress(Exception):  # who compiles asks again, and says what is wrong
        importlib.import_module("torch._inductor.cpu_vec_isa").pick_vec_isa()
        known().touch()
