"""Values saved for the backward: an in-place change before the backward that is legal in eager is legal."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import forge

KEEP_THE_RESULT: dict[str, Callable] = {
    "1 / x": lambda x: 1 / x,
    "2.5 / x": lambda x: 2.5 / x,
    "reciprocal": torch.reciprocal,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "x / 3": lambda x: x / 3,
    "a sum": lambda x: x.sum() + x.mean(),
}


@pytest.mark.parametrize("name", KEEP_THE_RESULT)
def test_the_input_may_change_before_the_backward(name: str) -> None:
    function = KEEP_THE_RESULT[name]
    gradients = []
    for run in (forge.jit(function, fullgraph=True), function):
        x = torch.linspace(1, 2, 6, dtype=torch.float64).view(2, 3).requires_grad_()
        y = run(x)
        x.detach().add_(1)
        gradients += torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(*gradients)
    torch._dynamo.reset()


COPIES: dict[str, Callable] = {
    "flatten": lambda x: x.t().flatten()[:3],
    "contiguous": lambda x: x.t().contiguous().view(-1)[1:4],
    "reshape of a part": lambda x: x[:, :2].reshape(-1)[:3],
}


@pytest.mark.parametrize("name", COPIES)
def test_an_input_that_is_copied_may_change_before_the_backward(name: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = COPIES[name](x)
        return torch.outer(y, y[:2])

    gradients = []
    for run in (forge.jit(function, fullgraph=True), function):
        x = torch.linspace(1, 2, 6).view(2, 3).requires_grad_()
        y = run(x)
        x.detach().add_(1)
        gradients += torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(*gradients)


def test_attention_that_is_changed_may_have_the_gradient_of_its_mask() -> None:
    def function(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, mask)

    gradients = []
    for run in (forge.jit(function), function):
        x = torch.linspace(-1, 1, 40).view(1, 1, 5, 8).requires_grad_()
        mask = torch.linspace(0, 1, 25).view(1, 1, 5, 5).requires_grad_()
        y = run(x, mask)
        y.mul_(2)
        gradients += torch.autograd.grad(y.sin().sum(), (x, mask))
    torch.testing.assert_close(gradients[:2], gradients[2:])


def test_query_and_key_may_change_where_attention_has_the_gradient_of_its_mask() -> None:
    gradients = []
    for run in (forge.jit(F.scaled_dot_product_attention), F.scaled_dot_product_attention):
        torch.manual_seed(0)
        query, key, value = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
        mask = torch.randn(1, 1, 5, 5, requires_grad=True)
        y = run(query, key, value, mask)
        with torch.no_grad():
            query.mul_(2), key.add_(1), mask.zero_()
        gradients += torch.autograd.grad(y.sin().sum(), (query, key, value, mask), retain_graph=True)
        with torch.no_grad():
            value.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    torch.testing.assert_close(gradients[:4], gradients[4:])


def test_an_input_that_eager_saves_a_view_of_may_not_change() -> None:
    x = torch.linspace(1, 2, 6).view(2, 3).requires_grad_()
    y = forge.jit(lambda x: x.flatten().square())(x)
    x.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", ["log", "square", "number first in torch.div"])
def test_the_input_that_eager_keeps_may_not(name: str) -> None:
    function = {"log": torch.log, "square": torch.square}.get(name, lambda x: torch.div(2.0, x))
    x = torch.linspace(1, 2, 6, requires_grad=True)
    y = forge.jit(function)(x)
    x.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    torch._dynamo.reset()


def test_a_number_over_a_tensor_is_eagers_to_the_bit() -> None:
    x = torch.rand(1000) + 0.5
    assert torch.equal(forge.jit(lambda x: 3 / x)(x), 3 / x)
    assert torch.equal(forge.jit(lambda x: torch.div(3, x))(x), torch.div(3, x))


# (a program of several outputs, the output with a gradient): eager's backward from it reads no input
NOT_READ = {
    "a result that another output reads with x": (lambda x: (y := x.relu(), y * x), 0),
    "a value": (lambda x: (y := x.relu().exp(), (y * x).sum(), y.sum()), 2),
    "a value of a view": (lambda x: (y := x.t().sigmoid(), y @ x, (y * 2).sin()), 0),
    "a longer chain": (lambda x: (y := (x * 2).exp(), x.cos().sum(), (y * y).sum()), 2),
}


@pytest.mark.parametrize("name", NOT_READ)
def test_an_input_that_other_outputs_gradients_read_may_change(name: str) -> None:
    function, place = NOT_READ[name]
    gradients = []
    for run in (forge.jit(function), function):
        x = torch.linspace(-1, 1, 9).view(3, 3).requires_grad_()
        y = run(x)[place]
        with torch.no_grad():
            x.add_(1)
        gradients.append(torch.autograd.grad(y.sum(), x)[0])
    torch.testing.assert_close(*gradients)
