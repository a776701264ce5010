"""An entry is code: it is read only if this user alone can have written it, and if it is undamaged."""

import errno
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cache.support import is_hit

from forge.cache import store
from forge.cache.store import Entry

X = torch.ones(3)
KEY = "0" * 64


def call(jitted: Callable) -> None:
    torch.testing.assert_close(jitted(X), X + 1)


def hits() -> bool:
    return is_hit(lambda: lambda x: x + 1, call)


@pytest.fixture
def entry(programs: Path) -> Path:
    """Return the file of a stored program."""
    assert not hits()
    (file,) = programs.iterdir()
    assert hits()
    return file


def flip(content: bytes) -> bytes:
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


def rehashed(content: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Return an entry with a changed body and the right hash."""
    body = change(content[len(store.FORMAT) + 65 :])
    return store.FORMAT + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def of_another(body: bytes) -> bytes:
    place = body.index(b'"key": "') + len(b'"key": "')
    return body[:place] + (b"1" if body[place : place + 1] == b"0" else b"0") + body[place + 1 :]


DAMAGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a bit": (flip, "the file is damaged"),
    "cut short": (lambda content: content[:-20], "the file is damaged"),
    "empty": (lambda content: b"", "the file is of another format"),
    "garbage": (lambda content: os.urandom(2000), "the file is of another format"),
    "a pickle": (lambda content: b"\x80\x04\x95garbage.", "the file is of another format"),
    "another format": (lambda content: content.replace(b"program 1", b"program 9", 1), "the file is of another format"),
    "another program": (lambda content: rehashed(content, of_another), "the file holds another program"),
    "no JSON": (lambda content: rehashed(content, lambda body: b"9\n{{{{{{{{{"), "the file cannot be read"),
    "a list": (lambda content: rehashed(content, lambda body: b"2\n[]"), "the file cannot be read"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_entry_is_ignored_with_a_notice_and_written_anew(
    name: str, entry: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage, said = DAMAGED[name]
    before = entry.read_bytes()
    entry.write_bytes(damage(before))
    assert not hits()
    assert f"{entry} is ignored: {said}" in caplog.text
    assert entry.read_bytes() == before
    assert hits()


def test_an_entry_that_names_what_is_not_here_is_written_anew(programs: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = lambda: lambda x: torch.relu(x) + 1
    assert not is_hit(run, call, executors=["torch"])
    (file,) = programs.iterdir()
    before = file.read_bytes()
    file.write_bytes(rehashed(before, lambda body: body.replace(b"torch.relu", b"torch.rely")))
    assert file.read_bytes() != before
    assert not is_hit(run, call, executors=["torch"])
    assert "a program cannot be used, and is compiled again: ModuleNotFoundError" in caplog.text
    assert is_hit(run, call, executors=["torch"])


def test_an_entry_of_another_user_is_ignored(
    entry: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = os.fstat
    monkeypatch.setattr(os, "fstat", lambda handle: changed(found(handle), st_uid=os.getuid() + 1))
    assert not hits()
    assert "it belongs to another user" in caplog.text


def changed(found: os.stat_result, **fields: int) -> os.stat_result:
    values = list(found)
    for name, value in fields.items():
        values[{"st_mode": 0, "st_uid": 4}[name]] = value
    return os.stat_result(values)


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_an_entry_that_others_may_write_to_is_ignored(mode: int, entry: Path, caplog: pytest.LogCaptureFixture) -> None:
    entry.chmod(mode)
    assert not hits()
    assert "it can be written to by other users" in caplog.text
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600  # rewritten
    assert hits()


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_may_write_to_is_not_used(
    mode: int, entry: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry.parent.chmod(mode)
    assert not hits()
    assert not hits()
    assert not is_hit(lambda: torch.sin, lambda jitted: jitted(torch.ones(3)))  # another program
    assert caplog.text.count("the folder can be written to by other users") == 2  # once for reading, once for writing


def test_a_file_where_the_folder_should_be_costs_two_notices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FORGE_CACHE_DIR", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    for number in range(3):
        assert not is_hit(lambda number=number: lambda x: x + number, lambda jitted: jitted(torch.ones(3)))
    assert len(caplog.records) == 2  # of reading, and of writing


def test_a_link_is_not_followed(entry: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    entry.rename(tmp_path / "elsewhere")
    entry.symlink_to(tmp_path / "elsewhere")
    assert not hits()
    assert "is ignored" in caplog.text


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_a_pipe_is_not_waited_for(entry: Path, caplog: pytest.LogCaptureFixture) -> None:
    entry.unlink()
    os.mkfifo(entry)
    assert not hits()
    assert "it is not a file" in caplog.text


def test_a_folder_that_is_a_link_is_not_used(entry: Path, tmp_path: Path) -> None:
    entry.parent.rename(tmp_path / "elsewhere")
    entry.parent.symlink_to(tmp_path / "elsewhere")
    assert not hits()
    assert not hits()


def test_what_is_written_is_the_users_alone(entry: Path) -> None:
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600
    assert stat.S_IMODE(entry.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_is_full_or_read_only_costs_one_notice(
    code: int, programs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(source: str, target: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "replace", fail)
    assert not hits()
    assert not hits()
    assert caplog.text.count("programs are not kept in") == 1
    assert list(programs.iterdir()) == []  # nothing is left half-written


def test_a_place_that_cannot_be_made_costs_one_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORGE_CACHE_DIR", str(tmp_path / "file"))
    assert not hits()
    assert not hits()
    assert caplog.text.count("forge: program cache") <= 2


def test_the_longest_unused_are_dropped(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [f"{number:064}" for number in range(4)]
    for age, key in enumerate(keys):
        store.write(key, Entry({}, [b"x" * 1000]))
        os.utime(programs / f"{key}.program", (age, age))
    assert store.read(keys[0]) is not None  # used now
    monkeypatch.setattr(store, "SIZE", 3500)
    store.write("9" * 64, Entry({}, [b"x" * 1000]))
    left = {path.name.removesuffix(".program") for path in programs.iterdir()}
    assert left == {keys[0], "9" * 64}


def test_a_folder_with_room_is_looked_through_once(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looked.append(path) or scan(path))
    for number in range(8):
        store.write(str(number) * 64, Entry({}, [b"x" * 1000]))
    assert looked == [programs]
    monkeypatch.setattr(store, "SIZE", 8 * 3000)  # an eighth of the rest is full after one more
    for number in range(8):
        store.write(str(number) * 64, Entry({}, [b"x" * 1000]))
    assert looked == [programs] * 5


def test_blobs_come_back_in_order(programs: Path) -> None:
    entry = Entry({"a": [1, None, "ä"]})
    numbers = [entry.add(blob) for blob in (b"one", b"", b"two\n", b"one")]
    store.write(KEY, entry)
    found: Any = store.read(KEY)
    assert (found.data, [found.blobs[number] for number in numbers]) == (entry.data, [b"one", b"", b"two\n", b"one"])
