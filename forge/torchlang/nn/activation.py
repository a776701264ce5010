"""The activation functions, and the backward operators that eager's autograd runs for them.

A gradient rule calls the backward operator, which is a symbol like any other: torch runs it as one operator, a fusion
executor may take its decomposition. Rules save the same tensors as eager.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge import clang, prims
from forge.ir import Number, Symbol, TensorProxy, get_grad, needs_grad, put_grad, register_grad
from forge.prims.core import torch_check
from forge.torch_internals.functions import nn_gelu_, torch_nn_module
from forge.torchlang import elementwise
from forge.torchlang.core import torchsymbol

aten = torch.ops.aten
_nn = torch_nn_module


def _wide(op: str, input: TensorProxy) -> TensorProxy:
    """Return a floating point input in torch's compute precision."""
    prims.check_dtype(op, input, prims.FLOAT)
    return clang.widen(input)


def _backward_wide(grad_output: TensorProxy, self: TensorProxy) -> tuple[TensorProxy, TensorProxy]:
    return clang.widen(grad_output), clang.widen(self)


# relu and its variants


@torchsymbol(torch.relu, Tensor.relu, F.relu, inplace=(torch.relu_, Tensor.relu_), inplace_position=1)
def relu(input: TensorProxy) -> TensorProxy:
    """Return max(input, 0)."""
    torch_check(input.dtype != torch.bool, lambda: f"relu: Boolean inputs not supported for relu: {input}")
    return clang.maximum(input, 0)


@torchsymbol(aten.threshold_backward.default)
def threshold_backward(grad_output: TensorProxy, self: TensorProxy, threshold: Number) -> TensorProxy:
    """Return the gradient where self > threshold, else 0. Source: aten.threshold_backward."""
    return clang.where(self <= threshold, 0, clang.convert(grad_output, clang.compute_dtype(grad_output, self)))


prims.register_vjp(relu, input=lambda g, out: threshold_backward(g, out, 0))


@torchsymbol(torch.threshold, F.threshold, inplace=torch.threshold_, inplace_position=3)
def threshold(input: TensorProxy, threshold: Number, value: Number) -> TensorProxy:
    """Return input where it is above threshold, else value."""
    out = clang.where(input <= threshold, value, input)
    return clang.convert(out, input.dtype)


prims.register_vjp(threshold, input=lambda g, input, threshold: threshold_backward(g, input, threshold))


@torchsymbol(F.hardtanh, _nn.hardtanh, inplace=_nn.hardtanh_, inplace_position=3)
def hardtanh(input: TensorProxy, min_val: float = -1.0, max_val: float = 1.0) -> TensorProxy:
    """Return input limited to [min_val, max_val]."""
    torch_check(input.dtype != torch.bool, lambda: f"hardtanh: Bool inputs not supported for hardtanh: {input}")
    if clang.category(input.dtype) == 1:
        min_val, max_val = int(min_val), int(max_val)
    return clang.minimum(clang.maximum(input, min_val), max_val)


@torchsymbol(aten.hardtanh_backward.default)
def hardtanh_backward(grad_output: TensorProxy, self: TensorProxy, min_val: float, max_val: float) -> TensorProxy:
    """Return the gradient strictly between the limits, else 0."""
    return clang.where((self <= min_val) | (self >= max_val), 0, grad_output)


prims.register_vjp(hardtanh, input=lambda g, input, min_val, max_val: hardtanh_backward(g, input, min_val, max_val))


@torchsymbol(F.relu6, _nn.relu6, inplace=_nn.relu6_, inplace_position=1)
def relu6(input: TensorProxy) -> TensorProxy:
    """Return input limited to [0, 6]."""
    return clang.minimum(clang.maximum(input, 0), 6)


prims.register_vjp(relu6, input=lambda g, input: hardtanh_backward(g, input, 0, 6))


@torchsymbol(F.leaky_relu, _nn.leaky_relu, inplace=_nn.leaky_relu_, inplace_position=2)
def leaky_relu(input: TensorProxy, negative_slope: Number = 0.01) -> TensorProxy:
    """Return input where it is positive, else negative_slope * input."""
    x = _wide("leaky_relu", input)
    return clang.convert(clang.where(x > 0, x, x * negative_slope), input.dtype)


@torchsymbol(aten.leaky_relu_backward.default)
def leaky_relu_backward(
    grad_output: TensorProxy, self: TensorProxy, negative_slope: Number, self_is_result: bool
) -> TensorProxy:
    """Return the gradient, times negative_slope where self is not positive."""
    g, x = _backward_wide(grad_output, self)
    return clang.convert(clang.where(x > 0, g, g * negative_slope), self.dtype)


