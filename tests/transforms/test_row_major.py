"""Hidden states that start as a transposed image are laid out in rows, which is not observable from outside."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge import torchlang
from forge.transforms import row_major
from tests.transforms.test_channels_last import strides_in_torch

AS_ON_A_GPU = partial(row_major, strides=strides_in_torch, device="cpu")


class Encoder(nn.Module):
    """A patch embedding, positions, and blocks of norms and linear layers on a residual stream."""

    def __init__(self, dims: int = 2) -> None:
        super().__init__()
        self.patches = (nn.Conv1d, nn.Conv2d)[dims - 1](3, 8, 2, stride=2)
        self.positions = nn.Parameter(torch.randn(1, 16, 8))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.patches(x)).flatten(2).transpose(1, 2) + self.positions
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + linear(norm(x))
        return self.norms[0](x)


def image(dims: int = 2) -> torch.Tensor:
    return torch.randn(2, 3, 32) if dims == 1 else torch.randn(2, 3, 8, 8)


def laid_out(jitted: Callable) -> bool:
    return any(trace.stage == "row_major" for trace in forge.last_traces(jitted))


def layouts(jitted: Callable) -> int:
    """Return the number of values that the pass laid out."""
    (stage,) = [trace for trace in forge.last_traces(jitted) if trace.stage == "row_major"]
    return sum(bound.symbol is torchlang.contiguous for bound in stage.bound_symbols)


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("executors", [["torch"], ["inductor", "torch"]])
def test_a_model_trains_as_in_eager(dims: int, executors: list[str]) -> None:
    ours = Encoder(dims)
    theirs, x = copy.deepcopy(ours), image(dims)
    jitted = forge.jit(ours, executors=executors, transforms=[AS_ON_A_GPU])
    actual, expected = jitted(x), theirs(x)
    torch.testing.assert_close(actual, expected, check_stride=True)
    assert laid_out(jitted) and layouts(jitted) == 1  # where the stream starts
    for result in (actual, expected):
        result.square().sum().backward()
    gradients = [[each.grad for each in module.parameters()] for module in (ours, theirs)]
    torch.testing.assert_close(*gradients, check_stride=True)


def test_norms_read_rows() -> None:
    module, x = Encoder(), image()
    trace = forge.trace(module, x)
    before, after = (strides_in_torch(each) for each in (trace, AS_ON_A_GPU(trace)))
    streams = [bound.output.name for bound in trace.bound_symbols if bound.output.shape == (2, 16, 8)]
    assert (128, 1, 16) in [before[name] for name in streams]
    normed = [bound.args[0].name for bound in AS_ON_A_GPU(trace).bound_symbols if bound.symbol is torchlang.layer_norm]
    assert {after[name] for name in normed} == {(128, 8, 1)}


def stream_to(end: Callable) -> Callable:
    """Return a program that ends a short stream, which starts as a transposed image."""
    module = Encoder()

    def program(x: torch.Tensor) -> torch.Tensor:
        h = module.patches(x).flatten(2).transpose(1, 2) * 2
        return end(h + module.linears[0](h))

    return program


@pytest.mark.parametrize(
    "end",
    [
        lambda h: h.transpose(1, 2).contiguous() * 2,
        lambda h: (h.sum(1), h.transpose(1, 2) @ h),
        lambda h: h.mean(-1),
        lambda h: h @ h.mT,
    ],
    ids=["transposed back", "two", "mean", "product"],
)
def test_results_have_the_strides_of_eager(end: Callable) -> None:
    program, x = stream_to(end), image()
    jitted = forge.jit(program, executors=["torch"], transforms=[AS_ON_A_GPU])
    torch.testing.assert_close(jitted(x), program(x), check_stride=True)
    assert laid_out(jitted)


@pytest.mark.parametrize(
    "end",
    [
        lambda h: h,
        lambda h: h[:, 1:],
        lambda h: h.transpose(1, 2),
        lambda h: torch.as_strided(h, (4,), (2,)).sum(),
        lambda h: F.dropout(h, 0.5).sum(1),
    ],
    ids=["returned", "a part is returned", "transposed back", "strides that are asked", "numbers are drawn"],
)
def test_a_stream_whose_strides_are_seen_stays(end: Callable) -> None:
    program, x = stream_to(end), image()
    jitted = forge.jit(program, executors=["torch"], transforms=[AS_ON_A_GPU])
    with torch.random.fork_rng():
        actual = jitted(x)
    torch.testing.assert_close(actual, program(x), check_stride=True)
    assert not laid_out(jitted)


def test_a_stream_that_a_draw_begins_stays() -> None:
    """Numbers are drawn in memory order."""
    linear, x = nn.Linear(8, 8), torch.randn(2, 8, 16)
    weight = torch.randn(8, 8, 1)
    program = lambda x: linear(F.dropout(F.conv1d(x, weight).transpose(1, 2))).sum(1)
    jitted = forge.jit(program, executors=["torch"], transforms=[AS_ON_A_GPU])
    with torch.random.fork_rng():
        actual = jitted(x)
    torch.testing.assert_close(actual, program(x))


def test_a_program_without_a_transposed_stream_stays() -> None:
    module = nn.Sequential(nn.Conv1d(3, 4, 2), nn.Flatten(), nn.Linear(124, 3))
    jitted = forge.jit(module, executors=["torch"], transforms=[AS_ON_A_GPU])
    jitted(image(1))
    assert not laid_out(jitted)
