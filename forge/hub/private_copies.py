"""The copies of files that belong to this process: native libraries are loaded from bytes hashed during the copy.

They lie in a folder that only its owner can enter and that is removed at exit; the folder of a killed process is
removed by the next one. It is locked as long as the process, or a fork of it, lives.
"""

import atexit
import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import BinaryIO

from forge.ir.locks import new_lock
from forge.support.owner_only_store import user_cache

PREFIX = "forge-kernels-"
LOCK = "lock"
YOUNG = 60.0  # seconds during which a new folder may not be locked yet
_BLOCK = 1 << 20

_making = new_lock()
_root: Path | None = None


def new_folder() -> Path:
    """Make an empty folder that only this user can enter."""
    with _making:
        return Path(tempfile.mkdtemp(dir=_own_root()))


def drop(folder: Path) -> None:
    """Remove a folder made by new_folder."""
    shutil.rmtree(folder, ignore_errors=True)


def copy(source: BinaryIO, target: Path) -> tuple[int, str]:
    """Copy a stream to a new file; return its size and sha256."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o500)
    with open(handle, "wb") as file, ThreadPoolExecutor(1) as hashing:
        while block := source.read(_BLOCK):
            is_small = len(block) < _BLOCK  # it is hashed without a thread
            finish = partial(digest.update, block) if is_small else hashing.submit(digest.update, block).result
            file.write(block)
            finish()
            size += len(block)
    return size, digest.hexdigest()


def _own_root() -> Path:
    global _root
    if _root is None or not _root.is_dir():
        place = _parent_folder()
        _sweep(place)
        _root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        lock_fd = _flock(_root / LOCK, shared=True)
        atexit.register(_leave, _root, lock_fd, os.getpid())
    return _root


def _parent_folder() -> Path:
    """Return a folder whose files may be executed: the system's folder for temporary files, else the user's cache."""
    temporary = Path(tempfile.gettempdir())
    if not hasattr(os, "statvfs") or not os.statvfs(temporary).f_flag & getattr(os, "ST_NOEXEC", 0):
        return temporary
    place = user_cache() / "loaded"
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    return place


def _flock(path: Path, *, shared: bool) -> int | None:
    """Return a lock that the system frees when all its holders are gone; None if another process holds it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _leave(root: Path, lock_fd: int | None, owner: int) -> None:
    if os.getpid() != owner:
        return
    if lock_fd is not None:
        os.close(lock_fd)
    _remove(root)


def _remove(root: Path) -> None:
    """Remove a folder without an owner."""
    with contextlib.suppress(OSError):
        handle = _flock(root / LOCK, shared=False)
        if handle is not None:
            drop(root)
            os.close(handle)


def _sweep(place: Path) -> None:
    for each in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            stat = each.lstat()
            if stat.st_uid == os.getuid() and time.time() - stat.st_mtime > YOUNG and (each / LOCK).is_file():
                _remove(each)
