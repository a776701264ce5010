"""Broadcast tensors that are added to products and convolutions are added in the following region, and no others
are."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import forge
from forge import transforms
from forge.compiler.claim import is_fused
from forge.compiler.config import Config
from forge.compiler.context import Context, Form, Kind
from forge.compiler.pipeline import PIPELINE, context_of
from forge.compiler.program import Program
from forge.compiler.report import CompileReport
from forge.executors import resolve_executors
from forge.ir import Trace
from forge.transforms import unfuse_addends
from tests.transforms.test_channels_last import strides_in_torch

FUSED = partial(is_fused, executors=resolve_executors(["inductor", "torch"]))
AS_ON_A_GPU = partial(unfuse_addends, is_fused=FUSED, strides=strides_in_torch, device="cpu")
PRODUCTS = ("addmm", "baddbmm", "addbmm")


def factors(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return matrices, or batches of them, whose product has 256 rows and columns."""
    batch = () if name == "addmm" else (3,)
    return torch.randn(*batch, 256, 4), torch.randn(*batch, 4, 256)


def attention(name: str, **numbers: float) -> Callable:
    def program(input: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return getattr(torch, name)(input, a, b, **numbers).softmax(-1).square()

    return program


def calls(trace: Trace) -> list[str]:
    return [bound.symbol.name for bound in trace.bound_symbols]


def unfused(jitted: Callable) -> list[list[str]]:
    return [calls(trace) for trace in forge.last_traces(jitted) if trace.stage == "unfuse_addends"]


@pytest.mark.parametrize(
    "numbers",
    [
        {},
        pytest.param({"alpha": 0.5}, marks=pytest.mark.slow),
        pytest.param({"beta": 0.25}, marks=pytest.mark.slow),
        {"beta": 2, "alpha": -1.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("executors", [["torch"], ["inductor", "torch"]])
@pytest.mark.one_in(4)
def test_gradients_are_those_of_eager(name: str, numbers: dict[str, float], executors: list[str]) -> None:
    program, given = attention(name, **numbers), (torch.randn(1, 256), *factors(name))
    for each in given:
        each.requires_grad_()
    jitted = forge.jit(program, executors=executors, transforms=[AS_ON_A_GPU])
    actual, expected = jitted(*given), program(*given)
    torch.testing.assert_close(actual, expected, check_stride=True)
    gradients = [torch.autograd.grad(each.sum(), given) for each in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5, check_stride=True)
    (names,) = unfused(jitted)
    assert ("addbmm" if name == "addbmm" else "mm" if name == "addmm" else "bmm") in names
    assert "add" in names and not {"addmm", "baddbmm"} & {*names}


@pytest.mark.parametrize(
    "input",
    [
        lambda: torch.randn(3, 1, 256),
        lambda: torch.randn(256, 1),
        lambda: torch.randn(()),
        lambda: torch.randn(3, 1, 256).expand(3, 256, 256),
        lambda: torch.randn(256).expand(256, 256),
    ],
    ids=["keys", "queries", "a number", "expanded", "an expanded row"],
)
@pytest.mark.one_in(3)
def test_inputs_of_all_kinds_are_added_in_a_region(input: Callable) -> None:
    def program(input: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.baddbmm(input, a, b).view(3, 4, 64, 256).softmax(-1)  # a view is between

    given = (input(), *factors("baddbmm"))
    jitted = forge.jit(program, executors=["inductor", "torch"], transforms=[AS_ON_A_GPU])
    torch.testing.assert_close(jitted(*given), program(*given), check_stride=True)
    assert len(unfused(jitted)) == 1
    assert [name for name in calls(forge.last_traces(jitted)[-1]) if name not in ("view", "del")][:2] == [
        "bmm",
        "fusion0",
    ]


@pytest.mark.parametrize(
    "program",
    [
        lambda a, b: torch.addmm(a[0, 0].new_zeros(256), a[0], b[0]).softmax(-1),
        lambda a, b: torch.baddbmm(a.new_zeros(3, 256, 256), a, b).softmax(-1),
        lambda a, b: torch.baddbmm(a.new_zeros(3, 1, 256), a, b, beta=0).softmax(-1),
        lambda a, b: torch.baddbmm(a.new_zeros(3, 1, 32), a, b[..., :32]).softmax(-1),
        lambda a, b: torch.baddbmm(a.new_zeros(3, 1, 256), a, b) @ b.mT,
        lambda a, b: torch.baddbmm(a.new_zeros(3, 1, 256), a, b).mT,
        lambda a, b: torch.baddbmm(a.double().new_zeros(3, 1, 256), a.double(), b.double()).softmax(-1),
    ],
    ids=["a row", "all elements", "hidden", "small", "a product follows", "nothing follows", "float64"],
)
def test_other_sums_stay(program: Callable) -> None:
    trace = forge.trace(program, *factors("baddbmm"))
    assert AS_ON_A_GPU(trace) is trace


def test_products_that_float16_cannot_hold_are_not_computed_alone() -> None:
    given = torch.randn(256).half(), torch.full((3, 256, 4), 200.0).half(), torch.full((3, 4, 256), 100.0).half()
    jitted = forge.jit(attention("baddbmm", alpha=0.125), transforms=[AS_ON_A_GPU], cache=False)
    assert jitted(*given).isfinite().all()
    assert AS_ON_A_GPU(forge.trace(attention("baddbmm", alpha=2), *given)).stage == "unfuse_addends"


def test_a_sum_that_somebody_else_runs_stays() -> None:
    trace = forge.trace(attention("baddbmm"), torch.randn(256), *factors("baddbmm"))
    assert AS_ON_A_GPU(trace) is not trace
    assert AS_ON_A_GPU(trace, in_torch=lambda bound: False) is trace
    assert unfuse_addends(trace, FUSED, strides=strides_in_torch) is trace  # its tensors are not on a GPU


@pytest.mark.parametrize(
    ("executors", "numerics", "runs"),
    [(["inductor", "torch"], "fast", True), (["torch"], "fast", False), (["inductor", "torch"], "eager", False)],
)
def test_programs_that_round_as_eager_keep_their_sums(executors: list[str], numerics: str, runs: bool) -> None:
    (row,) = [each for each in PIPELINE if each.run.__name__ == "unfuse_addends"]
    trace = forge.trace(attention("baddbmm"), torch.randn(256), *factors("baddbmm"))
    config = Config(executors=tuple(resolve_executors(executors)), numerics=numerics)
    context: Context = context_of(Kind.PROGRAM, config, Program(trace, None, [], grad=False), CompileReport())
    assert row.takes is Form.TORCH
    assert row.when(trace, context) is runs


LAYERS = (
    (nn.Conv1d(4, 64, 3, padding="same"), (2, 4, 600)),
    (nn.Conv2d(4, 16, 3, padding=1, groups=2), (2, 4, 64, 64)),
    (nn.Conv2d(4, 16, 3), (4, 80, 80)),  # without a batch
    (nn.Conv3d(2, 8, 3, stride=2), (2, 2, 40, 40, 40)),
    (nn.ConvTranspose1d(4, 64, 2, stride=2), (2, 4, 600)),
    (nn.ConvTranspose2d(4, 8, 2, stride=2, groups=2, output_padding=1), (2, 4, 64, 64)),
    (nn.ConvTranspose3d(2, 8, 2, stride=2), (2, 2, 16, 16, 16)),
)


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("executors", [["torch"], ["inductor", "torch"]])
@pytest.mark.one_in(8)
def test_a_bias_of_a_convolution_is_added_in_the_region_that_follows(
    layer: nn.Module, shape: tuple[int, ...], executors: list[str]
) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return layer(x).relu().square()

    x = torch.randn(shape, requires_grad=True)
    jitted = forge.jit(program, executors=executors, transforms=[AS_ON_A_GPU])
    actual, expected = jitted(x), program(x)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, check_stride=True)
    given = [x, *layer.parameters()]
    gradients = [torch.autograd.grad(each.mean(), given) for each in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-6, check_stride=True)
    (names,) = unfused(jitted)
    assert "add" in names
    if executors != ["torch"]:
        forward = calls(forge.last_traces(jitted)[-1])
        (convolution,) = [place for place, name in enumerate(forward) if name.startswith("conv")]
        assert sum(name.startswith("fusion") for name in forward[convolution:]) == 1  # one before may lay the image out
        (backward,) = [
            bound
            for bound in forge.last_backward_traces(jitted)[-1].bound_symbols
            if bound.symbol.name == "convolution_backward"
        ]
        assert backward.args[-1] == (True, True, False)  # the gradient of the bias is a sum in a region


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=["rows", "channels last"])
def test_a_norm_after_a_convolution_is_in_the_region_of_its_bias(format: torch.memory_format) -> None:
    class Block(nn.Module):
        """The beginning of a block of ConvNeXt."""

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(32, 32, 7, padding=3, groups=32), nn.LayerNorm(32)
            self.out = nn.Linear(32, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.norm(self.conv(x).permute(0, 2, 3, 1))).square().sin()

    block, x = Block(), torch.randn(2, 32, 40, 40).to(memory_format=format)
    jitted = forge.jit(block, executors=["inductor", "torch"], transforms=[AS_ON_A_GPU])
    actual, expected = jitted(x), block(x)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    actual.square().mean().backward()
    gradients = [weight.grad for weight in block.parameters()]
    wanted = torch.autograd.grad(expected.square().mean(), list(block.parameters()))
    torch.testing.assert_close(gradients, list(wanted), rtol=1e-3, atol=1e-6)
    names = [*calls(forge.last_traces(jitted)[-1]), *calls(forge.last_backward_traces(jitted)[-1])]
    assert not [name for name in names if "norm" in name]


def test_the_bias_of_a_folded_norm_is_added_with_relu(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_cpu = partial(unfuse_addends, device="cpu")
    monkeypatch.setattr(transforms, "unfuse_addends", on_a_cpu)
    block = nn.Sequential(nn.Conv2d(4, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 1))
    block.eval()[1].running_mean.uniform_()
    jitted, x = forge.jit(block, executors=["inductor", "torch"], freeze=True, cache=False), torch.randn(2, 4, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(jitted(x), block(x), rtol=1e-4, atol=1e-5)
    assert len(unfused(jitted)) == 1
    (region,) = [each for each in forge.last_traces(jitted)[-1].bound_symbols if each.symbol.name == "fusion0"]
    assert [call.symbol.name for call in region.subsymbols] == ["add", "relu"]


@pytest.mark.parametrize(
    "program",
    [
        lambda x, w, b: torch.conv2d(torch.conv2d(x, w, b), w),
        lambda x, w, b: torch.conv2d(torch.conv2d(x, w, b).contiguous(memory_format=torch.channels_last), w),
        lambda x, w, b: torch.conv2d(x, w, b).reshape(-1, 64) @ x.new_ones(64, 2),
        lambda x, w, b: torch.conv2d(x, w).relu(),
        lambda x, w, b: torch.conv2d(x[..., :8], w, b).relu(),
        lambda x, w, b: torch.conv2d(x.double(), w.double(), b.double()).relu(),
    ],
    ids=["a convolution follows", "a layout", "a product of a view", "no bias", "small", "float64"],
)
def test_other_convolutions_stay(program: Callable) -> None:
    trace = forge.trace(program, torch.randn(2, 8, 64, 128), torch.randn(8, 8, 1, 1), torch.randn(8))
    assert AS_ON_A_GPU(trace) is trace
