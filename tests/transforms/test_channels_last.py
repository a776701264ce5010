"""Convolutions are computed on channels-last images, which is not observable from outside."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import forge
from forge.compiler.layout import Layouts
from forge.executors import claim, resolve_executors
from forge.ir import Trace
from forge.ir.proxies import Dim
from forge.transforms import channels_last


def strides_in_torch(trace: Trace) -> dict[str, tuple[Dim, ...]]:
    return Layouts.of(claim(trace, resolve_executors(["torch"]))[0]).strides()


AS_ON_A_GPU = partial(channels_last, strides=strides_in_torch, device="cuda")


class Net(nn.Module):
    """A network of a stem, a residual block with norms, a pooling and a head."""

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
    """MobileNet has them: cuDNN has kernels for them in this layout only."""
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
    assert len(names) == len(set(names))  # the calls that make views for the caller have their own names


def mobile_net(channels: int = 32) -> nn.Module:
    """Return two inverted bottlenecks of MobileNetV2."""
    wide = 2 * channels
    blocks = [
        (
            nn.Conv2d(channels, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, channels, 1),
        )
        for _ in range(2)
    ]
    return nn.Sequential(*(layer for block in blocks for layer in block))


def upscaling() -> nn.Module:
    return nn.Sequential(nn.ConvTranspose2d(8, 8, 2, stride=2), nn.GELU(), nn.Conv2d(8, 8, 3, padding=1))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")
@pytest.mark.parametrize(("make", "channels"), [(mobile_net, 32), (upscaling, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_by_default_convolutions_of_a_cpu_are_converted(make: Callable, channels: int, dtype: torch.dtype) -> None:
    """Their results, gradients and statistics are eager's, in eager's strides, at every size."""
    torch.manual_seed(0)
    model = make().to(dtype)
    ours = copy.deepcopy(model)
    jitted = forge.jit(ours)
    bound = 1e-4 if dtype is torch.float32 else 0.06
    for size in (12, 16, 9):
        results = []
        for module, call in ((model, model), (ours, jitted)):
            x = torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(size)).to(dtype)
            y = call(x.requires_grad_())
            module.zero_grad()
            y.float().square().mean().backward()
            results.append([y, x.grad, *(each.grad for each in module.parameters()), *module.buffers()])
        torch.testing.assert_close(*results, rtol=bound, atol=bound)
        ordered = [[dims_in_memory(each) for each in found] for found in results]
        assert ordered[0] == ordered[1]
    assert laid_out(jitted)


def dims_in_memory(x: torch.Tensor) -> list[tuple[int, int]]:
    """Return the strides of the dims whose strides matter, those longer than one."""
    return [(dim, stride) for dim, stride in enumerate(x.stride()) if x.shape[dim] > 1]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")
@pytest.mark.parametrize(
    "before",
    [
        lambda x: x,
        lambda x: x * 2,
        lambda x: x[:, 1:],
        lambda x: F.pad(x, (1, 1)),
        lambda x: torch.cat([x[:, :2], 2 * x[:, 2:]], 1),
        lambda x: F.interpolate(x, scale_factor=2.0),
        lambda x: F.layer_norm(x, x.shape[2:]),
        lambda x: x[0],
    ],
    ids=["itself", "product", "slice", "padding", "parts", "larger", "norm", "one image"],
)
def test_gradients_of_inputs_have_the_layout_of_eagers(before: Callable) -> None:
    """autograd.grad returns them unchanged."""

    def program(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        h = before(x)
        return F.conv2d(h, weight[:, : h.shape[-3]], padding=1).relu()

    x, weight = torch.randn(2, 4, 24, 24, requires_grad=True), torch.randn(8, 4, 3, 3, requires_grad=True)
    jitted = forge.jit(program)
    found = [torch.autograd.grad(each(x, weight).square().sum(), [x, weight]) for each in (jitted, program)]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-3, check_stride=True)
    assert laid_out(jitted) == (before(x).ndim == 4)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_results_whose_strides_are_not_known_have_eagers(kind: type[nn.RNNBase]) -> None:
    """A recurrent layer of symbolic sizes has such results, because it does not run on fake tensors."""
    convolve, recur = nn.Conv2d(3, 8, 3, padding=1), kind(8, 5, batch_first=True, bidirectional=True)

    @forge.jit(dynamic=True)
    def jitted(x: torch.Tensor) -> torch.Tensor:
        return recur(convolve(x).mean(2).transpose(1, 2))[0]

    for x in (torch.randn(2, 3, 16, 16), torch.randn(3, 3, 12, 20)):
        expected = recur(convolve(x).mean(2).transpose(1, 2))[0]
        torch.testing.assert_close(jitted(x), expected, check_stride=True)
    assert "torch." + kind.__name__.lower() in str(forge.last_traces(jitted)[-1])


class GradientStrides(TorchDispatchMode):
    """A mode that records the strides of the gradients passed to backwards of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten.convolution_backward.default:
            self.seen.append(args[0].stride())
        return func(*args, **kwargs or {})


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")
def test_gradients_of_results_of_convolutions_lie_as_their_images_do() -> None:
    """A loss over an image has gradients in another layout, with which torch's kernels would take several times as
    long."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 1))

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), target)

    x, target = torch.randn(2, 3, 64, 72), torch.randint(32, (2, 64, 72))
    jitted, found = forge.jit(loss), []
    for each in (jitted, loss):
        model.zero_grad()
        result = each(x, target)
        with GradientStrides() as strides:
            result.backward()
        found.append([weight.grad for weight in model.parameters()])
        if each is jitted:
            assert strides.seen == [(64 * 72 * 32, 1, 72 * 32, 32), (64 * 72 * 16, 1, 72 * 16, 16)]
    torch.testing.assert_close(*found, check_stride=True, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")
def test_weights_larger_than_their_images_stay_as_they_are() -> None:
    """Each call would convert them."""
    for size, is_worth_it in ((2, False), (32, True)):
        jitted = forge.jit(nn.Conv2d(32, 32, 3, padding=1))
        jitted(torch.randn(1, 32, size, size))
        assert laid_out(jitted) == is_worth_it


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
        # without a kernel for bfloat16 (AVX2), torch sums a convolution's products in the layout's order
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
    assert channels_last(trace, strides=strides_in_torch, device="mps") is trace


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (nn.GroupNorm(4, 32), False),
        (nn.InstanceNorm2d(32, affine=True), False),
        (nn.LayerNorm([32, 8, 8]), False),
        (nn.LayerNorm(8), True),
        (nn.BatchNorm2d(32), True),
    ],
    ids=str,
)
def test_norms_of_rows_keep_images_in_rows_on_a_cpu(norm: nn.Module, expected: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), norm, nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1))
    jitted, x = forge.jit(copy.deepcopy(model)), torch.randn(8, 3, 8, 8)
    torch.testing.assert_close(jitted(x), model(x))
    assert laid_out(jitted) is expected
