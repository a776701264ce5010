"""A cache of fusion executors' decisions, by the metadata of calls: repeated layers are decided once."""

from collections.abc import Callable
from typing import Any

from forge.ir import BoundSymbol
from forge.ir.bounded import BoundedDict
from forge.ir.structure import metadata_key

MAX_ENTRIES = 20_000


class CanFuseCache:
    """A cache of `can_fuse` for one executor."""

    def __init__(self, question: Callable[[BoundSymbol], Any]) -> None:
        self.can_fuse = question
        self.decisions = BoundedDict(MAX_ENTRIES)

    def get(self, bound: BoundSymbol) -> Any:
        """Return the decision for a call."""
        try:
            key = metadata_key(bound)
            decision = self.decisions.get(key)
        except TypeError:  # an argument is unhashable
            return self.can_fuse(bound)
        if decision is None:
            decision = self.decisions[key] = self.can_fuse(bound)
        return decision
