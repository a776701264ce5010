"""Recorded calls depend on the devices of the arguments: functions are traced with a GPU's fake tensors."""

from collections.abc import Callable

import pytest
import torch
from torch._subclasses import FakeTensorMode

import forge
from forge.ir.pytree import tensors


def _on_a_gpu(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(shape, device="cuda", dtype=dtype)


@pytest.mark.parametrize("function", [torch.linspace, torch.logspace])
def test_bounds_may_be_on_another_device_than_the_result(function: Callable) -> None:
    bound = _on_a_gpu()
    for args in ((bound, bound, 5), (0, bound, 4), (bound, torch.ones(()), 1)):
        (result,) = tensors(forge.trace(function, *args).output)
        assert result.device.type == "cpu" and result.shape == (args[2],)


@pytest.mark.parametrize("function", [torch.native_batch_norm, torch._native_batch_norm_legit])
@pytest.mark.parametrize("training", [False, True])
def test_a_gpus_batch_norm_gives_statistics_in_evaluation_too(function: Callable, training: bool) -> None:
    x, *running = [_on_a_gpu(*shape, dtype=torch.bfloat16) for shape in ((4, 3, 5), (3,), (3,))]
    out, *statistics = tensors(forge.trace(function, x, None, None, *running, training, 0.1, 1e-5).output)[:3]
    assert out.shape == (4, 3, 5) and out.dtype == torch.bfloat16
    assert [(each.shape, each.dtype) for each in statistics] == [((3,), torch.float32)] * 2
