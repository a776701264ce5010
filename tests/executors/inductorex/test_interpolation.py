"""Interpolations of images are fused with the surrounding calls."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import forge
from forge.compiler.layout import Layout
from forge.executors.executor import Declined
from forge.executors.inductorex import lower
from forge.executors.inductorex.aten_graph import INTERPOLATIONS, decompositions
from forge.executors.inductorex.graphs import describe, rebuild
from forge.executors.inductorex.operators import takes

DIMS = {"linear": 1, "bilinear": 2, "trilinear": 3}


@pytest.mark.parametrize(
    ("mode", "align_corners", "dtype"),
    [
        ("linear", False, torch.float32),
        ("bilinear", False, torch.float32),
        ("bilinear", True, torch.float64),
        ("bilinear", False, torch.bfloat16),
        ("trilinear", False, torch.float32),
    ],
)
def test_values_and_gradients_are_eagers(
    mode: str, align_corners: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORGE_CHECK", raising=False)

    def resize(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        larger = F.interpolate(
            x * weight, size=[2 * n + 1 for n in x.shape[2:]], mode=mode, align_corners=align_corners
        )
        smaller = F.interpolate(larger.sin(), scale_factor=0.7, mode=mode, align_corners=align_corners)
        return smaller + 1

    jitted = forge.jit(resize, cache=False)
    for sizes in ((4, 5, 6), (7, 3, 4)):
        x = torch.randn(2, 3, *sizes[: DIMS[mode]], dtype=dtype, requires_grad=True)
        weight = torch.randn(3, *[1] * DIMS[mode], dtype=dtype, requires_grad=True)
        actual, expected = jitted(x, weight), resize(x, weight)
        tolerance: dict[str, Any] = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(actual, expected, **tolerance)
        cotangent = torch.randn_like(expected)
        gradients = [torch.autograd.grad(each, (x, weight), cotangent) for each in (actual, expected)]
        torch.testing.assert_close(*gradients, **tolerance)
    assert not [each for each in forge.last_traces(jitted)[-1].bound_symbols if "interpolate" in each.symbol.id]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("scales", [(None, None), (1.7, 0.6)])
@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_decompositions_are_torchs(
    mode: str, align_corners: bool, scales: tuple[float | None, ...], memory_format: torch.memory_format
) -> None:
    operator = getattr(torch.ops.aten, f"upsample_{mode}2d").default
    x = torch.randn(2, 3, 5, 8).to(memory_format=memory_format)
    for size in ((8, 4),) if scales[0] else ((9, 4), (5, 8), (1, 1), (17, 30)):
        actual = INTERPOLATIONS[operator](x, size, align_corners, *scales)
        torch.testing.assert_close(actual, operator(x, size, align_corners, *scales), atol=1e-5, rtol=1e-5)
        assert INTERPOLATIONS[operator](x.bfloat16(), size, align_corners).dtype == torch.bfloat16


@pytest.mark.parametrize("scale", [1.0, 1.1, (1.1, 2.0)])
def test_dims_that_keep_their_size(scale: float | tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch ignores their scales; an infinite value or NaN does not spread along them."""
    monkeypatch.delenv("FORGE_CHECK", raising=False)

    def resize(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x * 2, scale_factor=scale, mode="bilinear") + 1

    jitted = forge.jit(resize, cache=False)
    for sizes in ((5, 6), (6, 8), (9, 12), (12, 13), (4, 5)):
        x = torch.randn(2, 3, *sizes)
        x[0, 0, 1, 1], x[0, 1, 1, 1] = torch.inf, torch.nan
        torch.testing.assert_close(jitted(x), resize(x), equal_nan=True)


def test_an_image_that_keeps_its_size_on_a_gpu_is_copied() -> None:
    x = torch.empty(1, 3, 5, 6, device="meta").to(memory_format=torch.channels_last)
    for operator in (torch.ops.aten.upsample_bilinear2d.default, torch.ops.aten.upsample_bicubic2d.default):
        graph = make_fx(partial(INTERPOLATIONS[operator], size=(5, 6), align_corners=False))(x).graph
        (copy,) = [node for node in graph.nodes if node.op == "call_function"]
        assert copy.target is torch.ops.aten.clone.default


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_bicubic_kernels_of_a_cpu_are_torchs(device: str) -> None:
    """On a GPU, for which the meta device stands in, they are in regions."""
    x = torch.empty(1, 3, 5, 6, device=device)
    (call,) = forge.trace(lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), x).bound_symbols
    assert isinstance(takes(call), Declined) == (device == "cpu")


@pytest.mark.parametrize(("mode", "dtype"), [("bilinear", torch.uint8), ("bicubic", torch.float32)])
def test_images_of_symbolic_sizes_are_torchs(mode: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's Python dispatcher decomposes operators with symbolic sizes; they are left to torch nevertheless."""
    monkeypatch.delenv("FORGE_CHECK", raising=False)

    def resize(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x + 1, scale_factor=2, mode=mode)

    jitted = forge.jit(resize, cache=False, dynamic=True)
    x = (torch.rand(1, 2, 5, 6) * 255).to(dtype)
    torch.testing.assert_close(jitted(x), resize(x), atol=0, rtol=0)
    assert "interpolate" in [each.symbol.name for each in forge.last_traces(jitted)[-1].bound_symbols]


def test_images_of_integers_are_torchs() -> None:
    x = torch.zeros(1, 3, 5, 6, dtype=torch.uint8)
    (call,) = forge.trace(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), x).bound_symbols
    decision = takes(call)
    assert isinstance(decision, Declined) and "of integers" in decision.reason


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dynamic", [False, True])
def test_images_are_written_once(
    memory_format: torch.memory_format, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a channels-last image copied to its strides after it was written in others."""
    monkeypatch.delenv("FORGE_CHECK", raising=False)
    graphs = _compiled_graphs(monkeypatch)
    images = [torch.randn(2, 16, n, n).to(memory_format=memory_format) for n in (4, 8)]

    def join(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([F.interpolate(each, size=(9, 9), mode="bilinear") for each in (x, y)], 1)

    actual, expected = forge.jit(join, cache=False, dynamic=dynamic)(*images), join(*images)
    torch.testing.assert_close(actual, expected)
    assert actual.stride() == expected.stride()
    (graph,) = graphs
    assert not [node for node in graph.nodes if node.target is torch.ops.aten.clone.default]


def _compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.Graph]:
    """Return a list to which the graphs are added that Inductor compiles from here on."""
    graphs: list[torch.fx.Graph] = []

    def compile_graph(graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        graphs.append(graph.graph)
        return original(graph, *args, **kwargs)

    original = lower.compile_graph
    monkeypatch.setattr(lower, "compile_graph", compile_graph)
    return graphs


def test_values_stay_in_registers_also_where_another_process_compiles_them() -> None:
    """A rebuilt graph is compiled with the settings of its interpolations: nothing in float32 is written to memory."""

    def join(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        bilinear = INTERPOLATIONS[torch.ops.aten.upsample_bilinear2d.default]
        return [torch.cat([bilinear(each, (9, 9), False) for each in (x, y)], 1)]

    images = [torch.randn(2, 16, n, n).bfloat16() for n in (4, 8)]
    graph = make_fx(join, decomposition_table=decompositions(), tracing_mode="fake")(*images)
    described = describe(graph, [Layout.of(each) for each in images])
    code = lower.compile_graph(*rebuild(described), whole_program=False).source_code
    assert "at::BFloat16* out_ptr0" in code and " float* " not in code
