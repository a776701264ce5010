"""The ownership of an Executable, which runs, and its CompileReport, which explains: neither keeps the other alive."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import forge
from forge.api import backend
from forge.compiler.executable import Executable
from forge.compiler.report import CompileReport


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Executable, CompileReport]]]:
    """Record the programs that are compiled or loaded, in order."""
    all_of: list[tuple[Executable, CompileReport]] = []
    compile_graph = backend._compile

    def compile_and_list(*arguments: object) -> tuple[Executable, CompileReport]:
        all_of.append(compile_graph(*arguments))
        return all_of[-1]

    monkeypatch.setattr(backend, "_compile", compile_and_list)
    yield all_of
    all_of.clear()


def _train() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    forge.jit(model)(torch.randn(4, 8)).sum().backward()
    torch._dynamo.reset()


@pytest.mark.parametrize("from_disk", [False, True])
@pytest.mark.parametrize("part", [0, 1], ids=["the report", "the executable"])
def test_neither_owns_the_other(
    from_disk: bool, part: int, compiled: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_CACHE_DIR", str(tmp_path))
    for _ in range(1 + from_disk):
        compiled.clear()
        _train()
    ((executable, report),) = compiled
    assert report.cached == from_disk
    kept, other = (report, executable.plan.forward.function) if part == 0 else (executable, report)
    other = weakref.ref(other)
    compiled.clear()
    del executable, report
    gc.collect()
    assert other() is None, gc.get_referrers(other())
    assert kept is not None
