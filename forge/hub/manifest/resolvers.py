"""The operators that a manifest may name. They are made of forge's own, which this package does not import: who knows
them registers them."""

from collections.abc import Callable

from forge.hub.manifest.model import Resolver

_makers: list[Callable[[], Resolver]] = []


def register_resolver(make: Callable[[], Resolver]) -> None:
    """Have `make` give the resolver with which manifests are checked."""
    _makers.append(make)


def registered_resolver() -> Resolver:
    """Return a resolver of the operators that loading knows."""
    return _makers[-1]()
