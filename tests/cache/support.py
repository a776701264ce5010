"""What the tests of the cache share: a function jitted twice, the second time from what the first one left."""

from collections.abc import Callable
from typing import Any

import torch

import forge
from forge.capture import dynamo
from forge.compiler import pipeline


class Recorded(AssertionError):
    """A graph was recorded that was to be found on disk."""


def from_disk(monkeypatch: Any) -> None:
    """From now on nothing may be recorded or compiled."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise Recorded("a graph is recorded")

    monkeypatch.setattr(dynamo, "record", refuse)
    monkeypatch.setattr(pipeline, "compile", refuse)


def is_cached(jitted: Any) -> bool:
    """Whether all that was compiled came from disk."""
    explained = forge.explain(jitted)
    return explained.cached == explained.graphs > 0


def is_hit(make: Callable[[], Any], use: Callable[[Any], Any] = lambda jitted: None, **options: Any) -> bool:
    """Whether what `make` gives is found on disk when it is jitted, and called by `use`."""
    torch._dynamo.reset()
    jitted = forge.jit(make(), **options)
    use(jitted)
    return is_cached(jitted)
