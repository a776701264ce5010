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
    assert layout._takes_no_addresses(function) is runs
