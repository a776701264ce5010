"""The linear layers whose weight is stored in 8 or 4 bits per element, and computed in the dtype of the input.

    linear_int8(input, weight, scale, bias)              weight: int8 (out, in)
    linear_fp8(input, weight, scale, bias)               weight: float8_e4m3fn or float8_e5m2 (out, in)
    linear_int4(input, weight, scale, zero_point, bias)  weight: uint8 (out, in / 2), two elements per byte

Each is linear(input, dequantized, bias), where dequantized = (element - zero_point) * scale, computed in float32 and
rounded to the input's dtype. scale is (out,), or (out, groups) for groups of in / groups adjacent elements. linear_int4
alone has a zero_point, of the same shape; None means 8. The low half of a byte is its first element.

They are operators of torch.library, too: eager runs them, and each is one call in Dynamo's graph.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge import clang
from forge.ir import Symbol, TensorProxy, check, get_grad, needs_grad, put_grad, register_grad, short_dtype
from forge.prims.core import same, torch_check
from forge.torchlang.core import torchsymbol
from forge.torchlang.linalg import linear

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INPUTS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


# the values of a quantized weight, for tensors and proxies


def _scaled(elements: Any, scale: Any, dtype: torch.dtype) -> Any:
    """Return (out, in) elements times their scales, rounded to `dtype`."""
    wide = torch.promote_types(scale.dtype, torch.float32)
    rows, columns = elements.shape
    if scale.ndim == 1:
        return (elements.to(wide) * scale.to(wide).reshape((rows, 1))).to(dtype)
    groups = scale.shape[1]
    grouped = elements.to(wide).reshape((rows, groups, columns // groups))
    return (grouped * scale.to(wide).reshape((rows, groups, 1))).reshape((rows, columns)).to(dtype)


def _shifted(weight: Any, zero_point: Any, scale: Any, stack: Callable) -> Any:
    """Return the elements of a 4-bit weight, minus their zero points, as (out, in)."""
    wide = torch.promote_types(scale.dtype, torch.float32)
    rows, columns = weight.shape[0], 2 * weight.shape[1]
    elements = stack([weight & 15, weight >> 4], -1).reshape((rows, columns)).to(wide)
    if zero_point is None:
        return elements - 8
    if zero_point.ndim == 1:
        return elements - zero_point.to(wide).reshape((rows, 1))
    groups = zero_point.shape[1]
    grouped = elements.reshape((rows, groups, columns // groups)) - zero_point.to(wide).reshape((rows, groups, 1))
    return grouped.reshape((rows, columns))


def dequantize(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of an 8-bit weight."""
    return _scaled(weight, scale, dtype)


