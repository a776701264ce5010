"""torch's autocast mode: whether it is on, and what runs under it or without it.

While a program is recorded, this thread is under the autocast under which the program would run; what that does to a
call is written in the program (autocast_casts.py), which then runs without it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from forge.torch_internals.autograd import is_any_autocast_enabled

DEVICES = ("cpu", "cuda")


def is_enabled() -> bool:
    """Return whether the calls of this thread are under autocast, for some device."""
    return is_any_autocast_enabled()


def casts_recurrent_layers() -> bool:
    """Return whether torch.lstm and its like convert inside of their kernel, to float16 whatever dtype autocast has:
    cuDNN's do, and fake tensors do not show it."""
    return torch.is_autocast_enabled("cuda")


@contextmanager
def preserve() -> Iterator[None]:
    """Restore autocast at the exit of the context, whatever the inside set."""
    before = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in DEVICES]
    try:
        yield
    finally:
        for kind, enabled, lower in before:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, lower)


@contextmanager
def disable() -> Iterator[None]:
    """Enter a context in which nothing is under autocast."""
    with ExitStack() as stack:
        for kind in DEVICES:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def without(call: Callable) -> Callable:
    """Return a function that runs where nothing is under autocast: what that does to a program is written in it.

    For a program compiled under what autocast is now: `call` itself where that is nothing.
    """
    if not is_enabled():
        return call

    def run(*args: Any) -> Any:
        with disable():
            return call(*args)

    return run


def state() -> tuple | None:
    """Return the current autocast state; None where it is not enabled."""
    if not is_enabled():
        return None
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in DEVICES)


@contextmanager
def at(settings: tuple | None) -> Iterator[None]:
    """Enter a context in which autocast is as `state` gave it."""
    with preserve():
        for kind, (enabled, lower) in zip(DEVICES, settings or [(False, None)] * len(DEVICES), strict=True):
            torch.set_autocast_enabled(kind, enabled)
            if lower is not None:
                torch.set_autocast_dtype(kind, lower)
        yield


class Under:
    """A function that runs under what autocast is now."""

    def __init__(self, function: Callable) -> None:
        self.function = function
        self.enabled = {kind: torch.is_autocast_enabled(kind) for kind in DEVICES}
        self.dtypes = {kind: torch.get_autocast_dtype(kind) for kind in DEVICES}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for kind, enabled in self.enabled.items():
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, self.dtypes[kind], enabled=enabled))
            return self.function(*args, **kwargs)
