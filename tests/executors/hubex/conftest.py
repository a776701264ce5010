"""Fixtures of the kernels' tests: a cache for every test, and one process that verifies."""

from tests.hub.conftest import (
    _needs_extra,
    _nothing_loaded,
    _own_cache,
    _worker,
    asked,
    cache,
    offline,
    repository,
    server,
)

__all__ = [
    "_needs_extra",
    "_nothing_loaded",
    "_own_cache",
    "_worker",
    "asked",
    "cache",
    "offline",
    "repository",
    "server",
]
