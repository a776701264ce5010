"""Later passes see the attention of torch.nn's layers."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.executors import OperatorExecutor
from forge.executors.torchex.attention import ATTENDING

WHOLE = "torch.nn.functional.multi_head_attention_forward"


class Attends(nn.Module):
    """An attention layer of torch, with `options` for its call."""

    def __init__(self, dropout: float = 0.0, **options: object) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(16, 4, dropout=dropout, batch_first=True)
        self.options = options

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(each for each in self.layer(x * 2, x, x, **self.options) if each is not None)


def results(model: Callable, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    out = model(x)
    return [*out, *torch.autograd.grad(sum(each.sin().sum() for each in out), x)]


def calls(jitted: Callable) -> set[str]:
    return {bound.symbol.id for bound in forge.last_traces(jitted)[-1].bound_symbols}


@pytest.mark.parametrize("options", [{"need_weights": True}, {"dropout": 0.2, "need_weights": False}], ids=str)
def test_a_layer_that_torch_computes_by_no_kernel_is_composed_in_regions(options: dict) -> None:
    model, x = Attends(**options), torch.randn(2, 7, 16, requires_grad=True)
    jitted = forge.jit(model)
    torch.testing.assert_close(results(jitted, x), results(model, x))
    assert calls(jitted).isdisjoint({WHOLE, *ATTENDING})


def test_a_causal_mask_of_a_layer_becomes_a_flag() -> None:
    layer, x = nn.MultiheadAttention(16, 4, batch_first=True).requires_grad_(False), torch.randn(2, 7, 16)

    def program(x: torch.Tensor) -> torch.Tensor:
        return layer(x, x, x, attn_mask=nn.Transformer.generate_square_subsequent_mask(7), need_weights=False)[0]

    jitted = forge.jit(program)
    torch.testing.assert_close(jitted(x), program(x))
    (stage,) = [each for each in forge.last_traces(jitted) if each.stage == "attention_masks"]
    (call,) = [bound for bound in stage.bound_symbols if bound.symbol.id in ATTENDING]
    given = call.symbol.bind(call.args, call.kwargs)
    assert (given["attn_mask"], given["is_causal"]) == (None, True)


def test_an_executor_that_takes_the_whole_layer_gets_it() -> None:
    seen = []
    executor = OperatorExecutor("whole")

    def whole(*args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor | None]:
        seen.append(True)
        return F.multi_head_attention_forward(*args, **kwargs)

    executor.register_implementation(F.multi_head_attention_forward, whole)
    model, x = Attends(need_weights=False).requires_grad_(False), torch.randn(2, 7, 16)
    jitted = forge.jit(model, executors=[executor, "inductor", "torch"])
    torch.testing.assert_close(jitted(x), model(x))
    assert seen
