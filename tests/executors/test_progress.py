"""The progress bar of compilation: after two seconds, on a terminal, unless disabled."""

import io
import sys
import threading

import pytest

from forge.support import progress


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


def work(monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO) -> str:
    """Return the text printed while two of three steps are done, for work that takes longer than the delay."""
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(progress, "DELAY", 0.0)
    with progress.display(), progress.display():
        timer = progress._work.timer
        progress.expect(3)
        progress.advance()
        if timer is not None:
            timer.join()
        progress.advance()
    assert progress._work.bar is None and not any(isinstance(each, threading.Timer) for each in threading.enumerate())
    return stderr.getvalue()


def test_a_terminal_shows_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORGE_PROGRESS", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    printed = work(monkeypatch, Terminal())
    assert "forge compiles" in printed and "2/3" in printed


def test_nothing_is_printed_where_nobody_looks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORGE_PROGRESS", raising=False)
    assert work(monkeypatch, io.StringIO()) == ""


def test_the_bar_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_PROGRESS", "0")
    assert work(monkeypatch, Terminal()) == ""


def test_short_work_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.delenv("FORGE_PROGRESS", raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress.display():
        progress.expect(1)
        progress.advance()
    assert terminal.getvalue() == ""
