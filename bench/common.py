"""Helpers of the models' benchmarks: the systems they compare, and the models."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import forge
from forge.benchmark.model_bench import System, entry

# systems


def _dynamo(backend: str) -> Callable[[Callable], Callable]:
    return lambda function: torch.compile(entry(function), backend=backend)


def systems(*, inductor: bool = True) -> list[System]:
    """Return eager first, then bare Dynamo, torch.compile, Thunder (where it imports) and forge."""
    result = [System("eager", lambda function: function), System("bare Dynamo", _dynamo("eager"))]
    if inductor:
        result.append(System("torch.compile", _dynamo("inductor")))
    thunder = _thunder()
    if thunder is not None:
        result.append(System("Thunder", thunder))
    return [*result, System("forge", jit)]


_jitted: "weakref.WeakSet[Callable]" = weakref.WeakSet()


FROZEN = System("forge, frozen", lambda function: jit(function, freeze=True))


def jit(function: Callable, **options: Any) -> Callable:
    """Return forge.jit of a function, with larger regions that `finish_compiling` waits for."""
    jitted = forge.jit(function, **options)
    _jitted.add(jitted)
    return jitted


def finish_compiling() -> None:
    """Wait for forge's background compilation of jitted functions."""
    for jitted in list(_jitted):
        forge.finish_compiling(jitted)


def _thunder() -> Callable | None:
    try:
        import thunder
    except Exception as reason:  # it is not installed, or does not import with this torch
        print(f"Thunder is left out: {type(reason).__name__}: {reason}")
        return None
    return thunder.jit


# models


class MLP(nn.Module):
    """A stack of linear layers of one width with ReLU between; returns the loss if a target is given."""

    def __init__(self, layers: int = 20, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x if target is None else nn.functional.mse_loss(x, target)


def llama(layers: int) -> nn.Module:
    """Return a tiny Llama."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def token_ids(batch: int = 2, length: int = 16) -> dict[str, torch.Tensor]:
    """Return the arguments of a Llama, labels included."""
    ids = torch.randint(128, (batch, length))
    return {"input_ids": ids, "labels": ids}
