"""A scatter into zeros writes to their memory in place, each to its own."""

from collections.abc import Callable

import pytest
import torch

import forge

INDEX = torch.randint(0, 7, (4, 5))


def gathered(x: torch.Tensor) -> torch.Tensor:
    return x.gather(1, INDEX).square() * x.gather(1, 6 - INDEX)


def indexed(x: torch.Tensor) -> torch.Tensor:
    return x[INDEX[:, 0] % 4].square() + x[:, INDEX[0] % 7].sum()


def taken(x: torch.Tensor) -> torch.Tensor:
    return torch.take(x, INDEX).exp() * torch.take_along_dim(x, INDEX, 1)


def largest(x: torch.Tensor) -> torch.Tensor:
    return x.max(1).values.square() * x.sort(1).values.sum() * x.topk(2).values.sum()


@pytest.mark.parametrize("numerics", ["fast", "eager"])
@pytest.mark.parametrize("function", [gathered, indexed, taken, largest])
def test_gradients_are_eagers(function: Callable, numerics: str) -> None:
    torch.manual_seed(0)
    jitted = forge.jit(function, numerics=numerics)
    for _ in range(3):
        x = torch.randn(4, 7, requires_grad=True)
        loss = jitted(x).sum()
        for _ in range(2):  # the first backward's writes are not in the second one's zeros
            (actual,) = torch.autograd.grad(loss, x, retain_graph=True)
            torch.testing.assert_close(actual, torch.autograd.grad(function(x).sum(), x)[0])


def test_scatters_of_one_shape_have_zeros_of_their_own() -> None:
    jitted, x = forge.jit(gathered), torch.randn(4, 7, requires_grad=True)
    jitted(x).sum().backward()
    calls = [bound.symbol.id for bound in forge.last_backward_traces(jitted)[-1].bound_symbols]
    assert calls.count("torch.prims_scatter_reduce_") == 2 and not any("scatter_add" in each for each in calls)


def test_zeros_that_are_returned_stay_zeros() -> None:
    def function(index: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zeros = torch.zeros(4, 7)
        return zeros, zeros.scatter_add(1, index, values), zeros.scatter(1, index, values), zeros + 1

    jitted, values = forge.jit(function), torch.randn(4, 5)
    for _ in range(2):
        for actual, expected in zip(jitted(INDEX, values), function(INDEX, values), strict=True):
            torch.testing.assert_close(actual, expected)


def test_second_gradients_are_eagers() -> None:
    second = []
    x = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    for function in (forge.jit(gathered), gathered):
        (first,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*second)
