"""Gradients that the caller observes (torch.autograd.grad, hooks) have eager's strides and writable memory."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import forge

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda x: x.mean(),
    "mean of rows": lambda x: x.mean(1),
    "mean that keeps its dim": lambda x: x.mean(1, keepdim=True),
    "mean in float64": lambda x: x.mean(dtype=torch.float64),
    "mean of a transposed tensor": lambda x: x.t().mean(0),
    "mean of half precision in float32": lambda x: x.bfloat16().mean(1, dtype=torch.float32),
    "mean beside another result": lambda x: x[None, None].mean((2, 3)) + x.relu().sum(),
    "global pooling": lambda x: F.adaptive_avg_pool2d(x[None, None], 1),
    "var_mean": lambda x: torch.var_mean(x, 1)[1],
    "std_mean": lambda x: torch.std_mean(x)[1],
    "nanmean": lambda x: x.nanmean(),
    "sum": lambda x: x.sum(1),
    "sum in float64": lambda x: x.sum(dtype=torch.float64),
    "logsumexp": lambda x: x.logsumexp(1).mean(),
    "layer_norm": lambda x: F.layer_norm(x, (9,)).mean(0),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(7)),
    "amax": lambda x: x.amax(1),
    "trace": lambda x: x.trace(),
    "product with a vector": lambda x: x @ torch.ones(9),
}


@pytest.mark.parametrize("executors", [None, ["torch"]], ids=["fused", "unfused"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_have_eagers_strides(name: str, executors: list[str] | None) -> None:
    gradients = []
    for function in (FUNCTIONS[name], forge.jit(FUNCTIONS[name], executors=executors)):
        torch.manual_seed(0)
        x = torch.randn(7, 9, requires_grad=True)
        gradients += torch.autograd.grad(function(x).sum(), x)
    torch.testing.assert_close(gradients[1], gradients[0])
    assert gradients[1].stride() == gradients[0].stride()


@pytest.mark.parametrize("name", ["mean", "mean of rows", "global pooling", "sum in float64"])
def test_a_hook_may_change_a_gradient_in_place(name: str) -> None:
    x = torch.randn(7, 9, requires_grad=True)
    for function in (FUNCTIONS[name], forge.jit(FUNCTIONS[name])):
        y = x * 2
        y.register_hook(lambda g: g.mul_(3))
        function(y).sum().backward()
        gradient, x.grad = x.grad, None
        other = torch.autograd.grad(FUNCTIONS[name](x * 2).sum(), x)[0]
        torch.testing.assert_close(gradient, other * 3)
