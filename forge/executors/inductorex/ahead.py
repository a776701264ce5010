"""What Inductor asks of the machine before its first C++ kernel, asked while the first program is captured.

It has the compiler build a library for each thing that the processor may be able to do, and another process load it:
ten of them, which take seconds, and in every process again. Here a thread waits for them meanwhile, and what could be
loaded once is known to the processes that come later, those that compile for this one among them.

Source: torch._inductor.cpu_vec_isa: pick_vec_isa, which remembers the answer, and VecISA.check_build, which asks.
"""

import contextlib
import functools
import hashlib
import importlib
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import filelock
import torch

from forge.executors.inductorex import processes
from forge.runtime.tiering import is_wanted
from forge.support.machine import processor


@functools.cache
def ask() -> threading.Thread | None:
    """Return the thread, where there is one: Inductor's cache has not seen the answer yet, and FORGE_BACKGROUND is not
    0."""
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
    """Return the file that says that these versions know the answer."""
    return _cache() / f"forge-{torch.__version__}-{Path(_compiler()).name}"


@functools.cache
def remember() -> None:
    """From now on, Inductor does not ask again what was found to work once, by this process or another one."""
    kind = importlib.import_module("forge.torch_internals.inductor.cpu").cpu_vec_isa.VecISA
    check = kind.check_build

    @functools.wraps(check)
    def remembered(isa: Any, code: str) -> bool:
        with contextlib.suppress(OSError):  # no room, or not writable: it is asked
            found = _answer(isa.build_arch_flags(), code)
            if found.exists():
                return True
            found.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(found.with_suffix(".lock")):
                if not found.exists() and check(isa, code):
                    found.touch()
                return found.exists()
        return check(isa, code)

    kind.check_build = remembered


def _answer(flags: str, code: str) -> Path:
    """Return the file that is there if a library of the code, compiled with these flags, can be loaded."""
    compiler = shutil.which(_compiler()) or ""
    changed = os.stat(compiler).st_mtime_ns if compiler else 0
    told = repr((torch.__version__, os.path.realpath(compiler), changed, processor(), flags, code))
    return _cache() / "forge-isa" / hashlib.sha256(told.encode()).hexdigest()[:32]


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _cache() -> Path:
    return Path(importlib.import_module("forge.torch_internals.inductor.cache_dir").cache_dir())


def _ask() -> None:
    with processes.no_fork, contextlib.suppress(Exception):  # who compiles asks again, and says what is wrong
        remember()
        importlib.import_module("forge.torch_internals.inductor.cpu").cpu_vec_isa.pick_vec_isa()
        known().touch()
