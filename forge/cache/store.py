"""Entries on disk: one file each, written whole, read only where it is this user's own and what was written.

A file is a line that names the format, a line with the hash of the rest, and the rest: JSON, which blobs follow. What
is damaged, another user's, or open to other users is ignored with a notice, and written anew.
"""

import contextlib
import functools
import hashlib
import json
import logging
import operator
import os
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.hub.compat import user_cache

FORMAT = b"forge program 1\n"
SIZE = 1 << 30  # bytes of all entries
_SUFFIX = ".program"
_log = logging.getLogger("forge.cache")
_noticed: set[str] = set()


class Refused(Exception):
    """An entry that is not to be used, with the reason."""


@dataclass
class Entry:
    """What is kept of a program: data of JSON's kinds, and bytes that it refers to by number."""

    data: dict[str, Any]
    blobs: list[bytes] = field(default_factory=list)

    def add(self, blob: bytes) -> int:
        """The number of a blob, the same for equal ones."""
        if blob not in self.blobs:
            self.blobs.append(blob)
        return self.blobs.index(blob)


def folder() -> Path:
    """Where programs are kept."""
    return user_cache() / "programs"


def read(key: str) -> Entry | None:
    """The entry of a key; None where there is none that may be used."""
    path = folder() / f"{key}{_SUFFIX}"
    try:
        _check_folder(path.parent)
        content = _own_bytes(path)
        entry = _parsed(content, key)
    except FileNotFoundError:
        return None
    except (Refused, OSError) as reason:
        notice(f"{path} is ignored: {reason}")
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # what is used is dropped last
    return entry


def write(key: str, entry: Entry) -> None:
    """Keeps an entry; a place that cannot be written to costs a notice."""
    path = folder() / f"{key}{_SUFFIX}"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_folder(path.parent)
        _write_whole(path, _bytes_of(entry, key))
        _trim(path.parent)
    except (Refused, OSError) as reason:
        notice(f"programs are not kept in {path.parent}: {reason}")


def notice(text: str) -> None:
    """Says a thing once in a process."""
    if text not in _noticed:
        _noticed.add(text)
        _log.warning("forge: program cache: %s", text)


def _bytes_of(entry: Entry, key: str) -> bytes:
    head = json.dumps({"key": key, "lengths": list(map(len, entry.blobs)), "data": entry.data}).encode()
    body = b"".join([f"{len(head)}\n".encode(), head, *entry.blobs])
    return b"".join([FORMAT, hashlib.sha256(body).hexdigest().encode(), b"\n", body])


def _parsed(content: bytes, key: str) -> Entry:
    """Raises Refused for anything but what `_bytes_of` gave for this key."""
    if not content.startswith(FORMAT):
        raise Refused("it is of another format")
    said, _, body = content[len(FORMAT) :].partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != said:
        raise Refused("it is damaged")
    try:
        size, _, rest = body.partition(b"\n")
        head, place, blobs = json.loads(rest[: int(size)]), int(size), []
        for length in head["lengths"]:
            blobs.append(rest[place : place + length])
            place += length
        known, data = head["key"], head["data"]
    except (ValueError, KeyError, TypeError) as error:
        raise Refused(f"it cannot be read: {error}") from error
    if known != key:
        raise Refused("it is another program's")
    return Entry(data, blobs)


def _check_folder(path: Path) -> None:
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise Refused("the folder is a link or a file")
    _check_owner(found, "the folder")


def _own_bytes(path: Path) -> bytes:
    """What an own file holds. Raises Refused for another's, or one that others may write to; OSError."""
    flags = [getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")]  # a pipe is not waited for
    handle = os.open(path, functools.reduce(operator.or_, flags, os.O_RDONLY))
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise Refused("it is not a file")
        _check_owner(found, "it")
        return file.read()


def _check_owner(found: os.stat_result, what: str) -> None:
    if not hasattr(os, "getuid"):  # there, folders of a user are the user's
        return
    if found.st_uid != os.getuid():
        raise Refused(f"{what} belongs to another user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Refused(f"{what} can be written to by other users")


def _write_whole(path: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.", suffix=".tmp")
    try:
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _trim(place: Path) -> None:
    """Drops the entries that were used longest ago, until all are within SIZE; what was left half-written too."""
    found = []
    for each in os.scandir(place):
        with contextlib.suppress(OSError):
            known = each.stat(follow_symlinks=False)
            found.append((known.st_mtime, known.st_size, each.path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= SIZE:
            break
        with contextlib.suppress(OSError):
            os.unlink(path)
        total -= size
