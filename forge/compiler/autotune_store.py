"""Measured times of candidates, cached in memory and on disk."""

import hashlib
import json
import logging
from pathlib import Path
from typing import NamedTuple

from forge.ir.bounded import BoundedDict
from forge.support import owner_only_store
from forge.support.owner_only_store import user_cache

FORMAT = b"forge times 1\n"
SIZE = 1 << 24  # total bytes of all files
_memo: BoundedDict = BoundedDict(10_000)
_noticed: set[str] = set()
_log = logging.getLogger("forge.select")


class CandidateTime(NamedTuple):
    """The time of one candidate. seconds: per call; None if it was dropped, for `reason`."""

    name: str
    seconds: float | None
    reason: str | None = None


def folder() -> Path:
    """Return the folder of measured times."""
    return user_cache() / "times"


def read(about: str, *, on_disk: bool) -> list[CandidateTime] | None:
    """Return the measured times of candidates, in their order; None if nothing was measured. about: the key that the
    times depend on."""
    times = _memo.get(about)
    if times is None and on_disk:
        times = _read(_path(about), about)
        if times is not None:
            _memo[about] = times
    return times


def write(about: str, timed: list[CandidateTime], *, on_disk: bool) -> None:
    """Write the measured times; an unwritable folder only causes a notice."""
    _memo[about] = timed
    if not on_disk:
        return
    path = _path(about)
    try:
        owner_only_store.write(path, FORMAT, json.dumps({"about": about, "timed": timed}).encode(), SIZE)
    except (owner_only_store.UntrustedFile, OSError) as reason:
        _notice(f"measured times are not kept in {path.parent}: {reason}")


def _path(about: str) -> Path:
    return folder() / f"{hashlib.sha256(about.encode()).hexdigest()}.times"


def _read(path: Path, about: str) -> list[CandidateTime] | None:
    try:
        return _parse(owner_only_store.read(path, FORMAT), about)
    except FileNotFoundError:
        return None
    except (owner_only_store.UntrustedFile, OSError) as reason:
        _notice(f"{path} is ignored: {reason}")
        return None


def _parse(body: bytes, about: str) -> list[CandidateTime]:
    """Parse the bytes of a file of times. Raises UntrustedFile unless `write` wrote them for this key."""
    try:
        data = json.loads(body)
        timed = [CandidateTime(str(name), seconds, reason) for name, seconds, reason in data["timed"]]
        key = data["about"]
    except (ValueError, KeyError, TypeError) as error:
        raise owner_only_store.UntrustedFile(f"the file cannot be read: {error}") from error
    if key != about or not all(isinstance(each.seconds, (float, type(None))) for each in timed):
        raise owner_only_store.UntrustedFile("the file holds other times")
    return timed


def _notice(text: str) -> None:
    """Log a message once per process."""
    if text not in _noticed:
        _noticed.add(text)
        _log.warning("forge: %s", text)
