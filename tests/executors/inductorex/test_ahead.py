"""What Inductor builds once on a machine is built by another process while the first program is captured."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import forge
from forge.executors.inductorex import ahead


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The files that processes would make, with an empty cache of Inductor's."""
    files: list[Path] = []
    monkeypatch.setattr(ahead, "_start", lambda: files.append(ahead.built()))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FORGE_BACKGROUND", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ahead.build.cache_clear()
    yield files
    ahead.build.cache_clear()


def compile_two(executors: list[str]) -> None:
    for each in (torch.sin, torch.cos):
        forge.jit(lambda x, each=each: each(x) + 1, executors=executors)(torch.ones(3))


def test_one_process_is_started_for_all_programs(started: list[Path]) -> None:
    compile_two(["inductor", "torch"])
    assert started == [ahead.built()]


def test_none_is_started_where_it_was_built(started: list[Path]) -> None:
    ahead.built().touch()
    compile_two(["inductor", "torch"])
    assert not started


def test_none_is_started_without_inductor(started: list[Path]) -> None:
    compile_two(["torch"])
    assert not started


def test_none_is_started_where_nothing_shall_run_in_the_background(
    started: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_BACKGROUND", "0")
    compile_two(["inductor", "torch"])
    assert not started


@pytest.mark.slow
def test_the_process_builds_what_inductor_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where Inductor keeps its header
    worker = [sys.executable, "-m", "forge.executors.inductorex.worker", "--ahead", str(ahead.built())]
    subprocess.run(worker, check=True)
    assert ahead.built().exists()
    found = headers(tmp_path)
    assert found
    program = "import torch, forge\nforge.jit(lambda x: (x.exp() + 1).sum(), cache=False)(torch.ones(8))"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert headers(tmp_path) == found


def headers(folder: Path) -> dict[Path, int]:
    """The compiled headers, and when they were written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.gch")}


@pytest.mark.slow
def test_a_process_that_ends_takes_it_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    program = "import torch, forge\nforge.jit(lambda x: x + 1, cache=False)(torch.ones(8))"
    subprocess.run([sys.executable, "-c", program], check=True)
    time.sleep(0.5)
    found = subprocess.run(["ps", "-eo", "args"], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert str(tmp_path) not in found
