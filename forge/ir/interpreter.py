"""The state of Python itself while forge works: garbage collection, memory for frames, and Dynamo's frame hook."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from forge.torch_internals.dynamo import FrameAction, FrameExecStrategy, set_code_exec_strategy

F = TypeVar("F", bound=Callable[..., Any])


def skip_dynamo(function: F) -> F:
    """Decorate a function: Dynamo compiles neither its frames nor its callees', if it finds them between two graphs (a
    backward, say)."""
    set_code_exec_strategy(function.__code__, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))
    return function


@contextmanager
def paused_gc() -> Iterator[None]:
    """Pause garbage collection: tracing and parsing make many objects and drop few, and a full collection walks the
    whole heap, the user's too: two thirds of forge's own time on a 32-layer model, and ten times that of a kernel's
    loading."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def with_room(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function: a call of it reserves memory for its callees' frames.

    Python takes that memory in chunks of 16 KiB and frees one as soon as it is empty (`push_chunk` in CPython's
    pystate.c): a loop whose calls cross a chunk's end maps and unmaps pages at each. Dynamo's loop over bytecodes does
    at some depth of every capture: a tenth of its time. A frame of half a mebibyte gets a chunk of one, and the
    remainder is contiguous.
    """
    function.__code__ = function.__code__.replace(co_stacksize=_SLOTS)
    return function


_SLOTS = 1 << 16  # of a frame, 8 bytes each; only used ones are touched
