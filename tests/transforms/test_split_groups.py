"""Convolutions whose groups cuDNN computes slowly together become one of each group."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.compiler import passes
from forge.ir import Symbol
from forge.transforms import split_groups
from forge.transforms.split_groups import is_slow_in_cudnn


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return whether gradients flow through each call that was judged; all are slow."""
    flows: list[bool] = []

    def is_slow(function: Symbol, arguments: dict[str, Any], flow: bool) -> bool:
        flows.append(flow)
        return True

    monkeypatch.setattr(passes.transforms, "split_groups", partial(split_groups, is_slow=is_slow))
    return flows


def convolutions_of(traces: list) -> int:
    return sum(bound.symbol.name.startswith("conv") for bound in traces[-1].bound_symbols)


CALLS: dict[str, tuple[Callable, tuple[int, ...], tuple[int, ...]]] = {
    "one dim": (lambda x, w, b: F.conv1d(x, w, b, padding=8, groups=4), (2, 8, 20), (8, 2, 16)),
    "two dims": (lambda x, w, b: F.conv2d(x, w, b, stride=2, dilation=(1, 2), groups=2), (2, 4, 9, 12), (6, 2, 3, 3)),
    "three dims": (lambda x, w, b: F.conv3d(x, w, b, groups=2), (2, 4, 5, 6, 4), (4, 2, 3, 2, 2)),
    "same padding": (lambda x, w, b: F.conv1d(x, w, b, padding="same", groups=4), (2, 8, 20), (8, 2, 16)),
    "without a bias": (lambda x, w, b: F.conv1d(x, w, groups=4) + b[:, None], (2, 8, 20), (8, 2, 16)),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_the_groups_give_the_same_results(name: str, requires_grad: bool, decisions: list[bool]) -> None:
    call, of_x, of_weight = CALLS[name]
    torch.manual_seed(0)
    values = [torch.randn(shape) for shape in (of_x, of_weight, of_weight[:1])]
    jitted = forge.jit(lambda x, w, b: F.gelu(call(x, w, b)))
    ours, theirs = ([x.clone().requires_grad_(requires_grad) for x in values] for _ in range(2))
    actual, expected = jitted(*ours), F.gelu(call(*theirs))
    torch.testing.assert_close(actual, expected)
    assert actual.stride() == expected.stride() and decisions == [requires_grad]
    assert convolutions_of(forge.last_traces(jitted)) > 1
    if requires_grad:
        cotangent = torch.randn_like(expected)
        gradients = (torch.autograd.grad(*each, cotangent) for each in ((actual, ours), (expected, theirs)))
        torch.testing.assert_close(*gradients)


def test_sizes_may_change(decisions: list[bool]) -> None:
    layer = nn.Conv1d(8, 8, 4, padding=2, groups=4)
    jitted = forge.jit(layer)
    for batch, length in ((2, 20), (3, 21), (4, 30), (1, 5)):
        x = torch.randn(batch, 8, length)
        torch.testing.assert_close(jitted(x), layer(x))
    assert decisions and convolutions_of(forge.last_traces(jitted)) == 4


@pytest.mark.parametrize(
    ("groups", "shape"), [(1, (2, 8, 20)), (8, (2, 8, 20)), (4, (8, 20))], ids=["one group", "depthwise", "unbatched"]
)
def test_others_stay_whole(groups: int, shape: tuple[int, ...], decisions: list[bool]) -> None:
    layer = nn.Conv1d(8, 8, 4, groups=groups)
    jitted, x = forge.jit(layer), torch.randn(shape)
    torch.testing.assert_close(jitted(x), layer(x))
    assert convolutions_of(forge.last_traces(jitted)) == 1 and not decisions


def test_eager_numerics_keep_the_groups_together(decisions: list[bool]) -> None:
    jitted = forge.jit(nn.Conv1d(8, 8, 4, groups=4), numerics="eager")
    jitted(torch.randn(2, 8, 20))
    assert not decisions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_none_is_slow_on_a_cpu(dtype: torch.dtype) -> None:
    layer = nn.Conv1d(768, 768, 128, groups=16, dtype=dtype)
    trace = forge.trace(layer, torch.randn(1, 768, 200, dtype=dtype))
    assert split_groups(trace) is trace
    calls = [call for call in trace.bound_symbols if call.symbol.name == "conv1d"]
    assert not any(is_slow_in_cudnn(each.symbol, each.symbol.bind(each.args, each.kwargs), False) for each in calls)
