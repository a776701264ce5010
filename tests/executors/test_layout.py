"""Strides of a claimed program: whose functions are run on tensors without values, and whose are not."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

import forge
from forge.executors import layout
from forge.executors.hubex import kernel_executor
from forge.executors.torchex import attention

given: list[Any] = []


def by_address(input: torch.Tensor) -> torch.Tensor:
    """As a kernel that is launched on addresses, which a tensor without values does not have."""
    given.append(input)
    out = torch.empty_like(input)
    ctypes.memmove(out.data_ptr(), input.data_ptr(), input.nbytes)
    return out.mul_(2)


def doubled(x: torch.Tensor) -> torch.Tensor:
    return F.relu6(torch.sin(x).exp() + 1) * 3 - torch.cos(x)


@pytest.mark.parametrize("training", [False, True])
def test_a_kernel_is_never_called_with_tensors_without_values(training: bool) -> None:
    given.clear()
    options = {"dtypes": [torch.float32], "grad": "composite", "device": "cpu", "layout": "contiguous"}
    by_kernel = kernel_executor([forge.kernel(F.relu6, by_address, **options)], verify=False)
    jitted = forge.jit(doubled, executors=[by_kernel, "inductor", "torch"], cache=False)
    x = torch.randn(6, 5, requires_grad=training)
    found = jitted(x.t())
    torch.testing.assert_close(found, 2 * (torch.sin(x.t()).exp() + 1) * 3 - torch.cos(x.t()))
    assert given and not any(isinstance(each, FakeTensor) for each in given)


@pytest.mark.parametrize(
    ("function", "runs"),
    [
        (torch.relu, True),
        (torch.ops.aten.relu.default, True),
        (torch.Tensor.contiguous, True),
        (functools.partial(torch.sum, dim=0), True),
        (by_address, False),
        (functools.partial(by_address), False),
        (lambda x: x, False),
        (ctypes.CDLL(None).abs, False),
    ],
)
def test_whose_functions_are(function: Callable, runs: bool) -> None:
    assert layout.is_own(function) is runs


def column_major(input: torch.Tensor) -> torch.Tensor:
    """As a kernel whose result is not contiguous."""
    return F.relu6(input).mT.contiguous().mT


def _mixed(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Calls of which the first runs by itself, on `value`, and a region reads what it gives."""
    alone = value * 2
    return ((alone @ weight) + alone).sin().exp() * alone


def test_a_call_alone_follows_the_strides_of_a_kernels_result() -> None:
    options = {"dtypes": [torch.float32], "grad": "composite", "device": "cpu", "layout": "contiguous"}
    by_kernel = kernel_executor([forge.kernel(F.relu6, column_major, **options)], verify=False)
    x, weight = torch.randn(5, 6), torch.randn(6, 6)
    jitted = forge.jit(lambda x, w: _mixed(F.relu6(x), w), executors=[by_kernel, "inductor", "torch"], cache=False)
    torch.testing.assert_close(jitted(x, weight), _mixed(F.relu6(x), weight))
    assert "alone_restrided" in str(forge.last_traces(jitted)[-1])


@pytest.mark.parametrize("turned", [False, True])
def test_a_call_alone_follows_the_strides_of_a_gradient(turned: bool) -> None:
    x, weight = torch.randn(6, 6, requires_grad=True), torch.randn(6, 6)

    def function(x: torch.Tensor) -> torch.Tensor:
        wave = x.sin().exp()
        return (wave @ weight + wave) * 2

    gradient = torch.randn(6, 6)
    gradient = gradient.t() if turned else gradient
    jitted = forge.jit(function, executors=["inductor", "torch"], cache=False)
    (found,) = torch.autograd.grad(jitted(x), x, gradient)
    (expected,) = torch.autograd.grad(function(x), x, gradient)
    torch.testing.assert_close(found, expected)


def test_a_call_alone_follows_the_strides_that_torch_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which kernel attends is known when the program runs, and its result's strides with it."""
    query, weight = torch.randn(2, 3, 4, 8), torch.randn(8, 8)
    jitted = forge.jit(
        lambda q, w: _mixed(F.scaled_dot_product_attention(q, q, q), w), executors=["inductor", "torch"], cache=False
    )
    forward, backward = attention._KERNELS["cpu", attention.SDPBackend.FLASH_ATTENTION.value]

    def transposed(call: Any, *inputs: Any) -> tuple:
        out, *rest = forward(call, *inputs)
        return (out if isinstance(out, FakeTensor) else out.mT.contiguous().mT, *rest)

    monkeypatch.setitem(attention._KERNELS, ("cpu", attention.SDPBackend.FLASH_ATTENTION.value), (transposed, backward))
    query.requires_grad_()
    torch.testing.assert_close(
        jitted(query, weight), _mixed(F.scaled_dot_product_attention(query, query, query), weight)
    )


def test_a_product_has_its_strides_whatever_it_is_given() -> None:
    """No check is made when the program runs of what cannot differ."""
    options = {"dtypes": [torch.float32], "grad": "composite", "device": "cpu", "layout": "contiguous"}
    by_kernel = kernel_executor([forge.kernel(F.relu6, column_major, **options)], verify=False)
    x, weight = torch.randn(5, 6), torch.randn(6, 6)
    function = lambda x, w: ((F.relu6(x) @ w).sin() + 1).exp()
    jitted = forge.jit(function, executors=[by_kernel, "inductor", "torch"], cache=False)
    torch.testing.assert_close(jitted(x, weight), function(x, weight))
    assert "restrided" not in str(forge.last_traces(jitted)[-1]) and "in_row_major" not in str(
        forge.last_traces(jitted)[-1]
    )