prims.register_vjp(
    leaky_relu, input=lambda g, input, negative_slope: leaky_relu_backward(g, input, negative_slope, False)
)


@torchsymbol(torch.prelu, Tensor.prelu)
def prelu(input: TensorProxy, weight: TensorProxy) -> TensorProxy:
    """Return input where it is positive, else weight * input. Shapes: weight has one element, or one per channel of
    input."""
    return clang.where(input > 0, input, _weight_of_channels(input, weight) * input)


def _weight_of_channels(input: TensorProxy, weight: TensorProxy) -> TensorProxy:
    torch_check(weight.ndim <= 1, lambda: f"prelu: Expected `weight` to be a scalar or 1D tensor, but it is {weight}")
    if weight.ndim == 0 or prims.statically_true(weight.shape[0] == 1):
        return weight
    channels = input.shape[1] if input.ndim > 1 else 1
    torch_check(
        input.ndim > 0 and prims.same(weight.shape[0], channels),
        lambda: (
            f"prelu: Mismatch of parameter numbers and input channel size: {weight} has {weight.shape[0]} "
            f"parameters, {input} has {channels} channels"
        ),
    )
    return clang.reshape(weight, (weight.shape[0],) + (1,) * (input.ndim - 2)) if input.ndim > 1 else weight


@register_grad(prelu)
def _prelu_grad(input: TensorProxy, weight: TensorProxy) -> TensorProxy:
    out = prelu(input, weight)
    g = get_grad(out)
    positive = input > 0
    if needs_grad(input):
        put_grad(input, clang.where(positive, g, _weight_of_channels(input, weight) * g))
    if needs_grad(weight):
        slope = clang.where(positive, 0, input * g)
        if weight.ndim and input.ndim > 1 and not prims.statically_true(weight.shape[0] == 1):
            slope = slope.sum(tuple(dim for dim in range(input.ndim) if dim != 1))
        put_grad(weight, clang.sum(slope) if weight.ndim == 0 else slope)
    return out


# exponential units


def _elu(x: TensorProxy, alpha: Number, scale: Number, input_scale: Number) -> TensorProxy:
    negative = clang.expm1(x * input_scale if input_scale != 1 else x) * (alpha * scale)
    return clang.where(x > 0, x * scale if scale != 1 else x, negative)


@torchsymbol(F.elu, inplace_position=2)
def elu(input: TensorProxy, alpha: Number = 1.0) -> TensorProxy:
    """Return input where it is positive, else alpha * (e^input - 1)."""
    return clang.convert(_elu(_wide("elu", input), alpha, 1, 1), input.dtype)


@torchsymbol(_nn.elu, inplace=_nn.elu_)
def scaled_elu(input: TensorProxy, alpha: Number = 1.0, scale: Number = 1, input_scale: Number = 1) -> TensorProxy:
    """Return scale * input where input is positive, else scale * alpha * (e^(input_scale * input) - 1)."""
    return clang.convert(_elu(_wide("elu", input), alpha, scale, input_scale), input.dtype)


_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


@torchsymbol(torch.selu, F.selu, inplace=torch.selu_, inplace_position=1)
def selu(input: TensorProxy) -> TensorProxy:
    """Return elu with the constants of self-normalizing networks."""
    return clang.convert(_elu(_wide("selu", input), _SELU_ALPHA, _SELU_SCALE, 1), input.dtype)


@torchsymbol(torch.celu, F.celu, inplace=torch.celu_, inplace_position=2)
def celu(input: TensorProxy, alpha: Number = 1.0) -> TensorProxy:
    """Return input where it is positive, else alpha * (e^(input / alpha) - 1)."""
    torch_check(alpha != 0, lambda: "celu: ZeroDivisionError: alpha cannot be 0 for CELU")
    return clang.convert(_elu(_wide("celu", input), alpha, 1, 1 / alpha), input.dtype)


@torchsymbol(aten.elu_backward.default)
def elu_backward(
    grad_output: TensorProxy,
    alpha: Number,
    scale: Number,
    input_scale: Number,
    is_result: bool,
    self_or_result: TensorProxy,
) -> TensorProxy:
    """Return the gradient of the exponential units, from their input or their result."""
    g, x = _backward_wide(grad_output, self_or_result)
    factor = alpha * scale
    if is_result:
        slope = (x + factor) * input_scale
    else:  # negative numbers only: others overflow, and inf * 0 would be a nan in the second gradient
        slope = clang.exp(clang.where(x < 0, x, 0) * input_scale) * (factor * input_scale)
    return clang.convert(clang.where(x <= 0, g * slope, g * scale), self_or_result.dtype)


