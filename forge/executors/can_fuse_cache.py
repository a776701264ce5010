"""What fusion executors said of calls, kept by what the calls are: a model's layers are asked about once."""

from collections.abc import Callable
from typing import Any

from forge.ir import BoundSymbol
from forge.ir.bounded import Bounded
from forge.ir.structure import metadata_key

KEPT = 20_000


class Answers:
    """The answers to a question about calls."""

    def __init__(self, question: Callable[[BoundSymbol], Any]) -> None:
        self.question = question
        self.known = Bounded(KEPT)

    def get(self, bound: BoundSymbol) -> Any:
        """The answer for a call."""
        try:
            key = metadata_key(bound)
            found = self.known.get(key)
        except TypeError:  # an argument is not hashable
            return self.question(bound)
        if found is None:
            found = self.known[key] = self.question(bound)
        return found
