"""A dict of bounded size."""

import threading
from typing import Any

from typing_extensions import TypeVar

K = TypeVar("K", default=Any)
V = TypeVar("V", default=Any)


class BoundedDict(dict[K, V]):
    """A dict of at most `size` entries: a new one evicts the oldest one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self._lock = threading.Lock()

    def __setitem__(self, key: K, value: V) -> None:
        with self._lock:
            super().__setitem__(key, value)
            while len(self) > self.size:
                del self[next(iter(self))]