prims.register_vjp(elu, input=lambda g, input, alpha: elu_backward(g, alpha, 1, 1, False, input))
prims.register_vjp(
    scaled_elu,
    input=lambda g, input, alpha, scale, input_scale: elu_backward(g, alpha, scale, input_scale, False, input),
)
prims.register_vjp(selu, input=lambda g, input: elu_backward(g, _SELU_ALPHA, _SELU_SCALE, 1, False, input))
prims.register_vjp(celu, input=lambda g, input, alpha: elu_backward(g, alpha, 1, 1 / alpha, False, input))


# smooth units


@torchsymbol(_nn.gelu, inplace=nn_gelu_)
def gelu(input: TensorProxy, *, approximate: str = "none") -> TensorProxy:
    """Return input times the standard normal cumulative distribution at input, or its approximation by tanh."""
    prims.check_dtype("gelu", input, prims.REAL)
    x = _wide("gelu", input)
    torch_check(
        approximate in ("none", "tanh"),
        lambda: f"gelu: approximate argument must be either none or tanh, but it is {approximate!r}",
    )
    if approximate == "none":
        area = clang.erf(x * math.sqrt(0.5)) + 1
    else:
        area = clang.tanh((x * x * x * 0.044715 + x) * math.sqrt(2 / math.pi)) + 1
    return clang.convert(x * 0.5 * area, input.dtype)


@torchsymbol(aten.gelu_backward.default)
def gelu_backward(grad_output: TensorProxy, self: TensorProxy, *, approximate: str = "none") -> TensorProxy:
    """Return the gradient of gelu."""
    g, x = _backward_wide(grad_output, self)
    if approximate == "none":
        area = (clang.erf(x * math.sqrt(0.5)) + 1) * 0.5
        slope = area + x * (clang.exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi)))
    else:
        scale = math.sqrt(2 / math.pi)
        inner = clang.tanh((x * x * x * 0.044715 + x) * scale)
        slope = (inner + 1) * 0.5 + x * 0.5 * (1 - inner * inner) * ((x * x * (3 * 0.044715) + 1) * scale)
    return clang.convert(g * slope, self.dtype)


prims.register_vjp(gelu, input=lambda g, input, approximate: gelu_backward(g, input, approximate=approximate))


@torchsymbol(F.silu, _nn.silu, inplace=_nn.silu_, inplace_position=1)
def silu(input: TensorProxy) -> TensorProxy:
    """Return input * sigmoid(input)."""
    x = _wide("silu", input)
    return clang.convert(x * clang.sigmoid(x), input.dtype)


@torchsymbol(aten.silu_backward.default)
def silu_backward(grad_output: TensorProxy, self: TensorProxy) -> TensorProxy:
    """Return the gradient of silu."""
    g, x = _backward_wide(grad_output, self)
    s = clang.sigmoid(x)
    return clang.convert(g * (s * (x * (1 - s) + 1)), self.dtype)


@torchsymbol(F.mish, _nn.mish, inplace=_nn.mish_, inplace_position=1)
def mish(input: TensorProxy) -> TensorProxy:
    """Return input * tanh(log(1 + e^input))."""
    x = _wide("mish", input)
    return clang.convert(x * clang.tanh(_log_one_plus_exp(x)), input.dtype)


def _log_one_plus_exp(x: TensorProxy) -> TensorProxy:
    """Return log(1 + e^x) without overflow."""
    return clang.where(x < 0, 0, x) + clang.log1p(clang.exp(_negated_abs(x)))


def _negated_abs(x: TensorProxy) -> TensorProxy:
    """Return -|x| with the slope of x > 0 at 0 instead of none, so that functions smooth at 0 have second
    derivatives."""
    return clang.where(x < 0, x, -x)


@torchsymbol(aten.mish_backward.default)
def mish_backward(grad_output: TensorProxy, self: TensorProxy) -> TensorProxy:
    """Return the gradient of mish."""
    g, x = _backward_wide(grad_output, self)
    inner = clang.tanh(_log_one_plus_exp(x))
    return clang.convert(g * (inner + x * clang.sigmoid(x) * (1 - inner * inner)), self.dtype)


@torchsymbol(F.hardswish, _nn.hardswish, inplace=_nn.hardswish_, inplace_position=1)
def hardswish(input: TensorProxy) -> TensorProxy:
    """Return input * relu6(input + 3) / 6."""
    x = _wide("hardswish", input)
    return clang.convert(x * clang.minimum(clang.maximum(x + 3, 0), 6) / 6, input.dtype)