def dequantize_packed(weight: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the values of a 4-bit weight."""
    return _scaled(_shifted(weight, zero_point, scale, torch.stack), scale, dtype)


def _gradients_of_scales(g: Any, weight: Any, scales: Sequence[Any], stack: Callable) -> list[Any]:
    """Return the gradients of a scale, and of a zero point, if any, from the gradient of the weight's values."""
    scale, *rest = scales
    zero_point = rest[0] if rest else None
    wide = torch.promote_types(scale.dtype, torch.float32)
    elements = _shifted(weight, zero_point, scale, stack) if rest else weight.to(wide)
    rows, columns = elements.shape
    groups = 1 if scale.ndim == 1 else scale.shape[1]
    shape = (rows, groups, columns // groups)
    g, step = g.to(wide).reshape(shape), scale.to(wide).reshape((rows, groups))
    gradients = [(g * elements.reshape(shape)).sum(-1), None if zero_point is None else -(g.sum(-1) * step)]
    return [
        None if x is None else x.reshape(tuple(each.shape)).to(each.dtype)
        for each, x in zip((scale, zero_point), gradients, strict=True)
    ][: len(scales)]


# the operators


def _check(op: str, input: Any, weight: Any, scale: Any, zero_point: Any = None) -> None:
    """Raise TypeError for wrong dtypes, and RuntimeError for shapes that do not match, for tensors and proxies."""
    dtypes, packed = _STORED[op]
    for name, value, allowed in (("input", input, INPUTS), ("weight", weight, dtypes)):
        listed = ", ".join(map(short_dtype, allowed))
        check(
            value.dtype in allowed,
            lambda n=name, v=value, names=listed: f"{op}: {n} is {_brief(v)}, but must have a dtype of {names}",
            TypeError,
        )
    torch_check(
        weight.ndim == 2 and input.ndim > 0 and same(input.shape[-1], packed * weight.shape[1]),
        lambda: f"{op}: shapes cannot be multiplied: input is {_brief(input)}, weight is {_brief(weight)}",
    )
    check(
        scale.dtype.is_floating_point,
        lambda: f"{op}: scale is {_brief(scale)}, but must have a dtype of floats",
        TypeError,
    )
    rows, columns = weight.shape[0], packed * weight.shape[1]
    torch_check(
        scale.ndim in (1, 2) and same(scale.shape[0], rows),
        lambda: f"{op}: scale is {_brief(scale)}, but must have the shape ({rows},) or ({rows}, groups)",
    )
    torch_check(
        scale.ndim == 1 or (scale.shape[1] > 0 and columns % (packed * scale.shape[1]) == 0),
        lambda: f"{op}: scale is {_brief(scale)}, whose groups do not divide the {columns} elements of a row",
    )
    torch_check(
        zero_point is None or (zero_point.ndim == scale.ndim and all(map(same, zero_point.shape, scale.shape))),
        lambda: f"{op}: zero_point is {_brief(zero_point)}, but must have the shape of scale, which is {_brief(scale)}",
    )


def _brief(x: Any) -> str:
    return f"{short_dtype(x.dtype)}{list(x.shape)}"


# by operator: the dtypes of its weight, and the number of elements that one of them holds
_STORED: dict[str, tuple[tuple[torch.dtype, ...], int]] = {
    "linear_int8": ((torch.int8,), 1),
    "linear_fp8": (FLOAT8, 1),
    "linear_int4": ((torch.uint8,), 2),
}


def _linear_int8(input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    _check("linear_int8", input, weight, scale)
    return F.linear(input, dequantize(weight, scale, input.dtype), bias)


def _linear_fp8(input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    _check("linear_fp8", input, weight, scale)
    return F.linear(input, dequantize(weight, scale, input.dtype), bias)


def _linear_int4(
    input: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    _check("linear_int4", input, weight, scale, zero_point)
    return F.linear(input, dequantize_packed(weight, scale, zero_point, input.dtype), bias)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, *scales, bias = inputs
    ctx.save_for_backward(input if any(ctx.needs_input_grad[2:-1]) else None, weight, *scales)
    ctx.dtype, ctx.has_bias = input.dtype, bias is not None


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    input, weight, *scales = ctx.saved_tensors
    values: Callable[..., Tensor] = dequantize if len(scales) == 1 else dequantize_packed
    of_scales: list[Any] = [None for _ in scales]
    if input is not None:
        g = grad.reshape(-1, grad.shape[-1]).mT @ input.reshape(-1, input.shape[-1])
        of_scales = _gradients_of_scales(g, weight, scales, torch.stack)
    bias = grad.sum_to_size(grad.shape[-1]) if ctx.has_bias and ctx.needs_input_grad[-1] else None
    return (grad @ values(weight, *scales, ctx.dtype) if ctx.needs_input_grad[0] else None, None, *of_scales, bias)


def _without_autocast(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a kernel whose result has its input's dtype, even under torch.autocast."""

    @functools.wraps(function)
    def call(input: torch.Tensor, *rest: torch.Tensor | None) -> torch.Tensor:
        if input.device.type == "meta":  # which autocast does not support
            return function(input, *rest)
        with torch.autocast(input.device.type, enabled=False):
            return function(input, *rest)

    return call


_library = torch.library.Library("forge", "FRAGMENT")
OPERATORS: dict[str, Any] = {}
for _name, _arguments, _function in (
    ("linear_int8", "Tensor scale", _linear_int8),
    ("linear_fp8", "Tensor scale", _linear_fp8),
    ("linear_int4", "Tensor scale, Tensor? zero_point=None", _linear_int4),
):
    _library.define(f"{_name}(Tensor input, Tensor weight, {_arguments}, Tensor? bias=None) -> Tensor")
    _library.impl(_name, _without_autocast(_function), "CompositeExplicitAutograd")
    torch.library.register_autograd(f"forge::{_name}", _backward, setup_context=_save, lib=_library)
    OPERATORS[_name] = getattr(torch.ops.forge, _name).default


# the symbols


def _dequantize(weight: TensorProxy, scale: TensorProxy, dtype: torch.dtype) -> TensorProxy:
    """Return the values of an 8-bit weight."""
    return _scaled(weight, scale, dtype)


def _dequantize_packed(
    weight: TensorProxy, scale: TensorProxy, zero_point: TensorProxy | None, dtype: torch.dtype
) -> TensorProxy:
    """Return the values of a 4-bit weight."""
    return _scaled(_shifted(weight, zero_point, scale, clang.stack), scale, dtype)


dequantized = Symbol("dequantize", "forge.dequantize", body=_dequantize)
dequantized_packed = Symbol("dequantize_int4", "forge.dequantize_int4", body=_dequantize_packed)


@torchsymbol(OPERATORS["linear_int8"], id="torch.ops.forge.linear_int8")
def linear_int8(
    input: TensorProxy, weight: TensorProxy, scale: TensorProxy, bias: TensorProxy | None = None
) -> TensorProxy:
    """Return linear with an int8 weight and scales.

    Shapes: input (..., in), weight (out, in), scale (out,) or (out, groups), bias (out,); out is (..., out).
    """
    _check("linear_int8", input, weight, scale)
    return linear(input, dequantized(weight, scale, input.dtype), bias)


@torchsymbol(OPERATORS["linear_fp8"], id="torch.ops.forge.linear_fp8")
def linear_fp8(
    input: TensorProxy, weight: TensorProxy, scale: TensorProxy, bias: TensorProxy | None = None
) -> TensorProxy:
    """Return linear with a weight of 8-bit floats and scales. Shapes: as linear_int8."""
    _check("linear_fp8", input, weight, scale)
    return linear(input, dequantized(weight, scale, input.dtype), bias)


@torchsymbol(OPERATORS["linear_int4"], id="torch.ops.forge.linear_int4")
def linear_int4(
    input: TensorProxy,
    weight: TensorProxy,
    scale: TensorProxy,
    zero_point: TensorProxy | None = None,
    bias: TensorProxy | None = None,
) -> TensorProxy:
    """Return linear with a 4-bit weight, scales and zero points.

    Shapes: as linear_int8, but weight (out, in / 2), and zero_point as scale.
    """
    _check("linear_int4", input, weight, scale, zero_point)
    return linear(input, dequantized_packed(weight, scale, zero_point, input.dtype), bias)


def _quantized_linears(
    input: TensorProxy,
    weights: tuple[TensorProxy, ...],
    scales: tuple[TensorProxy, ...],
    zero_points: tuple[TensorProxy | None, ...],
    biases: tuple[TensorProxy | None, ...],
) -> tuple[TensorProxy, ...]:
    """Return linear_int8 or linear_int4 of one input with several weights of the same form, which
    forge/transforms/join_quantized.py matches.

    Shapes: those of linear_int8 and linear_int4; each tuple has one element per weight, as has the result.
    """
    return tuple(
        linear_int8(input, weight, scale, bias)
        if weight.dtype == torch.int8
        else linear_int4(input, weight, scale, zero_point, bias)
        for weight, scale, zero_point, bias in zip(weights, scales, zero_points, biases, strict=True)
    )


quantized_linears = Symbol("quantized_linears", "forge.quantized_linears", body=_quantized_linears)


# The gradient recomputes the values: saving them would need the memory that the quantized weight saves.


def _by_values(symbol: Symbol, values: Callable[..., TensorProxy]) -> None:
    @register_grad(symbol)
    def rule(input: TensorProxy, weight: TensorProxy, *rest: Any, **kwargs: Any) -> TensorProxy:
        out = symbol(input, weight, *rest, **kwargs)
        arguments, g = symbol.bind((input, weight, *rest), kwargs), get_grad(out)
        scales = [each for name, each in arguments.items() if name in ("scale", "zero_point")]
        put_grad(arguments["bias"], g)  # summed to the bias's shape
        put_grad(weight, None)
        if needs_grad(input):
            put_grad(input, clang.matmul(g, values(weight, *scales, g.dtype)))
        if any(map(needs_grad, scales)):
            of_values = clang.matmul(clang.transpose(clang.as_rows(g), 0, 1), clang.as_rows(input))
            for scale, gradient in zip(
                scales, _gradients_of_scales(of_values, weight, scales, clang.stack), strict=True
            ):
                put_grad(scale, gradient)
        return out


_by_values(linear_int8, dequantized)
_by_values(linear_fp8, dequantized)
_by_values(linear_int4, dequantized_packed)
