"""Layers of repositories of the Hub: trust, and the single need for the network."""

from pathlib import Path

import pytest
import torch
from torch import nn

import forge
from forge.hub import RefusedError
from forge.testing.hub_server import Hub
from tests.hub.kernels import metadata

LAYERS = """\
import torch
from torch import nn
import torch.nn.functional as F


class Gated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return b * F.silu(a)
"""
FILES = {
    f"torch-universal/{path}": text
    for path, text in {
        "__init__.py": "from . import layers\n",
        "layers.py": LAYERS,
        "metadata.json": metadata("gates", "_gates_1"),
    }.items()
}


class Gated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return nn.functional.silu(x[..., :half]) * x[..., half:]


def test_a_layer_of_the_hub_is_used_and_a_publisher_who_is_not_trusted_refused(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_CACHE_DIR", str(tmp_path / "forge"))
    kernels = pytest.importorskip("kernels")
    for name in ("acme/gates", "evil/gates"):
        server.publish(name, FILES)
    x, module = torch.randn(3, 8), Gated()
    at = {"layer_name": "Gated", "version": 1}
    for layer in ("acme/gates@v1", "acme/gates@v1:Gated", {"cpu": kernels.LayerRepository("acme/gates", **at)}):
        jitted = forge.jit(module, layers={"Gated": layer}, executors=["torch"])
        torch.testing.assert_close(jitted(x), module(x))
        assert [use.how for use in forge.explain(jitted).layers] == ["traced"]
    asked = len(server.requests)
    jitted = forge.jit(module, layers=["acme/gates@v1"], executors=["torch"])
    assert not [each for each in server.requests[asked:] if "/resolve/" in each]
    with pytest.raises(RefusedError, match="evil/gates"):
        forge.jit(module, layers={"Gated": {"cpu": kernels.LayerRepository("evil/gates", **at)}})
