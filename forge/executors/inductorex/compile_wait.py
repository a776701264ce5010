"""Deferred waits for the kernels that Inductor compiles in the background (g++, Triton): one wait for all, at the end.

A module that Inductor generates starts its kernels in other threads or processes and waits for them as it is loaded.
Here the waits are deferred to `finish`, while forge and Inductor proceed with other regions. Call `finish` before the
first call of an artifact: it returns when all threads are done.

Source: torch._inductor.async_compile.AsyncCompile.wait.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from forge.executors.executor import Declined, decline
from forge.executors.inductorex import units
from forge.ir.checks import in_one_line, without_frames
from forge.support import progress
from forge.torch_internals.inductor import async_compile, shared_kernels
from forge.torch_internals.inductor.async_compile import AsyncCompile, defer_wait, join_kernels
from forge.torch_internals.inductor.cache_dir import cache_dir
from forge.torch_internals.inductor.codecache import PyCodeCache
from forge.torch_internals.inductor.shared_kernels import share_kernels


class PendingArtifact:
    """An artifact and the waits for its kernels. again: compiles it in another way, if there is one."""

    def __init__(self) -> None:
        self.function: Callable | None = None
        self.again: Callable[[], Callable | Declined] | None = None
        self.waits: list[tuple[dict[str, Any], Callable[[], None]]] = []

    def finish(self) -> Exception | None:
        """Wait, and return the error if it failed. The modules of a failed artifact are removed from Inductor's
        cache."""
        try:
            for _, wait in self.waits:
                wait()
        except Exception as error:
            for scope, _ in self.waits:
                PyCodeCache.modules_no_attr.pop(scope["__file__"], None)
            return error
        return None


_this_thread = threading.local()  # started: the artifact that this thread is compiling
_started: list[PendingArtifact] = []
_failed: dict[Callable, Callable | Declined] = {}  # with the replacements, or the reasons
_finishing = threading.Lock()
_noticed = threading.Lock()
_log = logging.getLogger("forge.inductor")
_WRITTEN = frozenset({".cpp", ".cu", ".cubin", ".gch", ".h", ".json", ".o", ".py", ".so"})  # locks and marks are empty
_SECONDS_TO_WRITE = 60


@contextlib.contextmanager
def defer_waits() -> Iterator[PendingArtifact]:
    """Defer the waits of the modules that Inductor generates in this thread. The caller sets `function` and keeps it
    alive; the modules of an artifact without one, whose generation failed, are still waited for.
    """
    _this_thread.started = started = PendingArtifact()
    try:
        with defer_wait, join_kernels, share_kernels:
            yield started
    finally:
        _this_thread.started = None
        _started.append(started)


@async_compile.wait_for_kernels.provide
def _defer_wait(wait: Callable[[], None], scope: dict[str, Any]) -> None:
    started: PendingArtifact | None = getattr(_this_thread, "started", None)
    if started is not None and "__file__" in scope:  # unless it is generated to run immediately
        started.waits.append((scope, wait))
    else:
        wait()


@async_compile.build_kernel.provide
def _build_unit(build: Callable, compiling: AsyncCompile, argtypes: Sequence[str], source: str) -> Any:
    if getattr(_this_thread, "started", None) is None:
        return build(compiling, argtypes, source)
    return units.ask(compiling, argtypes, source, build)


def finish() -> dict[Callable, Callable | Declined]:
    """Wait until every artifact is complete, and return those that cannot be called, with their replacements or the
    reasons."""
    failures: list[tuple[PendingArtifact, Exception]] = []
    with _finishing:
        units.start_rest()
        progress.expect(len(_started))
        alone: list[PendingArtifact] = []
        while _started:
            started = _started[0]
            error = started.finish()
            if error is not None:
                failures.append((started, error))
            elif not started.waits:
                alone.append(started)
            _started.pop(0)
            progress.advance()
    if failures:  # an artifact without waits may share a module with a failed one
        failures += [(each, failures[0][1]) for each in alone]
    for started, error in failures:
        _replace(started, error)
    return finish() if any(each.again is not None for each, _ in failures) else _failed


def _replace(started: PendingArtifact, error: Exception) -> None:
    """Compile failed artifacts in another way, if there is one."""
    function = started.again() if started.again is not None and started.function is not None else None
    if function is None or isinstance(function, Declined):
        _fail(started.function, error)
    else:
        assert started.function is not None
        _log.info("forge: Inductor's kernel could not be built, and is built in another way: %s", in_one_line(error))
        _failed[started.function] = function


def _fail(function: Callable | None, error: Exception) -> None:
    notice(error)
    if function is not None:
        _log.debug("a kernel could not be built", exc_info=error)
        without_frames(error)
        _failed[function] = decline(f"Inductor's kernel could not be built: {in_one_line(error)}", error=error)


def has_failed() -> bool:
    """Return whether Inductor failed to compile a region of this process."""
    return _noticed.locked()


def notice(error: Exception) -> None:
    """Record that Inductor could not build a region; the fusion pass warns of it, as for any executor. Possible
    causes are deleted from Inductor's cache, once per process."""
    reason = in_one_line(error)
    deleted = _delete_empty() if _noticed.acquire(blocking=False) else 0
    if deleted:
        advice = f"{deleted} empty files of its cache are deleted, and a later process compiles again"
        _log.warning("forge: Inductor cannot compile a region: %s; %s", reason, advice)
    else:
        _log.info("forge: Inductor cannot compile a region: %s", reason)


def _delete_empty() -> int:
    """Delete the empty files that a crash or a full disk left in Inductor's cache, and return their number.

    Inductor does not rewrite them, so that it would fail in every later process. A new one may be another process's,
    which is about to write it.
    """
    deleted, newest = 0, time.time() - _SECONDS_TO_WRITE
    with contextlib.suppress(OSError):  # there is no cache, or others change it meanwhile
        for path in Path(cache_dir()).rglob("*"):
            stat = path.stat()
            if path.suffix in _WRITTEN and not stat.st_size and stat.st_mtime < newest:
                path.unlink()
                deleted += 1
    return deleted


def _in_child() -> None:
    """Reset the state after a fork: the threads that would complete the kernels do not exist in the child."""
    global _finishing
    _finishing = threading.Lock()
    for started in _started:
        _fail(started.function, RuntimeError("the process was forked meanwhile"))
        for scope, _ in started.waits:
            PyCodeCache.modules_no_attr.pop(scope["__file__"], None)
    _started.clear()
    units.forget()
    shared_kernels.forget()
    clear = getattr(getattr(AsyncCompile, "pool", None), "cache_clear", None)
    if clear is not None:  # torch makes new threads only if it does not assume that they exist
        clear()


os.register_at_fork(after_in_child=_in_child)
