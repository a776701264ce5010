"""Entries on disk: one file each (forge/support/owner_only_store.py), JSON followed by blobs.

An entry that cannot be used is ignored with a notice, and rewritten."""

import contextlib
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.support import owner_only_store
from forge.support.owner_only_store import UntrustedFile, user_cache

FORMAT = b"forge program 1\n"
SIZE = 1 << 30  # bytes of all entries
_SUFFIX = ".program"
_log = logging.getLogger("forge.cache")
_noticed: set[str] = set()


@dataclass
class Entry:
    """The stored form of a program: JSON data, and blobs of bytes that it refers to by number."""

    data: dict[str, Any]
    blobs: list[bytes] = field(default_factory=list)

    def add(self, blob: bytes) -> int:
        """Return the number of a blob, the same for equal ones."""
        if blob not in self.blobs:
            self.blobs.append(blob)
        return self.blobs.index(blob)


def folder() -> Path:
    """Return the folder of compiled programs."""
    return user_cache() / "programs"


def read(key: str) -> Entry | None:
    """Return the entry of a key; None if there is none that may be used."""
    path = folder() / f"{key}{_SUFFIX}"
    try:
        owner_only_store.check_folder(path.parent)
    except FileNotFoundError:
        return None
    except (UntrustedFile, OSError) as reason:  # one notice for any number of programs
        notice(f"programs in {path.parent} are ignored: {reason}")
        return None
    try:
        return _parse(owner_only_store.read(path, FORMAT), key)
    except FileNotFoundError:
        return None
    except (UntrustedFile, OSError) as reason:
        notice(f"{path} is ignored: {reason}")
        return None


def write(key: str, entry: Entry) -> None:
    """Write an entry; an unwritable folder only causes a notice."""
    path = folder() / f"{key}{_SUFFIX}"
    try:
        owner_only_store.write(path, FORMAT, _bytes_of(entry, key), SIZE)
    except (UntrustedFile, OSError) as reason:
        notice(f"programs are not kept in {path.parent}: {reason}")


def remove(key: str) -> None:
    """Remove an entry, if there is one."""
    with contextlib.suppress(OSError):
        (folder() / f"{key}{_SUFFIX}").unlink()


def notice(text: str) -> None:
    """Warn once per process."""
    if text not in _noticed:
        _noticed.add(text)
        _log.warning("forge: program cache: %s", text)


def _bytes_of(entry: Entry, key: str) -> bytes:
    head = json.dumps({"key": key, "lengths": list(map(len, entry.blobs)), "data": entry.data}).encode()
    return b"".join([f"{len(head)}\n".encode(), head, *entry.blobs])


def _parse(body: bytes, key: str) -> Entry:
    """Parse the bytes of an entry. Raises UntrustedFile unless `_bytes_of` made them for this key."""
    try:
        size, _, rest = body.partition(b"\n")
        head, place, blobs = json.loads(rest[: int(size)]), int(size), []
        for length in head["lengths"]:
            blobs.append(rest[place : place + length])
            place += length
        own_key, data = head["key"], head["data"]
    except (ValueError, KeyError, TypeError) as error:
        raise UntrustedFile(f"the file cannot be read: {error}") from error
    if own_key != key:
        raise UntrustedFile("the file holds another program")
    return Entry(data, blobs)
