"""Gradients of an embedding's rows are added in place to the rest of the weight's gradient."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge


class Tied(nn.Module):
    """An encoder, a decoder and a head with one weight; `penalty` is a term of every element."""

    def __init__(self, *, penalty: bool = False, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 8, dtype=dtype, **options)
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.table.weight
        self.penalty = penalty

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = self.head(torch.tanh(self.table(source).mean(0) + self.table(target))).square().sum()
        return loss + self.table.weight.square().sum() if self.penalty else loss


class Twice(nn.Module):
    """An embedding that is called twice and is not a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 8)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (self.table(source).sum(0) * self.table(target)).square().sum()


class Alone(nn.Module):
    """An embedding that is called once, and a head whose gradient is not summed with rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(30, 8), nn.Linear(8, 3)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(target)).square().sum() + self.head(self.table.weight).sum()


def operators_of(jitted: Callable) -> list[str]:
    return [bound.symbol.id for bound in forge.last_backward_traces(jitted)[-1].bound_symbols]


def count(jitted: Callable) -> int:
    return operators_of(jitted).count("torch.add_rows_")


def gradients(model: nn.Module, call: Callable, *inputs: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    call(*inputs).backward()
    return [parameter.grad for parameter in model.parameters()]


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 30, shape)


@pytest.mark.parametrize(
    ("make", "adds"),
    [
        (Tied, 2),
        (lambda: Tied(penalty=True), 2),
        (lambda: Tied(padding_idx=3), 2),
        (lambda: Tied(dtype=torch.float64).double(), 2),
        (Twice, 1),
        (Alone, 1),
        (lambda: Tied(scale_grad_by_freq=True), 0),
        (lambda: Tied(dtype=torch.bfloat16).bfloat16(), 0),
    ],
    ids=["tied", "penalty", "padding", "float64", "twice", "once", "by frequency", "bfloat16"],
)
def test_gradients_are_eagers(make: Callable[[], nn.Module], adds: int) -> None:
    torch.manual_seed(0)
    model = make()
    ours = copy.deepcopy(model)
    jitted = forge.jit(ours)
    bounds = {"rtol": 0.1, "atol": 0.5} if model.table.weight.dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    for shapes in (((2, 5), (5,)), ((3, 7), (7,)), ((1, 1), (1,)), ((2, 0), (0,))):
        source, target = (tokens(*shape) for shape in shapes)
        source.flatten()[:1] = 3
        actual = gradients(ours, jitted, source, target)
        torch.testing.assert_close(actual, gradients(model, model, source, target), **bounds)
        assert count(jitted) == adds


def test_a_backward_may_run_twice_and_be_differentiated() -> None:
    torch.manual_seed(0)
    model = Tied().double()
    ours = copy.deepcopy(model)
    jitted, source, target = forge.jit(ours), tokens(2, 5), tokens(5)
    loss = jitted(source, target)
    loss.backward(retain_graph=True)
    once = ours.table.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(ours.table.weight.grad, 2 * once)
    second = []
    for module, call in ((model, model), (ours, jitted)):
        (first,) = torch.autograd.grad(call(source, target), module.table.weight, create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), module.table.weight))
    torch.testing.assert_close(*second)


def test_a_term_that_is_read_again_stays() -> None:
    """The gradient of the head is a separate result."""

    def both(weight: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = weight.detach().requires_grad_()
        rows = F.embedding(ids, leaf)
        product = rows.detach().t() @ rows.detach()
        return torch.autograd.grad((rows @ product).square().sum() + (leaf @ product).sum(), leaf)[0], product

    weight, ids = torch.randn(30, 8), tokens(6)
    jitted = forge.jit(both)
    torch.testing.assert_close(jitted(weight, ids), both(weight, ids), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(jitted(weight, ids), both(weight, ids), rtol=1e-4, atol=1e-3)


def test_eager_bits_keep_eagers_order_of_additions() -> None:
    model = Tied()
    jitted = forge.jit(model, numerics="eager")
    gradients(model, jitted, tokens(2, 5), tokens(5))
    assert count(jitted) == 0
