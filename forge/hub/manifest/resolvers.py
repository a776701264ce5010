"""The operators that a manifest may name. This package does not import them: hubex registers them."""

from collections.abc import Callable

from forge.hub.manifest.model import Resolver

_makers: list[Callable[[], Resolver]] = []


def register_resolver(make: Callable[[], Resolver]) -> None:
    """Register `make`, which returns the resolver that manifests are checked with."""
    _makers.append(make)


def registered_resolver() -> Resolver:
    """Return a resolver of the operators that loading knows."""
    return _makers[-1]()
