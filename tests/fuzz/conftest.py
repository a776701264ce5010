"""Fixtures of the fuzzer's tests, which do not read each other's programs from disk, and leave no hook."""

from pathlib import Path

import pytest

from forge.executors.inductorex import compile_wait


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compile_wait, "notice", compile_wait.notice)  # a run replaces it
