"""Linear layers with quantized weights on a CUDA GPU: a Triton kernel for one row, another one for a few rows,
dequantized values for many."""

import importlib.util

import pytest
import torch
from torch import nn

import forge
from forge.executors.cudaex import availability, quantized
from forge.ir import TensorProxy
from forge.quantize import Float8WeightOnly, Int4WeightOnly, Int8WeightOnly
from tests.executors.test_cuda_executor import run_kernel

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
TRANSFORMS = {
    "int8": Int8WeightOnly(),
    "int8 in groups": Int8WeightOnly(64),
    "int4": Int4WeightOnly(128),
    "int4 symmetric": Int4WeightOnly(32, symmetric=True),
    "fp8": Float8WeightOnly(),
}


@NEEDS_GPU
@pytest.mark.usefixtures("compiled_regions")
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_are_those_of_the_dequantized_weights(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = _model()
    model.to("cuda", dtype)
    jitted = forge.jit(model, transforms=[TRANSFORMS[name]], cache=False)
    eager = _model().to("cuda", dtype)
    eager.load_state_dict(forge.original_state_dict(jitted))
    exact = _model().to("cuda", torch.float64)
    exact.load_state_dict(eager.state_dict())
    for rows in (1, 2, 7, 16, 33, 64, 100):
        jitted = forge.jit(model, transforms=[TRANSFORMS[name]], cache=False)  # sizes that change would be symbols
        x = torch.randn(rows, 256, device="cuda", dtype=dtype)
        with torch.no_grad():
            actual, by_torch, expected = jitted(x), eager(x), exact(x.double())
        error, eagers = ((each.double() - expected).abs().max() for each in (actual, by_torch))
        assert error <= 2 * eagers + 1e-6
        by = {row.executor for row in forge.explain(jitted).rows if "linear" in row.operation}
        few = {"inductor"} if rows == 1 and name == "fp8" else {"cuda"}
        assert by == (few if rows <= 64 else {"torch"})


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 384), nn.SiLU(), nn.Linear(384, 256, bias=False))


_KERNEL = """
    import torch
    from forge.executors.cudaex.quantized_kernels import linear
    from forge.quantize import Float8WeightOnly, Int4WeightOnly, Int8WeightOnly

    torch.manual_seed(0)
    symmetric = Int4WeightOnly(64, symmetric=True)
    sizes = (
        (48, 256, 2, False), (40, 320, 16, True), (16, 128, 33, True), (40, 2048, 3, True), (40, 2048, 1, True),
    )
    for transform in (Int8WeightOnly(), Int8WeightOnly(64), Int4WeightOnly(32), symmetric, Float8WeightOnly()):
        for outputs, columns, rows, has_bias in sizes:
            scheme = transform.scheme
            stored = scheme.quantize(torch.randn(outputs, columns))
            x, bias = torch.randn(1, rows, columns).half(), torch.randn(outputs).half() if has_bias else None
            actual = linear(x, stored.weight, stored.scale, stored.zero_point, bias)
            is_rounded = rows > 1 and stored.scale.ndim > 1  # tensor cores multiply the values that eager multiplies
            values = scheme.dequantize(stored, torch.float16 if is_rounded else torch.float64).double()
            expected = torch.nn.functional.linear(x.double(), values, bias if bias is None else bias.double())
            assert actual.shape == expected.shape
            assert torch.allclose(actual.double(), expected, rtol=1e-3, atol=2e-2), (actual - expected).abs().max()
"""


NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@NEEDS_TRITON
def test_the_kernel() -> None:
    run_kernel(_KERNEL)


_SEVERAL = """
    import torch
    from forge.executors.cudaex.quantized_kernels import linears
    from forge.quantize import Int4WeightOnly, Int8WeightOnly

    torch.manual_seed(0)
    small, wide, many, most = ((40, 16, 24), 256), ((3, 70), 8320), ((6200, 5), 128), ((12300, 8, 1), 128)
    for transform, cases in (
        (Int8WeightOnly(), (small, wide, many)),
        (Int8WeightOnly(64), (small, wide)),
        (Int4WeightOnly(128), (small, wide, most)),
        (Int4WeightOnly(32, symmetric=True), (small, wide)),
    ):
        for sizes, columns in cases:
            scheme = transform.scheme
            stored = [scheme.quantize(torch.randn(size, columns)) for size in sizes]
            rows = 1 if columns > 1000 or max(sizes) > 1000 else 5
            x, biases = torch.randn(1, rows, columns).half(), [None, torch.randn(sizes[1]).half(), None][: len(sizes)]
            fields = ([getattr(each, name) for each in stored] for name in ("weight", "scale", "zero_point"))
            for actual, each, bias in zip(linears(x, *fields, biases), stored, biases, strict=True):
                is_rounded = rows > 1 and each.scale.ndim > 1
                values = scheme.dequantize(each, torch.float16 if is_rounded else torch.float64).double()
                expected = torch.nn.functional.linear(x.double(), values, bias if bias is None else bias.double())
                assert actual.shape == expected.shape
                assert torch.allclose(actual.double(), expected, rtol=1e-3, atol=2e-2), (actual - expected).abs().max()
"""


