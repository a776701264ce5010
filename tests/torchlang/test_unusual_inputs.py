"""The functions of torch.nn.functional on empty tensors, numbers, and unusual layouts, against eager."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge


def outcome(function: Callable, *inputs: torch.Tensor) -> tuple[list[torch.Tensor], type | None]:
    """Return values and gradients, and the type of the error of the function or its backward."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    found: list[torch.Tensor] = []
    try:
        result = function(*inputs)
        found.append(result.detach())
        found += torch.autograd.grad(result.square().sum(), inputs)
    except RuntimeError as error:
        return found, type(error)
    return found, None


def compare(function: Callable, *inputs: torch.Tensor, **options: Any) -> None:
    (ours, our_error), (theirs, their_error) = (
        outcome(run, *inputs) for run in (forge.jit(function, fullgraph=True), function)
    )
    assert our_error == their_error
    torch.testing.assert_close(ours, theirs, equal_nan=True, **options)


@pytest.mark.parametrize("order", itertools.permutations(range(4)), ids=str)
@pytest.mark.one_in(3)
def test_group_norm_of_one_sample_in_any_layout(order: tuple[int, ...]) -> None:
    for shape in ((1, 4, 3, 5), (1, 4, 1, 5), (1, 4, 3, 1)):
        x = torch.randn([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(4)])
        compare(lambda x, weight: F.group_norm(x, 2, weight), x, torch.rand(4), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("kind", ["avg", "max"])
def test_adaptive_pools_of_empty_tensors(kind: str, count: int, size: int) -> None:
    pool = getattr(F, f"adaptive_{kind}_pool{count}d")
    for shape in ((2, 0), (0, 3), (0,)):
        compare(lambda x: pool(x, size), torch.ones(*shape, *[4] * count))
    compare(lambda x: pool(x, size), torch.ones(2, 3, 0, *[4] * (count - 1)))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_convolutions_without_channels(count: int) -> None:
    convolve = getattr(F, f"conv{count}d")
    image, kernel = torch.randn(2, 0, *[4] * count), torch.randn(4, 0, *[2] * count)
    for options in ({}, {"groups": 2}, {"padding": 1, "stride": 2}):
        compare(lambda x, w, options=options: convolve(x, w, **options), image, kernel)
    compare(lambda x, w, b: convolve(x, w, b), image, kernel, torch.ones(4))


@pytest.mark.filterwarnings("ignore:Tensor.* is deprecated on 0-D tensors")
@pytest.mark.parametrize("name", ["T", "mT", "H", "mH", "adjoint"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_transposes_of_a_number(name: str, dtype: torch.dtype) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.adjoint() if name == "adjoint" else getattr(x, name)) * 2

    x = torch.tensor(1.5, dtype=dtype)
    torch.testing.assert_close(forge.jit(function, fullgraph=True)(x), function(x))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (0, 3, 4), (2, 0, 4)], ids=str)
@pytest.mark.parametrize(
    "function",
    [
        lambda x, src, index: x.scatter_add(0, index, src),
        lambda x, src, index: x.scatter(0, index, src),
        lambda x, src, index: x.scatter_reduce(0, index, src, "mean", include_self=False),
        lambda x, src, index: x.scatter_reduce(0, index, src, "amax"),
    ],
    ids=["add", "scatter", "mean", "amax"],
)
def test_scattering_nothing_has_gradients(function: Callable, shape: tuple[int, ...]) -> None:
    """An index without elements may have any rank; eager's backward refuses one of other lengths than src."""
    x, src = (torch.randn(2, 3, 4, requires_grad=True) for _ in range(2))
    index = torch.zeros(shape, dtype=torch.int64)
    result = forge.jit(function)(x, src, index)
    assert torch.equal(result, function(x, src, index))
    of_x, of_src = torch.autograd.grad(result.sum(), (x, src))
    assert torch.equal(of_x, torch.ones_like(x)) and torch.equal(of_src, torch.zeros_like(src))
