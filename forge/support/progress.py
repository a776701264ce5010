"""A progress bar of compile work that takes longer than two seconds, where a person looks on.

It stands on stderr, if that is a terminal, and goes when the work is done. FORGE_PROGRESS=0 switches it off.
"""

import importlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

DELAY = 2.0  # seconds before it shows


class _Work:
    """The amount of work, and how much of it is done, of all threads; the bar, once it shows."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.depth = 0
        self.total = 0
        self.completed = 0
        self.bar: Any = None
        self.timer: threading.Timer | None = None

    def begin(self) -> None:
        with self.lock:
            self.depth += 1
            if self.depth > 1 or not _is_enabled():
                return
            self.total = self.completed = 0
            self.timer = threading.Timer(DELAY, self.show)
            self.timer.daemon = True
            self.timer.start()

    def end(self) -> None:
        with self.lock:
            self.depth -= 1
            if self.depth == 0:
                if self.timer is not None:
                    self.timer.cancel()
                if self.bar is not None:
                    self.bar.stop()
                self.timer = self.bar = None

    def show(self) -> None:
        rich = importlib.import_module("rich.progress")
        console = importlib.import_module("rich.console").Console(stderr=True)
        columns = [rich.TextColumn("forge compiles"), rich.BarColumn(), rich.MofNCompleteColumn()]
        columns.append(rich.TimeElapsedColumn())
        with self.lock:
            if self.depth == 0 or self.timer is not threading.current_thread():
                return
            quiet = {"transient": True, "redirect_stdout": False, "redirect_stderr": False}
            self.bar = rich.Progress(*columns, console=console, **quiet)
            self.bar.add_task("", total=self.total, completed=self.completed)
            self.bar.start()

    def change(self, total: int, completed: int) -> None:
        with self.lock:
            self.total += total
            self.completed += completed
            if self.bar is not None:
                self.bar.update(self.bar.task_ids[0], total=self.total, completed=self.completed)


_work = _Work()


def _is_enabled() -> bool:
    return os.environ.get("FORGE_PROGRESS") != "0" and sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def display() -> Iterator[None]:
    """Display progress while compiling."""
    _work.begin()
    try:
        yield
    finally:
        _work.end()


def expect(steps: int) -> None:
    """Count on so many more steps."""
    _work.change(steps, 0)


def advance() -> None:
    """Count one step as done."""
    _work.change(0, 1)


def _in_child() -> None:
    global _work
    _work = _Work()


os.register_at_fork(after_in_child=_in_child)
