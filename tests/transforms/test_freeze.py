"""Folding into weights: batch norms, products of one input, and everything that depends only on weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
from forge.executors import claim, resolve_executors
from forge.ir import Trace
from forge.transforms import Freezing, fold_norms, join_products, partition_by_weights

W = torch.linspace(-1, 1, 24)


def frozen(function: Callable, *args: torch.Tensor, weights: str) -> tuple[Trace, Freezing]:
    """Return the trace of one call, with its arguments of these names as weights."""
    trace = forge.trace(function, *args)
    return trace, Freezing(frozenset(weights.split()))


def ids(trace: Trace) -> list[str]:
    return [bound.symbol.id for bound in trace.bound_symbols]


def run(trace: Trace, *args: torch.Tensor) -> Any:
    claimed, _ = claim(trace, resolve_executors(["torch"]))
    return claimed.python_callable()(*args)


def normed(x: Any, weight: Any, bias: Any, mean: Any, var: Any) -> Any:
    return F.batch_norm(torch.conv2d(x, weight, bias), mean, var)


def norm_args(channels: int = 2) -> list[torch.Tensor]:
    weight, bias = torch.randn(channels, 3, 2, 2), torch.randn(channels)
    return [torch.randn(1, 3, 4, 4), weight, bias, torch.randn(channels), torch.rand(channels) + 0.5]


def test_a_batch_norm_of_weights_is_folded_into_the_convolution_before_it() -> None:
    args = norm_args()
    trace, freezing = frozen(normed, *args, weights="weight bias mean var")
    folded = fold_norms(trace, freezing)
    assert "torch.nn.functional.batch_norm" not in ids(folded) and ids(folded)[-1] == "torch.conv2d"
    torch.testing.assert_close(run(folded, *args), normed(*args))
    assert freezing.folds == ["batch norm mean in the weights of weight"] and not freezing.misses


def test_a_batch_norm_of_statistics_that_are_no_weights_stays() -> None:
    trace, freezing = frozen(normed, *norm_args(), weights="weight bias mean")
    assert fold_norms(trace, freezing) is trace
    assert "no weight that stays as it is" in freezing.misses[0]


def test_a_convolution_that_something_else_reads_keeps_its_weights() -> None:
    def function(x: Any, weight: Any, mean: Any, var: Any) -> Any:
        h = torch.conv2d(x, weight)
        return F.batch_norm(h, mean, var) + h

    x, weight, _, mean, var = norm_args()
    trace, freezing = frozen(function, x, weight, mean, var, weights="weight mean var")
    assert fold_norms(trace, freezing) is trace
    assert "used elsewhere" in freezing.misses[0]


def test_a_convolution_that_is_returned_keeps_its_weights() -> None:
    def function(x: Any, weight: Any, mean: Any, var: Any) -> Any:
        h = torch.conv2d(x, weight)
        return F.batch_norm(h, mean, var), h

    x, weight, _, mean, var = norm_args()
    trace, freezing = frozen(function, x, weight, mean, var, weights="weight mean var")
    assert fold_norms(trace, freezing) is trace


def test_a_norm_of_rows_is_not_one_of_a_linear_layers_channels() -> None:
    def function(x: Any, weight: Any, mean: Any, var: Any) -> Any:
        return F.batch_norm(F.linear(x, weight), mean, var)  # (N, C, L) @ (L, L)

    x, weight = torch.randn(2, 3, 4), torch.randn(4, 4)
    trace, freezing = frozen(function, x, weight, torch.zeros(3), torch.ones(3), weights="weight mean var")
    assert fold_norms(trace, freezing) is trace
    assert "channels" in freezing.misses[0]


def test_a_norm_that_a_named_kernel_runs_stays() -> None:
    trace, freezing = frozen(normed, *norm_args(), weights="weight bias mean var")
    assert fold_norms(trace, freezing, in_torch=lambda bound: False) is trace
    assert "named" in freezing.misses[0]


def test_weights_are_rounded_once() -> None:
    def function(x: Any, weight: Any, mean: Any, var: Any) -> Any:
        return F.batch_norm(torch.conv2d(x, weight.to(torch.bfloat16)), mean, var, eps=0.0)

    x, weight, _, mean, var = norm_args()
    x = x.bfloat16()
    trace, freezing = frozen(function, x, weight, mean, var, weights="weight mean var")
    scale = var.rsqrt()
    wanted = torch.conv2d(x, (weight * scale.view(-1, 1, 1, 1)).bfloat16(), (-mean * scale).bfloat16())
    assert torch.equal(run(fold_norms(trace, freezing), x, weight, mean, var), wanted)


def projected(x: Any, q: Any, k: Any, b: Any) -> Any:
    return F.linear(x, q) * 2, F.linear(x, k, b) * 3


def test_linear_layers_of_one_input_are_one() -> None:
    args = (torch.randn(5, 4), torch.randn(3, 4), torch.randn(2, 4), torch.randn(2))
    trace, freezing = frozen(projected, *args, weights="q k b")
    joined = join_products(trace, freezing)
    assert ids(joined).count("torch.nn.functional.linear") == 1
    for made, wanted in zip(run(joined, *args), projected(*args), strict=True):
        torch.testing.assert_close(made, wanted)
    assert freezing.folds == ["q, k: one product with 5 columns"]


def test_products_with_matrices_are_one() -> None:
    def function(x: Any, q: Any, k: Any) -> Any:
        return (x @ q).relu(), (x @ k).exp()

    args = (torch.randn(2, 5, 4), torch.randn(4, 3), torch.randn(4, 2))
    trace, freezing = frozen(function, *args, weights="q k")
    joined = join_products(trace, freezing)
    assert ids(joined).count("torch.matmul") == 1
    for made, wanted in zip(run(joined, *args), function(*args), strict=True):
        torch.testing.assert_close(made, wanted)


def test_a_weight_that_is_made_after_the_first_product_is_made_before() -> None:
    def function(x: Any, q: Any, k: Any) -> Any:
        first = F.linear(x, q).relu()
        return first, F.linear(x, (k * 2).exp()).relu()

    args = (torch.randn(5, 4), torch.randn(3, 4), torch.randn(2, 4))
    trace, freezing = frozen(function, *args, weights="q k")
    joined = join_products(trace, freezing)
    assert ids(joined).count("torch.nn.functional.linear") == 1
    for made, wanted in zip(run(joined, *args), function(*args), strict=True):
        torch.testing.assert_close(made, wanted)


def test_products_of_other_inputs_or_with_values_stay() -> None:
    def function(x: Any, y: Any, q: Any, k: Any) -> Any:
        return F.linear(x, q).relu(), F.linear(y, k).relu(), F.linear(x, y).relu()

    args = (torch.randn(5, 4), torch.randn(6, 4), torch.randn(3, 4), torch.randn(2, 4))
    trace, freezing = frozen(function, *args, weights="q k")
    assert join_products(trace, freezing) is trace


def test_what_is_returned_has_memory_of_its_own() -> None:
    def function(x: Any, q: Any, k: Any) -> Any:
        return F.linear(x, q), F.linear(x, k)

    args = (torch.randn(5, 4), torch.randn(3, 4), torch.randn(2, 4))
    trace, freezing = frozen(function, *args, weights="q k")
    q, k = run(join_products(trace, freezing), *args)
    assert q.is_contiguous() and k.is_contiguous()
    assert q.untyped_storage().data_ptr() != k.untyped_storage().data_ptr()


def test_what_depends_on_weights_alone_is_a_program_of_its_own() -> None:
    def function(x: Any, w: Any) -> Any:
        return x * (w.exp() + torch.arange(4))

    x, w = torch.randn(4), torch.randn(4)
    parted = partition_by_weights(forge.trace(function, x, w), {"w"})
    assert [bound.symbol.id for bound in parted.rest] == ["torch.mul"]
    (value,) = run(parted.ahead, w)
    torch.testing.assert_close(value, w.exp() + torch.arange(4))


def test_a_value_that_is_returned_is_no_constant() -> None:
    def function(x: Any, w: Any) -> Any:
        scaled = w * 2
        return x + scaled, scaled

    trace = forge.trace(function, torch.randn(4), torch.randn(4))
    assert not partition_by_weights(trace, {"w"}).values


@pytest.mark.parametrize(("limit", "moves"), [(64, True), (63, False)])
def test_a_call_that_makes_much_of_little_stays(limit: int, moves: bool) -> None:
    trace = forge.trace(lambda x, w: x + w.expand(4, 4), torch.randn(4, 4), torch.randn(4))
    assert bool(partition_by_weights(trace, {"w"}, byte_limit=limit).values) is moves
