"""The memory of CUDA graphs: which recordings may write to it, and when."""

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from forge.runtime.cuda_recorder import recorder
from forge.torch_internals.tensors import StorageWeakRef, storage_use_count


class Held(Protocol):
    """Results in graph memory that may be referenced from outside."""

    number: int
    storages: list[StorageWeakRef]  # of its results

    def is_held(self) -> bool:
        """Return whether they are referenced from outside."""


class Memory:
    """The memory of several functions' recordings on one stream, numbered by age: a later recording's results may be
    allocated in memory that an earlier one uses only while it runs, and outlive the run.

    A user of a recording holds `lock` until its results have owners.

    Args:
        is_private: True if recordings of other functions do not join.
    """

    def __init__(self, *, is_private: bool = False) -> None:
        self.lock = threading.Lock()
        self.is_private = is_private
        self._handle: Any = None
        self._recordings: list[tuple[weakref.ref[Held], list[StorageWeakRef]]] = []
        self._donations: list[Donation] = []
        self._count = 0

    @property
    def handle(self) -> Any:
        """The handle of the memory pool; a new one if no recording is left, since torch frees a pool with its last
        graph."""
        _drop_what_nobody_reads()
        if self.is_empty:
            self._handle = recorder().new_pool()
            self._recordings.clear()
            self._donations.clear()
        self._recordings = [each for each in self._recordings if each[0]() is not None or _are_alive(each[1])]
        return self._handle

    @property
    def is_empty(self) -> bool:
        """True if no recording is left."""
        return all(recording() is None for recording, _ in self._recordings)

    def next_number(self) -> int:
        """Return the number of a new recording."""
        self._count += 1
        return self._count

    def add(self, recorded: Held) -> None:
        """Add a new recording in this memory."""
        self._recordings.append((weakref.ref(recorded), recorded.storages))

    def add_donation(self, donation: "Donation") -> None:
        """Add results whose memory new recordings may overwrite."""
        self._donations = [each for each in self._donations if not each.is_over()]
        self._donations.append(donation)

    def is_donated_and_held(self) -> bool:
        """Return whether a live tensor uses memory that a new recording may be allocated in."""
        return any(each.is_held() for each in self._donations)

    def is_free_for(self, recorded: Held) -> bool:
        """Return whether no live tensor uses the memory that a recording would overwrite: its own results, those of
        later recordings, even deleted ones, and those whose memory was donated before it was made."""
        for recording, storages in reversed(self._recordings):
            owner = recording()
            if _are_alive(storages) if owner is None else owner.is_held():
                return False
            if owner is recorded:
                break
        return not any(each.number <= recorded.number and each.is_held() for each in self._donations)


def _are_alive(storages: Sequence[StorageWeakRef]) -> bool:
    return not all(each.expired() for each in storages)


class Pool:
    """Memory for the recordings of several functions, separate for each stream: streams run concurrently."""

    def __init__(self) -> None:
        self._memories: dict[Any, Memory] = {}

    def memory(self) -> Memory:
        """Return the memory of the current stream."""
        stream = recorder().stream()
        memory = self._memories.get(stream)
        return self._memories.setdefault(stream, Memory()) if memory is None else memory


class Donation:
    """Results of a recording whose memory a later one reuses once it has read them.

    Their storages no longer own it; the recording still writes the results there.

    Args:
        results: The recording's results, which hold the storages.
        counters: The storages' addresses in C++.
        storages: Weak references to the storages.
        number: The number of the recording that the memory was donated to.
    """

    def __init__(self, results: Any, counters: Sequence[int], storages: Sequence[StorageWeakRef], number: int) -> None:
        self.number = number
        self._results = weakref.ref(results)
        self._counters = counters
        self._storages = storages
        self._uses = list(map(storage_use_count, counters))

    def is_held(self) -> bool:
        """Return whether one of the storages is referenced from outside."""
        if self._results() is None:
            return _are_alive(self._storages)
        return list(map(storage_use_count, self._counters)) != self._uses

    def is_over(self) -> bool:
        """Return whether all storages are freed."""
        return not _are_alive(self._storages)


# graphs that outlive their recordings: torch frees a pool without graphs
_outliving: list[tuple[list[StorageWeakRef], Any]] = []


def outlive(results: Any, counters: list[int], uses: list[int], storages: list[StorageWeakRef], graph: Any) -> None:
    """Keep a graph alive beyond its results while others hold storages that alias its memory without owning it.

    counters, uses: the storages' addresses in C++, and how often the results reference each.
    """
    weakref.finalize(results, _outlive, counters, uses, storages, graph).atexit = False


def _outlive(counters: list[int], uses: list[int], storages: list[StorageWeakRef], graph: Any) -> None:
    _drop_what_nobody_reads()
    if list(map(storage_use_count, counters)) != uses:  # the results hold theirs until this returns
        _outliving.append((storages, graph))


def _drop_what_nobody_reads() -> None:
    _outliving[:] = [each for each in _outliving if _are_alive(each[0])]


@contextmanager
def acquired(lock: threading.Lock) -> Iterator[bool]:
    """Acquire a lock if it is free; yield whether it was."""
    is_free = lock.acquire(blocking=False)
    try:
        yield is_free
    finally:
        if is_free:
            lock.release()
