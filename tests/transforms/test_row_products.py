"""Linear layers of few rows become sums in regions."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.compiler.claim import is_fused
from forge.executors.inductorex import aten_graph, lower
from forge.executors.inductorex.aten_graph import HAS_ROW_PRODUCTS
from forge.executors.registry import resolve_executors
from forge.ir import Trace
from forge.torch_internals.versions import TORCH
from forge.transforms import row_products

FUSED = partial(is_fused, executors=resolve_executors(["inductor", "torch"]))
WIDTH, INNER = 48, 80
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


class Block(nn.Module):
    """A gated layer after a norm, as in language models."""

    def __init__(self, dtype: torch.dtype = torch.float32, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=bias) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=bias)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def names(trace: Trace) -> list[str]:
    return [bound.symbol.name for bound in trace.bound_symbols]


@pytest.mark.usefixtures("compiled_regions")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_few_rows_are_multiplied_in_one_region(dtype: torch.dtype, bias: bool) -> None:
    module, exact = Block(dtype, bias), Block(torch.float64, bias)
    exact.load_state_dict(module.state_dict())
    whole = torch.randn(1, 5, WIDTH).to(dtype)
    inputs = [whole[:, :1], whole[:, -1:], whole[0, 2:3], whole[0, 3]]
    inputs += [whole[:, :2], whole[:, -4:].view(2, 2, WIDTH), whole[0, ::2]] if dtype == torch.float32 else []
    for x in inputs:
        jitted = forge.jit(module, cache=False)  # a length that changes would be a symbol
        with torch.no_grad():
            actual, eager, expected = jitted(x), module(x), exact(x.double())
        error, eagers = ((each.double() - expected).abs().max() for each in (actual, eager))
        assert error <= 1.5 * eagers + 1e-6
        is_region = len(forge.last_traces(jitted)[-1].bound_symbols) == 1
        assert is_region or (dtype != torch.float32 and TORCH < (2, 13))  # whose C++ omits roundings
        assert any(names(trace).count("row_product") == 3 for trace in forge.last_traces(jitted))


@pytest.mark.usefixtures("compiled_regions")
def test_a_row_is_written_once_and_none_that_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def compile_graph(graph: torch.fx.GraphModule, *rest: Any, **options: Any) -> Any:
        graphs.append(graph)
        return original(graph, *rest, **options)

    original = lower.compile_graph
    monkeypatch.setattr(lower, "compile_graph", compile_graph)
    monkeypatch.setattr(aten_graph, "_LAUNCHES", "cpu")
    weight, x, other = torch.randn(72, 56) / 8, torch.randn(1, 5, 56)[:, 2:3], torch.randn(56, 56)

    def gated(x: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(x, (56,))
        return F.linear(F.linear(normed, weight).sin() * F.linear(normed, weight), weight.t())

    programs: dict[Callable, int] = {
        gated: 2,  # two products read one row
        lambda x: F.linear(x, weight).sin(): 0,
        lambda x: F.linear(x, weight) + F.linear(x + 1, weight): 1,
        lambda x: F.linear(x @ other, weight).tanh(): 0,  # torch's product is materialized
    }
    for program, count in programs.items():
        graphs.clear()
        with torch.no_grad():
            torch.testing.assert_close(forge.jit(program, cache=False)(x), program(x))
        (graph,) = [graph for graph in graphs if HAS_ROW_PRODUCTS in graph.meta]
        assert sum(node.target is torch.ops.aten.as_strided.default for node in graph.graph.nodes) == count


def test_a_layer_alone_is_right() -> None:
    layer = nn.Linear(WIDTH, INNER)
    jitted = forge.jit(layer, cache=False)
    with torch.no_grad():
        for x in (torch.randn(1, WIDTH), torch.randn(WIDTH)):
            torch.testing.assert_close(jitted(x), layer(x))


@pytest.mark.parametrize(
    "case",
    [
        lambda x, w: F.linear(x.expand(5, WIDTH), w),
        lambda x, w: F.linear(x.expand(2, WIDTH).bfloat16(), w.bfloat16()),
        lambda x, w: F.linear(x[:0], w),
        lambda x, w: F.linear(x.double(), w.double()),
        lambda x, w: x @ w.t(),
        lambda x, w: F.linear(x, w, w[:1, :1].expand(1, w.shape[0])),
        lambda x, w: F.linear(x, w, w[0, 0]),
    ],
    ids=["five rows", "two rows of bfloat16", "no rows", "float64", "matmul", "bias of a row", "bias of no dims"],
)
def test_other_products_stay(case: Callable) -> None:
    trace = forge.trace(case, torch.randn(1, WIDTH), torch.randn(INNER, WIDTH))
    assert row_products(trace, FUSED) is trace


def test_a_product_that_another_executor_runs_stays() -> None:
    trace = forge.trace(F.linear, torch.randn(1, WIDTH), torch.randn(INNER, WIDTH))
    assert names(row_products(trace, FUSED)) == ["row_product"]
    assert row_products(trace, FUSED, in_torch=lambda bound: False) is trace
    assert row_products(trace, is_fused=lambda bound: False) is trace


def test_a_length_that_changes_is_another_program() -> None:
    module = Block()
    jitted = forge.jit(module)
    with torch.no_grad():
        for length in (4, 1, 7, 1):
            x = torch.randn(1, length, WIDTH)
            torch.testing.assert_close(jitted(x), module(x))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_a_program_with_gradients_keeps_its_products(device: str) -> None:
    module = Block().to(device)
    jitted, x = forge.jit(module), torch.randn(1, 1, WIDTH, device=device)
    jitted(x).sum().backward()
    assert all("row_product" not in names(trace) for trace in forge.last_traces(jitted))
    with torch.no_grad():
        torch.testing.assert_close(jitted(x), module(x))
    assert any("row_product" in names(trace) for trace in forge.last_traces(jitted))
