"""Helpers of the cache's tests: a function is jitted twice, the second time from the first one's entries."""

from collections.abc import Callable
from typing import Any

import torch

import forge
from forge.capture import dynamo
from forge.compiler import pipeline


class Recorded(AssertionError):
    """The error when a graph is recorded that should have been found on disk."""


def from_disk(monkeypatch: Any) -> None:
    """Make recording and compiling an error from now on."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise Recorded("a graph is recorded")

    monkeypatch.setattr(dynamo, "record", refuse)
    monkeypatch.setattr(pipeline, "compile", refuse)


def is_cached(jitted: Any) -> bool:
    """Return whether all compiled graphs came from disk."""
    explained = forge.explain(jitted)
    return explained.cached == explained.graphs > 0


def is_hit(make: Callable[[], Any], use: Callable[[Any], Any] = lambda jitted: None, **options: Any) -> bool:
    """Jit the result of `make`, call it with `use`, and return whether its programs were found on disk."""
    torch._dynamo.reset()
    jitted = forge.jit(make(), **options)
    use(jitted)
    return is_cached(jitted)
