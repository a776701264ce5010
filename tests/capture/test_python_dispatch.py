"""Tensor subclasses with __torch_dispatch__, and dispatch modes, around jitted functions in the default configuration:
no compiled region or kernel gets memory that does not exist."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import forge


class Pair(torch.Tensor):
    """A pair of tensors in one: operators run on both."""

    @staticmethod
    def __new__(cls, a: torch.Tensor, b: torch.Tensor) -> "Pair":
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, strides=a.stride(), dtype=a.dtype, device=a.device)

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a, self.b = a, b

    def __tensor_flatten__(self) -> tuple:
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict, meta: Any, size: Any, stride: Any) -> "Pair":
        return Pair(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        first, second = (
            function(*_parts(args, name), **_parts(kwargs or {}, name))
            for name in ("a", "b")  # no closure over args
        )
        return tree_map(lambda a, b: Pair(a, b) if isinstance(a, torch.Tensor) else a, first, second)


def _parts(tree: Any, name: str) -> Any:
    return tree_map(lambda leaf: getattr(leaf, name) if isinstance(leaf, Pair) else leaf, tree)


def curve(x: torch.Tensor) -> torch.Tensor:
    return (x * 2 + 1).sigmoid() * x


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax((x @ w).relu() * 2, -1).sum(-1) * 3


def told(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = run()
    return result, [str(each.message) for each in found if "forge" in str(each.message)]


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_a_pair_of_tensors_is_given(warm: bool) -> None:
    jitted, x, y = forge.jit(curve), torch.randn(4, 4), torch.randn(4, 4)
    if warm:
        jitted(x)
    result, messages = told(lambda: jitted(Pair(x, y)))
    assert isinstance(result, Pair)
    torch.testing.assert_close((result.a, result.b), (curve(x), curve(y)))
    assert any("x is a Pair" in each for each in messages)
    torch.testing.assert_close(jitted(x), curve(x))


def test_a_pair_of_tensors_is_differentiated() -> None:
    found = []
    for run in (forge.jit(layer), layer):
        x = Pair(torch.ones(4, 4), torch.arange(16.0).view(4, 4)).requires_grad_()
        w = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
        run(x, w).sum().backward()
        found.append([x.grad.a, x.grad.b, w.grad.a, w.grad.b])
    torch.testing.assert_close(*found)


def test_a_linear_layers_weight_alone_is_a_pair_of_tensors() -> None:
    """The layer's result is a view of memory without a data pointer."""
    found, x = [], torch.linspace(-1, 1, 3)
    for jit in (forge.jit, lambda module: module):
        module = nn.Linear(3, 3)
        weight = torch.arange(9.0).view(3, 3)
        module.weight, module.bias = nn.Parameter(Pair(weight, weight + 1)), nn.Parameter(torch.ones(3))
        result = jit(module)(x)
        result.sum().backward()
        found.append([result.a, result.b, module.weight.grad.a, module.weight.grad.b])
    torch.testing.assert_close(*found)


def test_a_parameter_is_a_pair_of_tensors() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    weight = module[0].weight.detach()
    module[0].weight = nn.Parameter(Pair(weight, weight + 1))
    x = torch.randn(2, 4)
    result, expected = forge.jit(module)(x), module(x)
    torch.testing.assert_close((result.a, result.b), (expected.a, expected.b))
    result.sum().backward()
    assert isinstance(module[0].weight.grad, Pair)


@pytest.mark.parametrize("create_graph", [False, True])
def test_the_gradient_of_a_result_is_a_pair_of_tensors(create_graph: bool) -> None:
    found = []
    for run in (forge.jit(curve), curve):
        x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
        total = (run(x) * Pair(torch.ones(4, 4), torch.full((4, 4), 2.0))).sum()
        (gradient,) = torch.autograd.grad(total, x, create_graph=create_graph)
        found.append((gradient.a, gradient.b))
    torch.testing.assert_close(*found)


def test_forge_grad_of_a_pair_of_tensors() -> None:
    x, y = torch.randn(4), torch.randn(4)
    gradient = forge.grad(lambda x: curve(x).sum())(Pair(x, y))
    torch.testing.assert_close(gradient.b, forge.grad(lambda x: curve(x).sum())(y))


def test_a_functional_tensor_is_given() -> None:
    x = torch.randn(4, 4)
    result = forge.jit(curve)(torch._to_functional_tensor(x))
    torch.testing.assert_close(torch._from_functional_tensor(result), curve(x))


@pytest.mark.parametrize("inside", [False, True])
def test_fake_tensors_give_fake_tensors(inside: bool) -> None:
    jitted, mode = forge.jit(curve), FakeTensorMode()
    jitted(torch.randn(4, 4))
    given = mode.from_tensor(torch.randn(4, 4))
    if not inside:
        result = jitted(given)
    else:
        with mode:
            result, messages = told(lambda: jitted(given))
        assert any("FakeTensorMode is active" in each for each in messages)
    assert isinstance(result, FakeTensor) and result.shape == (4, 4)


class Logging(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.calls.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_operators_of_a_call() -> None:
    jitted, x = forge.jit(layer), torch.randn(4, 4, requires_grad=True)
    jitted(x, x)
    seen = []
    for run in (jitted, layer):
        with Logging() as log, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.autograd.grad(run(x, x).sum(), x)
        seen.append(log.calls)
    assert seen[0] == seen[1]


def test_a_dispatch_mode_is_told_once_and_refused_under_strict() -> None:
    jitted, x = forge.jit(curve), torch.randn(4)
    with Logging():
        assert len(told(lambda: jitted(x))[1]) == 1
        assert told(lambda: jitted(x))[1] == []
        with pytest.raises(forge.StrictError, match="the dispatch mode Logging is active"):
            forge.jit(curve, strict=True)(x)
    assert told(lambda: jitted(x))[1] == []


def test_make_fx_is_not_told() -> None:
    jitted, x = forge.jit(curve), torch.randn(4)
    traced, messages = told(lambda: make_fx(jitted, tracing_mode="fake")(x))
    assert "sigmoid" in traced.code and not messages
