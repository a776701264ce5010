"""Convolutions are computed on images whose channels lie beside each other, and nobody sees it from outside."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.compiler.layout import Layouts
from forge.executors import claim, resolve_executors
from forge.ir import Trace
from forge.ir.proxies import Dim
from forge.transforms import channels_last


def strides_in_torch(trace: Trace) -> dict[str, tuple[Dim, ...]]:
    return Layouts.of(claim(trace, resolve_executors(["torch"]))[0]).strides()


AS_ON_A_GPU = partial(channels_last, strides=strides_in_torch, device="cpu")


class Net(nn.Module):
    """A stem, a residual block with norms, a pooling and a head."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.block = nn.Conv2d(32, 32, 3, padding=1)
        self.down = nn.Conv2d(32, 64, 1, stride=2, bias=False)
        self.head = nn.Linear(64, 5)
        self.to(dtype)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        h = F.max_pool2d(F.relu(self.norm(self.stem(x))), 2)
        return self.down(F.gelu(h + self.block(h)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.adaptive_avg_pool2d(self.features(x), (1, 1)).flatten(1))


def image(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (2, 3, 8, 8), dtype=torch.bfloat16)


def laid_out(jitted: Callable) -> bool:
    return any(trace.stage == "channels_last" for trace in forge.last_traces(jitted))


def convolution(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, weight, padding=1)


def test_convolutions_of_each_channel_alone_are_converted() -> None:
    """MobileNet's: cuDNN has kernels for them in this layout alone."""
    torch.manual_seed(0)
    wide = (
        nn.Conv2d(32, 64, 1),
        nn.ReLU6(),
        nn.Conv2d(64, 64, 3, padding=1, groups=64),
        nn.ReLU6(),
        nn.Conv2d(64, 32, 1),
    )
    model, x = nn.Sequential(*wide).bfloat16(), image(2, 32, 8, 8)
    jitted = forge.jit(model, executors=["torch"], transforms=[AS_ON_A_GPU])
    torch.testing.assert_close(jitted(x), model(x), rtol=0.05, atol=0.05)
    assert laid_out(jitted) and jitted(x).stride() == model(x).stride()


@pytest.mark.parametrize("executors", [["torch"], ["inductor", "torch"]])
def test_a_model_trains_as_in_eager(executors: list[str]) -> None:
    model, x = Net(), image()
    ours = copy.deepcopy(model)
    jitted = forge.jit(ours, executors=executors, transforms=[AS_ON_A_GPU])
    for module, call in ((model, model), (ours, jitted)):
        module.train()
        torch.manual_seed(0)
        call(x).square().sum().backward()
    assert laid_out(jitted)
    for (name, one), other in zip(model.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=0.05, atol=0.05)
        assert other.grad.is_contiguous(), name
    for one, other in zip(model.buffers(), ours.buffers(), strict=True):
        torch.testing.assert_close(other, one)


def test_what_convolutions_read_and_give_has_its_channels_beside_each_other() -> None:
    jitted = forge.jit(Net().eval(), executors=["torch"], transforms=[AS_ON_A_GPU])
    with torch.no_grad():
        jitted(image())
    layouts = strides_in_torch(forge.last_traces(jitted)[-2])
    calls = [bound for bound in forge.last_traces(jitted)[-2].bound_symbols if "conv2d" in bound.symbol.id]
    assert len(calls) == 3
    for call in calls:
        assert all(layouts[proxy.name][1] == 1 for proxy in (*call.args[:2], call.output) if proxy.ndim == 4)


@pytest.mark.parametrize(
    "function",
    [
        convolution,
        lambda x, weight: convolution(x, weight).relu(),
        lambda x, weight: convolution(x, weight).mean(0),
        lambda x, weight: convolution(x, weight).flatten(2),
        lambda x, weight: convolution(x, weight).permute(0, 2, 3, 1),
        lambda x, weight: (convolution(x, weight), convolution(x, weight).sum((2, 3))),
    ],
    ids=["convolution", "relu", "mean", "flatten", "permute", "two"],
)
def test_what_the_caller_sees_has_the_strides_of_eager(function: Callable) -> None:
    x, weight = image(2, 32, 6, 6), image(48, 32, 3, 3)
    jitted = forge.jit(function, executors=["torch"], transforms=[AS_ON_A_GPU])
    actual, expected = jitted(x, weight), function(x, weight)
    torch.testing.assert_close(actual, expected, check_stride=True)
    assert laid_out(jitted)
    names = [name for bound in forge.last_traces(jitted)[-2].bound_symbols for name in bound.outputs]
    assert len(names) == len(set(names))  # those of the calls that make views for the caller are their own


def dropped(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return convolution(F.dropout(convolution(x, weight).relu()), weight.transpose(0, 1)).square()


def noisy(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = convolution(x, weight)
    with torch.no_grad():
        noise = torch.rand_like(y)
    return y, y.cos() * noise, torch.randn_like(y)


@pytest.mark.parametrize("function", [dropped, noisy])
@pytest.mark.parametrize("grad", [False, True])
def test_random_numbers_are_those_of_eager(function: Callable, *, grad: bool) -> None:
    """They are drawn in the order of memory."""
    x, weight = image(2, 32, 6, 6), image(48, 32, 3, 3).requires_grad_(grad)
    jitted = forge.jit(function, executors=["torch"], transforms=[AS_ON_A_GPU])
    found = []
    for each in (jitted, function):
        torch.manual_seed(0)
        results = each(x, weight)
        results = results if isinstance(results, tuple) else (results,)
        flowing = [result.float().square().sum() for result in results if result.requires_grad]
        found.append([*results, *(torch.autograd.grad(sum(flowing), [weight]) if grad else ())])
    assert laid_out(jitted)
    drawn = [each[: len(results)] for each in found]
    torch.testing.assert_close(*drawn, rtol=0.05, atol=0.5)
    assert all(torch.equal(ours == 0, theirs == 0) for ours, theirs in zip(*drawn, strict=True))
    for ours, theirs in zip(*(each[len(results) :] for each in found), strict=True):
        # where torch has no kernel for bfloat16 (AVX2), it sums a convolution's products in the layout's order
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.01 * theirs.abs().max().item())


def grouped(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, weight[:, :16], groups=2)


def unfolded(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return convolution(x, weight).permute(0, 2, 3, 1).relu()


def strided(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.as_strided(convolution(x, weight), (4,), (2,)).sum()


@pytest.mark.parametrize(
    ("function", "dtype", "channels"),
    [
        (grouped, torch.bfloat16, 32),
        (convolution, torch.float32, 32),
        (convolution, torch.bfloat16, 3),
        (unfolded, torch.bfloat16, 32),
        (strided, torch.bfloat16, 32),
    ],
    ids=["groups", "single precision", "few channels", "strides that eager gives otherwise", "strides that are asked"],
)
def test_what_does_not_pay_or_would_be_seen_stays(function: Callable, dtype: torch.dtype, channels: int) -> None:
    x, weight = image(2, channels, 6, 6).to(dtype), image(48, channels, 3, 3).to(dtype)
    jitted = forge.jit(function, executors=["torch"], transforms=[AS_ON_A_GPU])
    torch.testing.assert_close(jitted(x, weight), function(x, weight), check_stride=True)
    assert not laid_out(jitted)


def test_a_convolution_that_somebody_else_runs_stays() -> None:
    trace = forge.trace(convolution, image(2, 32, 6, 6), image(48, 32, 3, 3))
    assert AS_ON_A_GPU(trace, in_torch=lambda bound: False) is trace
    assert isinstance(AS_ON_A_GPU(trace), Trace) and AS_ON_A_GPU(trace) is not trace
    assert channels_last(trace, strides=strides_in_torch) is trace  # its tensors are not on a GPU
