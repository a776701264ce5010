"""Rows added to linear layers without a bias become their biases."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import forge

ALONE = {
    "row after": lambda x, w, row: F.linear(x, w) + row,
    "row before": lambda x, w, row: row[None] + F.linear(x, w),
    "row of two dims": lambda x, w, row: torch.add(F.linear(x, w), row.reshape(1, -1)).relu(),
    "computed row": lambda x, w, row: F.linear(x.tanh(), w) + row.exp(),
    "in place": lambda x, w, row: F.linear(x, w).add_(row),
}
APART = {
    "the product is returned": lambda x, w, row: (product := F.linear(x, w), product + row),
    "the product is read twice": lambda x, w, row: (product := F.linear(x, w)) * 2 + (product + row),
    "a factor": lambda x, w, row: torch.add(F.linear(x, w), row, alpha=2),
    "another dtype": lambda x, w, row: F.linear(x, w) + row.double(),
    "a column": lambda x, w, row: F.linear(x, w) + row[:5, None],
    "one number": lambda x, w, row: F.linear(x, w) + row[:1],
    "a bias": lambda x, w, row: F.linear(x, w, row) + row,
}


def run(function: Callable) -> list[str]:
    """Return the stages of a program, after comparing it with eager at two sizes, with gradients."""
    jitted = forge.jit(function, cache=False)
    for batch in (3, 4):
        inputs = [torch.randn(*size, requires_grad=True) for size in ((batch, 5, 6), (7, 6), (7,))]
        results, expected = (
            [*each] if isinstance(each, tuple) else [each] for each in (jitted(*inputs), function(*inputs))
        )
        torch.testing.assert_close(results, expected)
        found, wanted = (torch.autograd.grad(sum(y.square().sum() for y in ys), inputs) for ys in (results, expected))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    return [trace.stage for trace in forge.last_traces(jitted)]


@pytest.mark.parametrize("function", ALONE.values(), ids=ALONE)
def test_a_row_becomes_the_bias(function: Callable) -> None:
    assert "fuse_biases" in run(function)


@pytest.mark.parametrize("function", APART.values(), ids=APART)
def test_other_sums_stay(function: Callable) -> None:
    assert "fuse_biases" not in run(function)


def test_a_product_without_gradients_stays_without() -> None:
    def compute(x: torch.Tensor, w: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            product = F.linear(x, w)
        return product + row

    inputs = [torch.randn(*size, requires_grad=True) for size in ((3, 6), (7, 6), (7,))]
    gradients = torch.autograd.grad(forge.jit(compute, cache=False)(*inputs).sum(), inputs, allow_unused=True)
    assert gradients[:2] == (None, None)
    torch.testing.assert_close(gradients[2], torch.full((7,), 3.0))