@torchsymbol(aten.hardswish_backward.default)
def hardswish_backward(grad_output: TensorProxy, self: TensorProxy) -> TensorProxy:
    """Return the gradient of hardswish."""
    g, x = _backward_wide(grad_output, self)
    inside = g * (x / 3 + 0.5)
    return clang.convert(clang.where(x <= -3, 0.0, clang.where(x < 3, inside, g)), self.dtype)


@torchsymbol(F.hardsigmoid, _nn.hardsigmoid, inplace=_nn.hardsigmoid_, inplace_position=1)
def hardsigmoid(input: TensorProxy) -> TensorProxy:
    """Return relu6(input + 3) / 6."""
    x = _wide("hardsigmoid", input)
    return clang.convert(clang.minimum(clang.maximum(x + 3, 0), 6) / 6, input.dtype)


@torchsymbol(aten.hardsigmoid_backward.default)
def hardsigmoid_backward(grad_output: TensorProxy, self: TensorProxy) -> TensorProxy:
    """Return the gradient of hardsigmoid."""
    g, x = _backward_wide(grad_output, self)
    return clang.convert(clang.where((x > -3) & (x < 3), g * (1 / 6), 0.0), self.dtype)


prims.register_vjp(silu, input=lambda g, input: silu_backward(g, input))
prims.register_vjp(mish, input=lambda g, input: mish_backward(g, input))
prims.register_vjp(hardswish, input=lambda g, input: hardswish_backward(g, input))
prims.register_vjp(hardsigmoid, input=lambda g, input: hardsigmoid_backward(g, input))


@torchsymbol(_nn.softplus)
def softplus(input: TensorProxy, beta: Number = 1, threshold: Number = 20) -> TensorProxy:
    """Return log(1 + e^(beta * input)) / beta; input where beta * input is above threshold."""
    x = _wide("softplus", input)
    scaled = x * beta
    return clang.convert(clang.where(scaled > threshold, x, clang.log1p(clang.exp(scaled)) / beta), input.dtype)


@torchsymbol(aten.softplus_backward.default)
def softplus_backward(grad_output: TensorProxy, self: TensorProxy, beta: Number, threshold: Number) -> TensorProxy:
    """Return the gradient of softplus."""
    g, x = _backward_wide(grad_output, self)
    scaled = x * beta
    return clang.convert(clang.where(scaled > threshold, g, g * clang.sigmoid(scaled)), self.dtype)


prims.register_vjp(softplus, input=lambda g, input, beta, threshold: softplus_backward(g, input, beta, threshold))


@torchsymbol(_nn.log_sigmoid)
def logsigmoid(input: TensorProxy) -> TensorProxy:
    """Return log(sigmoid(input))."""
    x = _wide("logsigmoid", input)
    return clang.convert(clang.minimum(x, 0) - clang.log1p(clang.exp(-clang.abs(x))), input.dtype)


