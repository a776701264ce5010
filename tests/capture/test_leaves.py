"""requires_grad_() on intermediate tensors: in the graph where no caller sees the leaf, else between two graphs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import forge

gradients: list[torch.Tensor] = []


def by_method(x: torch.Tensor, weight: torch.Tensor) -> Any:
    h = x * 2
    h.requires_grad_()
    return (h @ weight).tanh().sum()


def by_attribute(x: torch.Tensor, weight: torch.Tensor) -> Any:
    h = x[:, None]
    h.requires_grad = True
    return (h @ weight).tanh().sum() + h.detach().sum()


def in_a_checkpoint(x: torch.Tensor, weight: torch.Tensor) -> Any:
    h = (x * 2).requires_grad_()
    return checkpoint(lambda h: (h @ weight).tanh().sum(), h, use_reentrant=False)


def seen(x: torch.Tensor, weight: torch.Tensor) -> Any:
    h = x * 2
    h.requires_grad_()
    return (h @ weight).tanh().sum() if h.requires_grad else h


def of_a_leaf_alone(x: torch.Tensor, weight: torch.Tensor) -> Any:
    h = x * 2
    h.requires_grad_()
    return (h @ weight.detach()).tanh().sum()


def beside_a_leaf(x: torch.Tensor, weight: torch.Tensor) -> Any:
    h = x * 2
    h.requires_grad_()
    return (h @ weight).tanh().sum(), h


def beside_a_result_of_a_leaf(x: torch.Tensor, weight: torch.Tensor) -> Any:
    h = x * 2
    h.requires_grad_()
    return (h @ weight).tanh().sum(), h.exp()


def with_a_hook(x: torch.Tensor, weight: torch.Tensor) -> Any:
    h = x * 2
    h.requires_grad_()
    h.register_hook(lambda gradient: gradients.append(gradient.clone()))
    return (h @ weight).tanh().sum()


def with_a_gradient_inside(x: torch.Tensor, weight: torch.Tensor) -> Any:
    h = x * 2
    h.requires_grad_()
    (gradient,) = torch.autograd.grad((h @ weight).tanh().sum(), h, create_graph=True)
    return gradient.square().sum()


def of_integers(x: torch.Tensor, weight: torch.Tensor) -> Any:
    h = x.to(torch.int64)
    h.requires_grad_()
    return h


def observed(call: Callable, function: Callable) -> list[Any]:
    """Return what a caller sees of a step, of the first two calls."""
    torch.manual_seed(0)
    gradients.clear()
    seen: list[Any] = []
    for _ in range(2):
        x, weight = torch.randn(3, 4), torch.randn(4, 4, requires_grad=True)
        result = call(x, weight)
        results = list(result) if isinstance(result, tuple) else [result]
        if results[0].requires_grad:
            torch.stack([each.sum() for each in results if each.requires_grad]).sum().backward()
        seen += [*(each.detach() for each in results), [(each.requires_grad, each.is_leaf) for each in results]]
        seen += [weight.grad, *gradients, *(each.grad for each in results if each.is_leaf)]
    return seen


@pytest.mark.parametrize("function", [by_method, by_attribute, in_a_checkpoint, seen])
def test_a_leaf_that_no_caller_sees_is_in_the_graph(function: Callable) -> None:
    jitted = forge.jit(function)
    torch.testing.assert_close(observed(jitted, function), observed(function, function))
    explanation = forge.explain(jitted)
    assert explanation.graphs == 1 and not explanation.graph_breaks and not explanation.eager


@pytest.mark.parametrize(
    "function", [of_a_leaf_alone, beside_a_leaf, beside_a_result_of_a_leaf, with_a_hook, with_a_gradient_inside]
)
def test_a_leaf_that_a_caller_sees_is_eagers(function: Callable) -> None:
    jitted = forge.jit(function)
    torch.testing.assert_close(observed(jitted, function), observed(function, function))
    assert forge.explain(jitted).graph_breaks


def test_integers_require_no_gradients() -> None:
    with pytest.raises(RuntimeError, match="only Tensors of floating point"):
        forge.jit(of_integers)(torch.randn(3, 4), torch.randn(4, 4))


def test_the_inputs_of_a_frozen_models_layers_may_require_gradients() -> None:
    """As transformers' `enable_input_require_grads` does for adapters behind a frozen embedding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    model[2].requires_grad_(True)
    model[0].register_forward_hook(lambda module, args, output: output.requires_grad_(True))
    ids = torch.randint(0, 10, (3, 5))
    jitted, results = forge.jit(model), []
    for each in (jitted, model):
        model.zero_grad()
        each(ids).square().sum().backward()
        results.append(model[2].weight.grad.clone())
    torch.testing.assert_close(*results)
    assert forge.explain(jitted).graphs == 1 and not forge.explain(jitted).graph_breaks
