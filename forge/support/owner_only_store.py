"""Files that forge keeps for other processes: written whole, read only where they are this user's own and what was
written.

A file is a line that names its format, a line with the hash of the rest, and the rest. A file that is damaged, another
user's, or open to other users is refused, with the reason.
"""

import contextlib
import functools
import hashlib
import operator
import os
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO


class UntrustedFile(Exception):
    """A file, or a folder, that is not to be used, with the reason."""


def is_on() -> bool:
    """Return whether the environment allows what is kept to spare another process the work."""
    return os.environ.get("FORGE_CACHE") != "0"


def user_cache() -> Path:
    """Return the folder of forge's own caches: FORGE_CACHE_DIR, or the one that the system has for such."""
    folder = os.environ.get("FORGE_CACHE_DIR")
    if folder:
        return Path(folder).expanduser()
    try:
        import platformdirs  # of the extra `hub`
    except ImportError:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "forge"
    return Path(platformdirs.user_cache_dir("forge"))


def read(path: Path, head: bytes) -> bytes:
    """Return the content of a file of the format that `head` names. Raises FileNotFoundError where there is none,
    UntrustedFile or OSError where it is not to be used."""
    check_folder(path.parent)
    content = _own_bytes(path)
    if not content.startswith(head):
        raise UntrustedFile("the file is of another format")
    digest, _, body = content[len(head) :].partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise UntrustedFile("the file is damaged")
    with contextlib.suppress(OSError):
        os.utime(path)  # entries that are used are dropped last
    return body


def write(path: Path, head: bytes, body: bytes, size: int) -> None:
    """Keep a file; of its folder, `size` bytes of those that were used last. Raises UntrustedFile or OSError where it
    cannot be kept."""
    make_folder(path.parent)
    _write_whole(path, b"".join([head, hashlib.sha256(body).hexdigest().encode(), b"\n", body]))
    length = len(body)
    room = _room.get((path.parent, size), 0)
    _room[path.parent, size] = room - length if length < room else _trim(path.parent, size) // _SHARE


def make_folder(path: Path) -> None:
    """Make a folder that only its owner can write to. Raises UntrustedFile or OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_folder(path)


def open_own(path: Path) -> BinaryIO:
    """Open a file of a folder of its own among those that are kept. Raises UntrustedFile where it, or either folder,
    is another user's or open to other users; FileNotFoundError, OSError."""
    check_folder(path.parent.parent)
    check_folder(path.parent)
    return _open_if_trusted(path)


def open_itself(path: Path) -> BinaryIO:
    """Open what is there: no link is followed, and a pipe is not waited for. Raises OSError."""
    flags = [getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")]
    return open(os.open(path, functools.reduce(operator.or_, flags, os.O_RDONLY)), "rb")


def check_folder(path: Path) -> None:
    """Raise UntrustedFile for a folder that is a link, another user's, or open to other users' writes."""
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise UntrustedFile("the folder is a link or a file")
    _check_owner(status, "the folder")


def _own_bytes(path: Path) -> bytes:
    """Return the content of an own file. Raises as _opened."""
    with _open_if_trusted(path) as file:
        return file.read()


def _open_if_trusted(path: Path) -> BinaryIO:
    """Open a file of the user's own. Raises UntrustedFile for another user's, or one that others may write to;
    OSError."""
    file = open_itself(path)
    try:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise UntrustedFile("it is not a file")
        _check_owner(status, "it")
    except BaseException:
        file.close()
        raise
    return file


def _check_owner(status: os.stat_result, what: str) -> None:
    if not hasattr(os, "getuid"):  # there, folders of a user are the user's
        return
    if status.st_uid != os.getuid():
        raise UntrustedFile(f"{what} belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UntrustedFile(f"{what} can be written to by other users")


def _write_whole(path: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.", suffix=".tmp")
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)  # one that a crash of the system cuts short is refused by its hash
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


_SHARE = 8  # of a folder's room is written by a process before it looks again, for there are others
_room: dict[tuple[Path, int], int] = {}  # by folder and size: the bytes to be written before that


def _trim(place: Path, size: int) -> int:
    """Drop the files that were used longest ago, until all are within `size`; what was left half-written too. Return
    the bytes that are left."""
    entries = []
    for each in os.scandir(place):
        with contextlib.suppress(OSError):
            status = each.stat(follow_symlinks=False)
            entries.append((status.st_mtime, status.st_size, each.path))
    total = sum(length for _, length, _ in entries)
    for _, length, path in sorted(entries):
        if total <= size:
            break
        with contextlib.suppress(OSError):
            os.unlink(path)
        total -= length
    return max(size - total, 0)
