"""Fixtures of the artifacts' tests, which need a C++ compiler: each test process has its own cache, each test its own
artifacts and programs on disk."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge.compiler import region_artifacts
from forge.executors import inductorex


@pytest.fixture(scope="session")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(autouse=True)
def _fresh(_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler (g++)")
    monkeypatch.delenv("FORGE_CHECK", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(_cache))
    monkeypatch.setenv("FORGE_CACHE_DIR", str(tmp_path / "forge"))
    region_artifacts._artifacts.pop(inductorex.inductorex, None)
    yield
    region_artifacts._artifacts.pop(inductorex.inductorex, None)