@torchsymbol(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(grad_output: TensorProxy, self: TensorProxy, buffer: TensorProxy) -> TensorProxy:
    """Return the gradient of logsigmoid. buffer: e^-|self|, which only torch's CPU kernel reads."""
    g, x = _backward_wide(grad_output, self)
    tail = clang.exp(_negated_abs(x))
    tail = tail / (1 + tail)
    return clang.convert(clang.where(x < 0, 1 - tail, tail) * g, self.dtype)


@register_grad(logsigmoid)
def _logsigmoid_grad(input: TensorProxy) -> TensorProxy:
    out = logsigmoid(input)
    buffer = clang.exp(-clang.abs(input)) if input.device.type == "cpu" else input
    put_grad(input, log_sigmoid_backward(get_grad(out), input, buffer))
    return out


@torchsymbol(aten.tanh_backward.default)
def tanh_backward(grad_output: TensorProxy, output: TensorProxy) -> TensorProxy:
    """Return the gradient of tanh from its result."""
    g, out = _backward_wide(grad_output, clang.conj(output))
    return clang.convert(g * (1 - out * out), output.dtype)


@torchsymbol(aten.sigmoid_backward.default)
def sigmoid_backward(grad_output: TensorProxy, output: TensorProxy) -> TensorProxy:
    """Return the gradient of sigmoid from its result."""
    g, out = _backward_wide(grad_output, clang.conj(output))
    return clang.convert(g * (out * (1 - out)), output.dtype)


prims.register_vjp(elementwise.tanh, input=lambda g, out: tanh_backward(g, out))
prims.register_vjp(elementwise.sigmoid, input=lambda g, out: sigmoid_backward(g, out))


# shrinking units


@torchsymbol(torch.hardshrink, Tensor.hardshrink)
def hardshrink(input: TensorProxy, lambd: float = 0.5) -> TensorProxy:
    """Return input, but 0 where |input| <= lambd."""
    prims.check_dtype("hardshrink", input, prims.FLOAT)
    return clang.where((input >= -lambd) & (input <= lambd), 0.0, input)


@torchsymbol(_nn.softshrink)
def softshrink(input: TensorProxy, lambd: float = 0.5) -> TensorProxy:
    """Return input moved towards 0 by lambd."""
    x = _wide("softshrink", input)
    torch_check(lambd >= 0, lambda: f"softshrink: lambda must be greater or equal to 0, but found to be {lambd}")
    out = clang.where(x > lambd, x - lambd, clang.where(x < -lambd, x + lambd, x * 0))
    return clang.convert(out, input.dtype)


@torchsymbol(aten.hardshrink_backward.default)
def hardshrink_backward(grad_out: TensorProxy, self: TensorProxy, lambd: float) -> TensorProxy:
    """Return the gradient, 0 where |self| <= lambd."""
    return clang.where((self >= -lambd) & (self <= lambd), 0.0, grad_out)


@torchsymbol(aten.softshrink_backward.default)
def softshrink_backward(grad_output: TensorProxy, self: TensorProxy, lambd: float) -> TensorProxy:
    """Return the gradient, 0 where |self| <= lambd."""
    return clang.where((self >= -lambd) & (self <= lambd), 0.0, grad_output)


prims.register_vjp(hardshrink, input=lambda g, input, lambd: hardshrink_backward(g, input, lambd))
prims.register_vjp(softshrink, input=lambda g, input, lambd: softshrink_backward(g, input, lambd))


def _register_backward_of_pieces(backward: Symbol) -> None:
    """Register the gradient rule of a backward operator that is linear in the gradient and piecewise constant in the
    input."""

    @register_grad(backward)
    def rule(grad_output: TensorProxy, self: TensorProxy, *options: Any) -> TensorProxy:
        out = backward(grad_output, self, *options)
        g = get_grad(out)
        put_grad(grad_output, backward(g, self, *options))
        put_grad(self, prims.zeros_like(g))
        return out


for _backward in (hardshrink_backward, hardtanh_backward, leaky_relu_backward, softshrink_backward, threshold_backward):
    _register_backward_of_pieces(_backward)


@torchsymbol(F.tanhshrink)
def tanhshrink(input: TensorProxy) -> TensorProxy:
    """Return input - tanh(input)."""
    return clang.sub(input, elementwise.tanh(input))


@torchsymbol(F.softsign)
def softsign(input: TensorProxy) -> TensorProxy:
    """Return input / (1 + |input|)."""
    return clang.div(input, clang.abs(input) + 1)


@torchsymbol(_nn.glu, F.glu)
def glu(input: TensorProxy, dim: int = -1) -> TensorProxy:
    """Return the first half of input along dim times the sigmoid of the second."""
    prims.check_dtype("glu", input, prims.REAL)
    x = _wide("glu", input)
    first, second = _halves(x, dim)
    return clang.convert(first * clang.sigmoid(second), input.dtype)


def _halves(x: TensorProxy, dim: int) -> tuple[TensorProxy, TensorProxy]:
    torch_check(x.ndim > 0, lambda: f"glu: glu does not support 0-dimensional tensors: {x}")
    dim = prims.check_dim("glu", dim, x.ndim)
    size = x.shape[dim]
    torch_check(
        prims.same(size % 2, 0),
        lambda: f"glu: Halving dimension must be even, but dimension {dim} of {x} is size {size}",
    )
    return clang.slice_in_dim(x, dim, None, size // 2), clang.slice_in_dim(x, dim, size // 2, None)


@torchsymbol(aten.glu_backward.default)
def glu_backward(grad_output: TensorProxy, self: TensorProxy, dim: int) -> TensorProxy:
    """Return the gradient of glu."""
    prims.check_dtype("glu_backward", self, prims.REAL)
    g, x = _backward_wide(grad_output, self)
    first, second = _halves(x, dim)
    gate = clang.sigmoid(second)
    dim = prims.check_dim("glu", dim, x.ndim)
    joined = prims.cat([g * gate, g * first * (gate * (1 - gate))], dim)
    return clang.convert(joined, self.dtype)


prims.register_vjp(glu, input=lambda g, input, dim: glu_backward(g, input, dim))
