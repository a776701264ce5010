"""Locks that are free in a forked child: a thread that held one at the fork does not exist there."""

import os
import threading
import weakref
from typing import Any

_locks: "weakref.WeakSet[Any]" = weakref.WeakSet()


def free_after_fork(lock: Any) -> Any:
    """Return the lock, a threading.RLock, which is free in a forked child unless the forking thread held it."""
    _locks.add(lock)
    return lock


def new_lock() -> Any:
    """Return a threading.RLock that is free in a forked child."""
    return free_after_fork(threading.RLock())


def _in_child() -> None:
    for lock in _locks:
        if not lock._is_owned():
            lock._at_fork_reinit()


os.register_at_fork(after_in_child=_in_child)
