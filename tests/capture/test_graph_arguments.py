"""Calls of a graph with arguments that are objects or graphs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._higher_order_ops.hints_wrap import hints_wrapper
from torch._higher_order_ops.wrap import wrap

import forge


@dataclasses.dataclass(frozen=True)
class Scale:
    weight: torch.Tensor
    by: int = 2


@dataclasses.dataclass(frozen=True)
class Nested:
    scale: Scale
    shift: Any


@torch._dynamo.allow_in_graph
def scaled(x: torch.Tensor, scale: Scale) -> torch.Tensor:
    return x * scale.weight * scale.by


@torch._dynamo.allow_in_graph
def nested(x: torch.Tensor, several: list, *, other: Nested) -> torch.Tensor:
    return scaled(x, several[0]) + scaled(x, other.scale) + other.shift


@torch._dynamo.allow_in_graph
def changing(x: torch.Tensor, scale: Scale) -> torch.Tensor:
    scale.weight.add_(1)
    return x * scale.weight


def changed_in_an_object(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    w = w * 1
    return changing(x, Scale(w)) + w


@torch.compiler.nested_compile_region
def block(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.sin() * y


def wrapped_in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return wrap(lambda z: z.add_(w), y) * y


FUNCTIONS: dict[str, Callable] = {
    "an object": lambda x, w: scaled(x, Scale(w)),
    "an object by name": lambda x, w: scaled(x, scale=Scale(w, by=3)),
    "objects in objects and lists": lambda x, w: nested(x, [Scale(w), 2], other=Nested(Scale(x), w)),
    "an object whose tensor changes": changed_in_an_object,
    "wrap": lambda x, w: wrap(lambda y: (y.sin() * w, y + 1), x)[0] * 2,
    "wrap in wrap": lambda x, w: wrap(lambda y: wrap(lambda z: z.sin(), y) * w, x),
    "wrap, in place": wrapped_in_place,
    "a region that is called twice": lambda x, w: block(x, w) + block(w, x),
    "hints": lambda x, w: hints_wrapper(lambda y, v: y * v.cos(), (x, w), {}, hints={"a": 1}),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_call_is_one_of_the_programs(name: str, grad: bool) -> None:
    if grad and name == "hints":
        pytest.skip("torch does not differentiate it")
    function = FUNCTIONS[name]
    jitted = forge.jit(function, fullgraph=True)
    found = []
    for run in (jitted, function):
        x, w = (torch.arange(3.0).add_(start).requires_grad_(grad) for start in (1, 2))
        result = run(x, w)
        found.append((result.detach(), torch.autograd.grad(result.sum(), (x, w)) if grad else ()))
    torch.testing.assert_close(*found)
    assert (forge.explain(jitted).graphs, forge.explain(jitted).eager) == (1, [])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.Tensor([[1, 2, 3]]) * x,
        lambda x: torch.Tensor(x.shape[0], 2).fill_(1) * x[0],
        lambda x: torch.Tensor(*x.shape).fill_(1) * x[0] + torch.Tensor([x.shape[0]]),
        lambda x: torch.LongTensor((2, 0, 1)) * x + torch.DoubleTensor([0.1]),
        lambda x: torch.cat([torch.Tensor(), x]),
    ],
)
def test_a_type_makes_a_tensor_of_a_size_or_of_numbers(function: Callable) -> None:
    jitted = forge.jit(function, executors=["torch"])
    x = torch.arange(3.0)
    torch.testing.assert_close(jitted(x), function(x))
    explained = forge.explain(jitted)
    assert (explained.opaque_calls, explained.eager) == ([], [])
