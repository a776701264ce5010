"""Linear layers of one row are sums in regions."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge import torchlang
from forge.compiler.claim import is_fused
from forge.executors.registry import resolve_executors
from forge.ir import Trace
from forge.torch_internals.versions import TORCH
from forge.transforms import row_products

FUSED = partial(is_fused, executors=resolve_executors(["inductor", "torch"]))
AS_ON_A_GPU = partial(row_products, is_fused=FUSED, device="cpu")
WIDTH, INNER = 48, 80


class Block(nn.Module):
    """A gated layer with a norm before it, as language models have."""

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
def test_a_row_is_multiplied_in_one_region(dtype: torch.dtype, bias: bool) -> None:
    module, exact = Block(dtype, bias), Block(torch.float64, bias)
    exact.load_state_dict(module.state_dict())
    jitted = forge.jit(module, transforms=[AS_ON_A_GPU], cache=False)
    whole = torch.randn(1, 5, WIDTH).to(dtype)
    for x in (whole[:, :1], whole[:, -1:], whole[0, 2:3], whole[0, 3]):
        with torch.no_grad():
            actual, eager, expected = jitted(x), module(x), exact(x.double())
        error, eagers = ((each.double() - expected).abs().max() for each in (actual, eager))
        assert error <= 1.5 * eagers + 1e-6
        is_region = len(forge.last_traces(jitted)[-1].bound_symbols) == 1
        assert is_region or (dtype != torch.float32 and TORCH < (2, 13))  # whose C++ forgets roundings
        assert names(forge.last_traces(jitted)[1]).count("row_product") == 3


def test_a_layer_alone_is_right() -> None:
    layer = nn.Linear(WIDTH, INNER)
    jitted = forge.jit(layer, transforms=[AS_ON_A_GPU], cache=False)
    with torch.no_grad():
        for x in (torch.randn(1, WIDTH), torch.randn(WIDTH)):
            torch.testing.assert_close(jitted(x), layer(x))


@pytest.mark.parametrize(
    "case",
    [
        lambda x, w: F.linear(x.expand(2, WIDTH), w),
        lambda x, w: F.linear(x.double(), w.double()),
        lambda x, w: x @ w.t(),
    ],
    ids=["two rows", "float64", "matmul"],
)
def test_other_products_stay(case: Callable) -> None:
    trace = forge.trace(case, torch.randn(1, WIDTH), torch.randn(INNER, WIDTH))
    assert AS_ON_A_GPU(trace) is trace


def test_a_product_that_another_executor_runs_stays() -> None:
    trace = forge.trace(F.linear, torch.randn(1, WIDTH), torch.randn(INNER, WIDTH))
    assert names(AS_ON_A_GPU(trace)) == ["row_product"]
    assert AS_ON_A_GPU(trace, plain=lambda bound: False) is trace
    assert AS_ON_A_GPU(trace, is_fused=lambda bound: False) is trace
    assert row_products(trace, FUSED) is trace  # its tensors are not on a GPU


def test_a_length_that_changes_is_another_program() -> None:
    module = Block()
    jitted = forge.jit(module)
    with torch.no_grad():
        for length in (4, 1, 7, 1):
            x = torch.randn(1, length, WIDTH)
            torch.testing.assert_close(jitted(x), module(x))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_by_default_rows_on_a_gpu_are_multiplied_in_regions_without_gradients() -> None:
    module = Block(torch.bfloat16).cuda()
    jitted, x = forge.jit(module), torch.randn(1, 1, WIDTH, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        torch.testing.assert_close(jitted(x), module(x), rtol=2e-2, atol=2e-2)
    assert any(bound.symbol is torchlang.row_product for bound in forge.last_traces(jitted)[-4].bound_symbols)
    jitted(x).sum().backward()
    assert all(bound.symbol is not torchlang.row_product for bound in forge.last_traces(jitted)[0].bound_symbols)
