"""Factors of batched products are contiguous if a region makes them, in forwards and in backwards."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import forge
from forge.ir.pytree import tensors

HEADS, WIDTH = 4, 8
Inputs = list[torch.Tensor]


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(*x.shape[:2], HEADS, WIDTH).permute(0, 2, 1, 3)


def attend(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    query, key, value = (heads(F.linear(x, each)).sin() for each in (q, k, v))
    scores = (query @ key.mT).tanh()
    return (scores @ value).transpose(1, 2).flatten(2)


def of_many_dims(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    y = F.linear(x, q).view(x.shape[0], 5, -1, HEADS, WIDTH).exp().permute(3, 0, 2, 1, 4)
    return torch.matmul(y, y.mT).sum(1)


def rows_of_columns(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    columns = (x.mT.contiguous().exp() * 2).mT
    return F.linear(columns, q) @ k


def masked(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return attention whose backward gets an object of the forward: the kernel that torch chose."""
    query, key, value = (heads(F.linear(x, each)) for each in (q, k, v))
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).flatten(2)


CASES = [attend, of_many_dims, rows_of_columns]


def inputs(batch: int, length: int) -> Inputs:
    width = HEADS * WIDTH
    shapes = [(batch, length, width), *[(width, width)] * 3]
    return [torch.randn(shape).mul(0.3).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("function", CASES)
def test_results_and_gradients_are_eagers(function: Callable) -> None:
    jitted, stages = forge.jit(function, cache=False), set[str]()
    for batch, length in ((2, 10), (3, 15), (1, 20)):
        given = inputs(batch, length)
        actual, expected = jitted(*given), function(*given)
        torch.testing.assert_close(actual, expected)
        assert actual.stride() == expected.stride()
        incoming = torch.randn_like(expected)
        found, wanted = (torch.autograd.grad(each, given, incoming, allow_unused=True) for each in (actual, expected))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        stages |= {trace.stage for trace in forge.last_traces(jitted)}
    assert "contiguous_batches" in stages


def test_a_backward_with_products_is_given_an_object_of_the_forward() -> None:
    jitted, given = forge.jit(masked, cache=False), inputs(2, 10)
    actual, expected = jitted(*given), masked(*given)
    torch.testing.assert_close(actual, expected)
    found, wanted = (torch.autograd.grad(each.sum(), given) for each in (actual, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_regions_write_what_is_multiplied() -> None:
    """They do so in a forward, and in a backward, which recomputes the queries."""
    jitted, given = forge.jit(attend, cache=False), inputs(2, 10)
    jitted(*given).sum().backward()
    for trace in forge.last_traces(jitted)[-1], forge.last_backward_traces(jitted)[-1]:
        regions = [bound for bound in trace.bound_symbols if bound.symbol.name.startswith("fusion")]
        made = {x.name for bound in regions for x in tensors(bound.output) if x.ndim == 4}
        products = [bound for bound in trace.bound_symbols if bound.symbol.name == "matmul"]
        assert len(made & {name for bound in products for name in bound.inputs}) >= 1


def test_contiguous_factors_stay() -> None:
    def multiply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.exp() @ y.sin().mT

    jitted, given = forge.jit(multiply, cache=False), [torch.randn(2, 3, 4, 5) for _ in "xy"]
    torch.testing.assert_close(jitted(*given), multiply(*given))
    assert "contiguous_batches" not in {trace.stage for trace in forge.last_traces(jitted)}
