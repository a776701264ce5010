"""Quantized layers of one input, joined for an executor that takes several."""

from typing import Any

import pytest
import torch
from torch import nn

import forge
from forge import torchlang
from forge.executors.executor import OperatorExecutor
from forge.executors.registry import resolve_executors
from forge.quantize import Int4WeightOnly, Int8WeightOnly
from forge.torchlang.nn.quantized import OPERATORS

SYMBOLS = {"linear_int8": torchlang.linear_int8, "linear_int4": torchlang.linear_int4}


def several(
    input: torch.Tensor, weights: tuple, scales: tuple, zero_points: tuple, biases: tuple
) -> tuple[torch.Tensor, ...]:
    return tuple(
        OPERATORS["linear_int8"](input, weight, scale, bias)
        if weight.dtype == torch.int8
        else OPERATORS["linear_int4"](input, weight, scale, zero_point, bias)
        for weight, scale, zero_point, bias in zip(weights, scales, zero_points, biases, strict=True)
    )


several_at_once = OperatorExecutor("several-of-test")
for name, symbol in SYMBOLS.items():
    several_at_once.register_implementation(symbol, OPERATORS[name])
several_at_once.register_implementation(torchlang.quantized_linears, several, grad="none")
alone = OperatorExecutor("alone-of-test")
for name, symbol in SYMBOLS.items():
    alone.register_implementation(symbol, OPERATORS[name])


class Attention(nn.Module):
    """A module of queries, keys and values, one of which has a bias; gates; a layer of their sum."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.first = nn.ModuleList([nn.Linear(64, 32 * (i + 1), bias=i == 1) for i in range(layers)])
        self.last = nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        return self.last(sum(layer(x)[..., :32] for layer in self.first).relu())


def _names(jitted: Any) -> list[str]:
    calls = forge.last_traces(jitted)[-1].bound_symbols
    return [bound.symbol.name for bound in calls if "linear" in bound.symbol.name]


def _run(model: nn.Module, first: OperatorExecutor, transform: Any) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    x = torch.randn(1, 64)
    jitted = forge.jit(
        model, executors=[first, *resolve_executors(["inductor", "torch"])], transforms=[transform], cache=False
    )
    plain = forge.jit(model, executors=["torch"], transforms=[transform], cache=False)
    with torch.no_grad():
        return _names_after(jitted, x), jitted(x), plain(x)


def _names_after(jitted: Any, x: torch.Tensor) -> list[str]:
    jitted(x)
    return _names(jitted)


@pytest.mark.usefixtures("compiled_regions")
@pytest.mark.parametrize("transform", [Int8WeightOnly(), Int4WeightOnly(32), Int4WeightOnly(32, symmetric=True)])
def test_layers_of_one_input_are_one_call(transform: Any) -> None:
    kind = "linear_int8" if isinstance(transform, Int8WeightOnly) else "linear_int4"
    names, actual, expected = _run(Attention(), several_at_once, transform)
    assert names == ["quantized_linears", kind]
    torch.testing.assert_close(actual, expected)


@pytest.mark.usefixtures("compiled_regions")
def test_a_call_has_three_layers() -> None:
    names, actual, expected = _run(Attention(5), several_at_once, Int8WeightOnly())
    assert names == ["quantized_linears"] * 2 + ["linear_int8"]
    torch.testing.assert_close(actual, expected)


@pytest.mark.usefixtures("compiled_regions")
def test_layers_that_another_executor_takes_stay_alone() -> None:
    x = torch.randn(1, 64)
    executors = [alone, several_at_once, *resolve_executors(["inductor", "torch"])]
    jitted = forge.jit(Attention(), executors=executors, transforms=[Int8WeightOnly()], cache=False)
    with torch.no_grad():
        assert _names_after(jitted, x) == ["linear_int8"] * 4


@pytest.mark.usefixtures("compiled_regions")
def test_gradients_flow_through_each_layer() -> None:
    jitted = forge.jit(
        Attention(), executors=[several_at_once, *resolve_executors(["inductor", "torch"])],
        transforms=[Int8WeightOnly()], cache=False,
    )  # fmt: skip
    jitted(torch.randn(1, 64, requires_grad=True)).sum().backward()
    assert _names(jitted) == ["linear_int8"] * 4
