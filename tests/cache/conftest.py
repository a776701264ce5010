"""Fixtures of the cache's tests: each test has its own, empty cache."""

from pathlib import Path

import pytest

from forge.cache import store


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the folder of the test's programs."""
    monkeypatch.setenv("FORGE_CACHE", "1")
    monkeypatch.setenv("FORGE_CACHE_DIR", str(tmp_path / "forge"))
    monkeypatch.setattr(store, "_noticed", set())
    return tmp_path / "forge" / "programs"
