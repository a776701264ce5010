"""Attributes of torch that are others while something runs."""

import threading
from typing import Any


class Replaced:
    """A context manager: an attribute of torch is replaced while any thread is inside, or is there only then."""

    def __init__(self, owner: Any, name: str, replacement: Any) -> None:
        self.owner = owner
        self.name = name
        self.original = vars(owner).get(name)
        self.replacement = replacement
        self.inside = 0
        self.lock = threading.Lock()

    def __enter__(self) -> None:
        with self.lock:
            self.inside += 1
            setattr(self.owner, self.name, self.replacement)

    def __exit__(self, *raised: Any) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside:
                return
            if self.original is None:
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, self.original)
