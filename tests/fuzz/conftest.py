"""Tests of the fuzzer do not read each other's programs from disk, and their runs leave no hook."""

from pathlib import Path

import pytest

from forge.executors.inductorex import waits


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(waits, "notice", waits.notice)  # a run replaces it
