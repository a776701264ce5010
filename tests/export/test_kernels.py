"""Kernels of repositories in exported files."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

import forge
from forge import EntryPoint, ExportError
from tests.export.support import members_of
from tests.hub.kernels import forget, metadata

MANIFEST = """\
forge_kernels: 1
library: {name: acme, priority: 3}
ops:
- op: torch.nn.functional.silu
  kernels:
  - {name: silu, kernel_name: silu, arg_meta: {input: float32}, args: {x: input}, grad: composite}
"""
CODE = "import torch\n\ndef silu(x): return x * torch.sigmoid(x)\n"


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.linear(x)).tanh() + 1


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    forget()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    variant = tmp_path / "acme" / "build" / "torch-universal"
    variant.mkdir(parents=True)
    (variant / "__init__.py").write_text(CODE)
    (variant / "metadata.json").write_text(metadata("acme", "_acme_e0f7"))
    (variant / "forge_kernels.yaml").write_text(MANIFEST)
    (variant / "LICENSE").write_text("As you like.")
    return variant.parent.parent


def test_kernels_of_repositories_are_in_the_file_with_their_licence(repository, tmp_path):
    model, path = Gate(), tmp_path / "gate.pt2"
    exported = forge.export(
        model, (torch.randn(4, 8),), dynamic_shapes={"x": {0: Dim("batch")}}, kernels=[str(repository)]
    )
    assert "acme.silu 1" in str(exported) and "is run by" in str(exported)
    exported.save(path)
    shutil.rmtree(repository)
    forget()
    x = torch.randn(3, 8)
    torch.testing.assert_close(forge.load(path)(x), model(x))
    names = [name for name in members_of(path) if name.startswith("data/forge/kernels/")]
    assert any(name.endswith("/LICENSE") for name in names) and any(name.endswith("/__init__.py") for name in names)


def test_kernels_declared_in_python_cannot_be_in_a_file():
    mine = forge.kernel("torch.nn.functional.silu", lambda input: input * torch.sigmoid(input), name="mine")
    with pytest.raises(ExportError, match=r"kernel mine .* was declared in Python"):
        forge.export(Gate(), (torch.randn(4, 8),), kernels=[mine])


def test_entry_points_share_the_kernels_of_a_file(repository, tmp_path):
    model, path = Gate(), tmp_path / "gates.pt2"
    points = {name: EntryPoint(model, (torch.randn(size, 8),)) for name, size in (("one", 1), ("many", 16))}
    forge.export(points, kernels=[str(repository)]).save(path)
    loaded = forge.load(path)
    for call, size in ((loaded.one, 1), (loaded.many, 16)):
        x = torch.randn(size, 8)
        torch.testing.assert_close(call(x), model(x))
    assert sum(name.endswith(("acme/forge_kernels.yaml", "LICENSE")) for name in members_of(path)) <= 2