@NEEDS_TRITON
def test_the_kernel_of_several_weights() -> None:
    run_kernel(_SEVERAL)


_EXTREME = """
    import torch
    from forge.executors.cudaex.quantized_kernels import linear
    from forge.quantize import Int4WeightOnly, Int8WeightOnly

    torch.manual_seed(0)
    for transform in (Int8WeightOnly(), Int4WeightOnly(32)):
        stored = transform.scheme.quantize(torch.randn(16, 256))
        values = transform.scheme.dequantize(stored, torch.float64)
        for factor in (2.0**-60, 1.0, 2.0**38):  # the kernel multiplies by large powers of two
            x = (torch.randn(1, 256) * factor).bfloat16()
            actual = linear(x, stored.weight, stored.scale, stored.zero_point, None).double()
            expected = x.double() @ values.T
            assert (actual - expected).abs().max() < 0.01 * expected.abs().max(), (actual, expected)
"""


@NEEDS_TRITON
def test_the_kernel_of_a_row_takes_small_and_large_numbers() -> None:
    run_kernel(_EXTREME)


def _proxy(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> TensorProxy:
    return TensorProxy("x", shape, dtype, torch.device(device))


def _decision(input: TensorProxy, scale: TensorProxy, dtype: torch.dtype = torch.int8) -> object:
    return quantized._checker(input, _proxy(64, input.shape[-1], dtype=dtype), scale)


@pytest.mark.parametrize(
    ("input", "scale", "reason"),
    [
        (_proxy(8, 256, device="cpu"), _proxy(64), "input is on cpu"),
        (_proxy(8, 256, dtype=torch.float32), _proxy(64), "must be bfloat16 or float16"),
        (_proxy(1, 256), _proxy(64), None),
        (_proxy(1, 255), _proxy(64), "the input has 1 rows, and the kernel is for 2 to 64"),
        (_proxy(5, 13, 256), _proxy(64), "the input has 65 rows"),
        (_proxy(8, 256), _proxy(64, 16), "groups have 16 elements, but must have a power of two, 32 or more"),
        (_proxy(8, 192), _proxy(64, 2), "groups have 96 elements"),
        (_proxy(8, 256), _proxy(64, 2), None),
        (_proxy(2, 4, 256), _proxy(64), None),
    ],
)
def test_the_kernel_takes_a_few_rows_on_a_gpu(
    input: TensorProxy, scale: TensorProxy, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(availability.importlib.util, "find_spec", lambda name: True)
    decision = _decision(input, scale)
    assert decision is True if reason is None else reason in decision.reason


def test_the_kernel_of_several_weights_is_for_three_of_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability.importlib.util, "find_spec", lambda name: True)

    def decision(rows: int, weights: int, dtype: torch.dtype = torch.int8) -> object:
        return quantized._checker_of_several(
            _proxy(rows, 256), (_proxy(64, 256, dtype=dtype),) * weights, (_proxy(64),) * weights
        )

    assert decision(1, 3) is True and decision(16, 2) is True
    assert "the input has 65 rows" in decision(65, 3).reason
    assert "there are 4 weights" in decision(1, 4).reason
    assert "the weights are not integers" in decision(2, 2, torch.float8_e4m3fn).reason


def test_the_kernel_of_a_row_is_for_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability.importlib.util, "find_spec", lambda name: True)
    assert "2 to 64" in _decision(_proxy(1, 256), _proxy(64), torch.float8_e4m3fn).reason


def test_without_triton_the_kernel_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability.importlib.util, "find_spec", lambda name: None)
    assert "triton is not installed" in _decision(_proxy(8, 256), _proxy(64)).reason
