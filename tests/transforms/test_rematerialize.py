import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.compiler.config import Config
from forge.executors.torchex.norm import native_batch_norm, native_group_norm
from forge.ir import BoundSymbol, Trace
from forge.ir.pytree import tensors
from forge.ir.symbol import Tag

LAYERS = 4


class Layer(nn.Module):
    """A layer whose result is normalized before it is added, as in Gemma2."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.before, self.after = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.after(self.linear(self.before(x)))


def _regions(trace: Trace) -> list[BoundSymbol]:
    return [bound for bound in trace.bound_symbols if bound.symbol.name.startswith("fusion")]


def _backward(memory: str) -> Trace:
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    jitted = forge.jit(model, memory=memory)
    jitted(torch.randn(8, 64, requires_grad=True)).sum().backward()
    return forge.last_backward_traces(jitted)[-1]


def test_hidden_states_are_saved_rather_than_computed_again_through_all_layers() -> None:
    again = [
        sum(Tag.RECOMPUTE in call.tags for call in region.subsymbols) for region in _regions(_backward("balanced"))
    ]
    assert len(again) >= LAYERS
    assert max(again) <= 2 * sum(again) / LAYERS  # none computes calls of another layer


def test_the_fewest_bytes_are_saved_by_a_chain_through_all_layers() -> None:
    def saved(memory: str) -> int:
        return sum(proxy.numel() * proxy.element_size() for proxy in _backward(memory).inputs)

    assert saved("smallest") < saved("balanced") <= saved("speed")


class Normalized(nn.Module):
    """A network of convolutions, each with a batch norm and a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(LAYERS)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize("memory", ["balanced", "smallest"])
def test_a_fused_batch_norm_is_computed_again_from_its_statistics(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where it is fused, only the convolution's result of each layer is saved."""
    fused = Config.is_fused
    monkeypatch.setattr(
        Config, "is_fused", lambda config, bound: bound.symbol is native_batch_norm or fused(config, bound)
    )
    torch.manual_seed(0)
    model, x = Normalized().double(), torch.randn(2, 4, 12, 12, dtype=torch.float64)
    jitted = forge.jit(model, memory=memory)
    jitted(x).backward()
    found = [parameter.grad for parameter in model.parameters()]
    statistics = [buffer.clone() for buffer in model.buffers()]
    _, saved, _ = forge.last_traces(jitted)[-1].output
    images = {proxy.name for proxy in saved if proxy.ndim == 4 and proxy.shape[2] > 3}
    assert len(images) <= LAYERS + 1  # and the input

    torch.manual_seed(0)
    eager = Normalized().double()
    eager(x).backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in eager.parameters()])
    torch.testing.assert_close(statistics, list(eager.buffers()))


@pytest.mark.parametrize("affine", [True, False])
def test_a_group_norm_is_computed_again_from_its_statistics(affine: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4, affine=affine), nn.SiLU()) for _ in range(LAYERS)]
    model, x = nn.Sequential(*layers), torch.randn(3, 4, 12, 12)
    eager, jitted = copy.deepcopy(model), forge.jit(model)
    for call in (jitted, eager):
        call(x).square().mean().backward()
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    _, saved, _ = forge.last_traces(jitted)[-1].output
    assert sum(tuple(proxy.shape) == (3, 2) for proxy in saved) == 2 * LAYERS  # means and deviations
    inside = [
        call.symbol for bound in forge.last_backward_traces(jitted)[-1].bound_symbols for call in bound.subsymbols
    ]
    assert native_group_norm not in inside


def test_a_batch_norm_that_is_not_fused_stays_whole() -> None:
    jitted = forge.jit(Normalized(), executors=["torch"])
    jitted(torch.randn(2, 4, 12, 12)).backward()
    assert "batch_norm_normalize" not in str(
        [bound.symbol.name for bound in forge.last_traces(jitted)[-1].bound_symbols]
    )


def test_a_call_is_computed_again_for_all_of_its_results_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch norm's new running statistics are not read again, so it is not recomputed; the call after it saves its
    result, which is kept anyway."""
    fused = Config.can_recompute
    monkeypatch.setattr(
        Config, "can_recompute", lambda config, bound: bound.symbol is native_batch_norm or fused(config, bound)
    )
    jitted = forge.jit(Normalized())
    jitted(torch.randn(2, 4, 12, 12)).backward()
    trace = forge.last_traces(jitted)[-1]
    _, saved, _ = trace.output
    norms = [bound for bound in trace.bound_symbols if bound.symbol is native_batch_norm]
    normalized = {bound.output[0].name for bound in norms}
    assert norms
    assert normalized.isdisjoint(proxy.name for proxy in saved)


def test_what_a_saved_reduction_reads_is_saved_as_it_was() -> None:
    """On a CPU, sums of rows are saved. Hidden states in bfloat16, which the sums read in float32, are saved in
    bfloat16."""

    def layers(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            wide = x.float()
            normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
            x = x + F.linear(normed, weight)
        return x

    jitted = forge.jit(layers)
    x, weights = (torch.randn(size, dtype=torch.bfloat16, requires_grad=True) for size in ((64, 96), (LAYERS, 96, 96)))
    jitted(x, weights).sum().backward()
    _, saved, _ = forge.last_traces(jitted)[-1].output
    wide = [tuple(proxy.shape) for proxy in tensors(saved) if proxy.dtype == torch.float32]
    assert wide and set(wide) == {(64, 1)}
