"""Models quantized by torchao are compiled: their tensors are unpacked, and forge.quantize accepts their configs."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import forge
from forge.capture.handles import handle_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")

CONFIGS = {
    "int8": lambda: quantization.Int8WeightOnlyConfig(),
    "fp8": lambda: quantization.Float8WeightOnlyConfig(),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 64, bias=False)).bfloat16()


@pytest.mark.usefixtures("compiled_regions")
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("no_grad", [True, False])
def test_quantized_tensors_are_unpacked(config: str, no_grad: bool) -> None:
    quantized = model()
    quantization.quantize_(quantized, CONFIGS[config]())
    jitted = forge.jit(quantized, fullgraph=True, strict=True, cache=False)
    for rows in (1, 9):
        x, y = (torch.randn(rows, 64).bfloat16().requires_grad_(not no_grad) for _ in range(2))
        y.data.copy_(x)
        with torch.set_grad_enabled(not no_grad):
            actual, expected = jitted(x), quantized(y)
        torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.02)
        if not no_grad:
            actual.sum().backward()
            expected.sum().backward()
            torch.testing.assert_close(x.grad, y.grad, rtol=0.05, atol=0.05)
    assert "subclasses" in handle_of(jitted).latest.wrappers
    assert not forge.explain(jitted).opaque_calls


def test_another_weight_of_the_same_form_is_no_other_program() -> None:
    quantized, other = model(), model()
    with torch.no_grad():
        other[0].weight.mul_(2)
    for each in (quantized, other):
        quantization.quantize_(each, CONFIGS["int8"]())
    jitted = forge.jit(quantized, cache=False)
    x = torch.randn(3, 64).bfloat16()
    with torch.no_grad():
        first = jitted(x)
        quantized.load_state_dict(other.state_dict(), assign=True)
        torch.testing.assert_close(jitted(x), other(x), rtol=0.05, atol=0.02)
        assert (jitted(x) - first).abs().max() > 0.05


@pytest.mark.filterwarnings("ignore:forge. a graph runs by torch's own functions")
def test_other_uses_of_a_quantized_tensor_run_by_torch() -> None:
    quantized = model()
    quantization.quantize_(quantized, quantization.Int8DynamicActivationInt8WeightConfig())
    jitted, x = forge.jit(quantized, cache=False), torch.randn(3, 64).bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(jitted(x), quantized(x), rtol=0.05, atol=0.02)
    assert "torch.nn.functional.linear" in [row.operation for row in forge.explain(jitted).rows]


@pytest.mark.parametrize(
    ("config", "operator", "dtype"),
    [
        (lambda: quantization.Int8WeightOnlyConfig(), "linear_int8", torch.int8),
        (lambda: quantization.Int4WeightOnlyConfig(group_size=32), "linear_int4", torch.uint8),
        (lambda: quantization.Float8WeightOnlyConfig(torch.float8_e5m2), "linear_fp8", torch.float8_e5m2),
    ],
)
def test_configs_of_torchao_are_transforms(config: Any, operator: str, dtype: torch.dtype) -> None:
    transform = forge.quantize.from_torchao(config(), filter_fn=lambda module, name: name == "0")
    jitted = forge.jit(model(), transforms=[transform])
    assert jitted[0].scheme.operator == operator
    assert jitted[0].weight.dtype == dtype
    assert type(jitted[2]) is nn.Linear


def test_other_configs_are_errors() -> None:
    with pytest.raises(TypeError, match="from_torchao: config is 3, but must be one of torchao's Int8WeightOnlyConfig"):
        forge.quantize.from_torchao(3)
    with pytest.raises(TypeError, match="config is Int8DynamicActivationInt8WeightConfig"):
        forge.quantize.from_torchao(quantization.Int8DynamicActivationInt8WeightConfig())


def test_a_deep_copy_is_unpacked_too() -> None:
    quantized = model()
    quantization.quantize_(quantized, CONFIGS["int8"]())
    jitted, x = forge.jit(quantized, strict=True, cache=False), torch.randn(3, 64).bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(copy.deepcopy(jitted)(x), jitted(x))
