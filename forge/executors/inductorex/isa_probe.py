"""Inductor's probes of the CPU's instruction sets, in a thread while the first program is captured.

Before its first C++ kernel, Inductor has the compiler build a library for each instruction set that the CPU may
have, and another process load it: ten of them, which take seconds, again in every process. Here a thread waits for
them meanwhile, and a successful probe is recorded for later processes, those that compile for this one included.

Source: torch._inductor.cpu_vec_isa: pick_vec_isa, which caches the answer, and VecISA.check_build, which probes.
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
from forge.support.background import is_background_enabled
from forge.support.machine import processor


@functools.cache
def ask() -> threading.Thread | None:
    """Start the probes, and return their thread; None if Inductor's cache has the answer, or FORGE_BACKGROUND is
    0."""
    with contextlib.suppress(OSError, RuntimeError):  # no disk space, no threads: the compilation probes
        if is_background_enabled() and not marker_path().exists():
            thread = threading.Thread(target=_ask, name="forge-ahead")
            thread.start()
            return thread
    return None


def wait() -> None:
    """Wait for the probes, if they were started."""
    thread = ask() if ask.cache_info().currsize else None
    if thread is not None:
        thread.join()


def marker_path() -> Path:
    """Return the file whose existence marks the probes of these versions as done."""
    return _cache() / f"forge-{torch.__version__}-{Path(_compiler()).name}"


@functools.cache
def remember() -> None:
    """Patch Inductor to skip a probe that succeeded before, in this process or another."""
    kind = importlib.import_module("forge.torch_internals.inductor.cpu").cpu_vec_isa.VecISA
    check = kind.check_build

    @functools.wraps(check)
    def check_build(isa: Any, code: str) -> bool:
        with contextlib.suppress(OSError):  # no disk space, or not writable: it is probed again
            marker = _answer(isa.build_arch_flags(), code)
            if marker.exists():
                return True
            marker.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(marker.with_suffix(".lock")):
                if not marker.exists() and check(isa, code):
                    marker.touch()
                return marker.exists()
        return check(isa, code)

    kind.check_build = check_build


def _answer(flags: str, code: str) -> Path:
    """Return the file that exists if a library of the code, compiled with these flags, can be loaded."""
    compiler = shutil.which(_compiler()) or ""
    changed = os.stat(compiler).st_mtime_ns if compiler else 0
    key = repr((torch.__version__, os.path.realpath(compiler), changed, processor(), flags, code))
    return _cache() / "forge-isa" / hashlib.sha256(key.encode()).hexdigest()[:32]


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _cache() -> Path:
    return Path(importlib.import_module("forge.torch_internals.inductor.cache_dir").cache_dir())


def _ask() -> None:
    with processes.no_fork, contextlib.suppress(Exception):  # the compilation probes again, and reports the error
        remember()
        importlib.import_module("forge.torch_internals.inductor.cpu").cpu_vec_isa.pick_vec_isa()
        marker_path().touch()
