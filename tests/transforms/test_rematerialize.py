import torch
from torch import nn

import forge
from forge.ir import BoundSymbol, Trace
from forge.ir.symbol import Tag

LAYERS = 4


class Layer(nn.Module):
    """A layer whose result is normalized before it is added, as Gemma2's."""

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
    assert max(again) <= 2 * sum(again) / LAYERS  # none computes what is of another layer


def test_the_fewest_bytes_are_saved_by_a_chain_through_all_layers() -> None:
    def saved(memory: str) -> int:
        return sum(proxy.numel() * proxy.element_size() for proxy in _backward(memory).inputs)

    assert saved("smallest") < saved("balanced") <= saved("speed")
