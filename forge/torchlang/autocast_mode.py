"""The state of torch's autocast mode, and functions that run under it or without it.

While a program is recorded, this thread has the autocast state in which the program would run. The casts become part of
the program (autocast_casts.py), which then runs without autocast.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from forge.torch_internals.autograd import is_any_autocast_enabled

DEVICES = ("cpu", "cuda")


def is_enabled() -> bool:
    """Return whether autocast is enabled in this thread, for any device."""
    return is_any_autocast_enabled()


def casts_recurrent_layers() -> bool:
    """Return whether torch.lstm and its like convert inside their kernels, to float16 under any autocast dtype: those
    of cuDNN do, and fake tensors do not show it."""
    return torch.is_autocast_enabled("cuda")


@contextmanager
def preserve() -> Iterator[None]:
    """Restore the autocast state at the exit of the context."""
    before = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in DEVICES]
    try:
        yield
    finally:
        for kind, enabled, lower in before:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, lower)


@contextmanager
def disable() -> Iterator[None]:
    """Disable autocast for all devices in the context."""
    with ExitStack() as stack:
        for kind in DEVICES:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def without(call: Callable) -> Callable:
    """Return a function that runs without autocast, because the casts are part of the program.

    For a program compiled under the current autocast state: returns `call` itself if that is disabled.
    """
    if not is_enabled():
        return call

    def run(*args: Any) -> Any:
        with disable():
            return call(*args)

    return run


def state() -> tuple | None:
    """Return the current autocast state; None if it is disabled."""
    if not is_enabled():
        return None
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in DEVICES)


@contextmanager
def at(settings: tuple | None) -> Iterator[None]:
    """Set autocast to a state from `state` in the context."""
    with preserve():
        for kind, (enabled, lower) in zip(DEVICES, settings or [(False, None)] * len(DEVICES), strict=True):
            torch.set_autocast_enabled(kind, enabled)
            if lower is not None:
                torch.set_autocast_dtype(kind, lower)
        yield


class Under:
    """A function that runs under the autocast state of its construction."""

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
