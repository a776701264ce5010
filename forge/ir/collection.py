"""Python's garbage collection while a program is compiled or a kernel loaded."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_gc() -> Iterator[None]:
    """No garbage collection inside: tracing and parsing make many objects and drop few, and a full collection walks the
    whole heap, the user's too: two thirds of forge's own time on a 32-layer model, and ten times that of a kernel's
    loading."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
