"""The elementwise functions of torch that take several steps: logarithms of sums, entropies, gamma functions."""

import builtins
import math
from collections.abc import Callable
from typing import cast

import torch

from forge import clang, prims
from forge.ir import Number, Symbol, TensorProxy, get_grad, needs_grad, put_grad, register_grad
from forge.prims.core import torch_check
from forge.prims.special_functions import BESSEL, POLYNOMIALS
from forge.torchlang.aliases import TensorOrNumber, check_operands, torchaliases
from forge.torchlang.core import torchsymbol

aten = torch.ops.aten


def _as_float(x: TensorProxy) -> TensorProxy:
    """Convert integers to the default float dtype."""
    return clang.convert(x, clang.compute_dtype(x, kind=clang.Promotion.INT_TO_FLOAT))


def _log_add(name: str, log_one_plus: Callable, power: Symbol) -> Symbol:
    def body(input: TensorProxy, other: TensorProxy) -> TensorProxy:
        a, b = clang.prepare(name, input, other)
        prims.check_dtype(name, a, prims.FLOAT if power is clang.exp else prims.REAL)
        dtype = a.dtype
        a, b = clang.widen(a), clang.widen(b)
        if dtype.is_complex:  # of the larger real part
            swapped = prims.real(a) < prims.real(b)
            a, b = clang.where(swapped, b, a), clang.where(swapped, a, b)
            return clang.where(clang.isinf(prims.real(a)) & (a == b), a, a + log_one_plus(power(b - a)))
        tail = log_one_plus(power(-clang.abs(a - b)))
        out = clang.where(clang.isinf(a) & (a == b), a, clang.maximum(a, b) + tail)
        return clang.convert(out, dtype)

    body.__name__, body.__doc__ = (
        name,
        "The logarithm of the sum of two powers, without overflow. Dtypes: floating point.",
    )
    symbol = torchaliases(name)(body)

    @register_grad(symbol)
    def rule(input: TensorProxy, other: TensorProxy) -> TensorProxy:
        out = symbol(input, other)
        g = get_grad(out)
        if needs_grad(input):
            put_grad(input, g / (clang.conj(power(other - input)) + 1))
        if needs_grad(other):
            put_grad(other, g / (clang.conj(power(input - other)) + 1))
        return out

    return symbol


logaddexp = _log_add("logaddexp", clang.log1p, clang.exp)
logaddexp2 = _log_add("logaddexp2", lambda x: clang.log1p(x) / math.log(2), clang.exp2)


def _times_log(name: str, logarithm: Symbol, argument: Callable) -> Symbol:
    """Return the symbol of input * logarithm(other), with 0 where input is 0."""

    def body(input: TensorOrNumber, other: TensorOrNumber) -> TensorProxy:
        check_operands(name, input=input, other=other)
        dtype = clang.compute_dtype(input, other, kind=clang.Promotion.INT_TO_FLOAT)
        for operand in (input, other):
            if isinstance(operand, TensorProxy):
                prims.check_dtype(name, operand, prims.REAL)
        device = next(x.device for x in (input, other) if isinstance(x, TensorProxy))
        a, b = (
            clang.convert(x, dtype) if isinstance(x, TensorProxy) else prims.full((), x, dtype, device)
            for x in (input, other)
        )
        return clang.where(clang.isnan(b), b, clang.where(clang.eq(a, 0), 0.0, a * logarithm(b)))

    body.__name__, body.__doc__ = name, _times_log.__doc__
    symbol = torchaliases(name)(body)

    @register_grad(symbol)
    def rule(input: TensorOrNumber, other: TensorOrNumber) -> TensorProxy:
        out = symbol(input, other)
        g = get_grad(out)
        shifted = argument(other)
        if needs_grad(input):
            put_grad(input, clang.where((input == 0) & (shifted <= 0), 0.0, symbol(g, other)))  # one kernel, as torch's
        if needs_grad(other):
            put_grad(other, g * input / shifted)
        return out

    return symbol


xlogy = _times_log("xlogy", clang.log, lambda other: other)
xlog1py = _times_log("xlog1py", clang.log1p, lambda other: other + 1)


@torchaliases("sinc")
def sinc(input: TensorProxy) -> TensorProxy:
    """Return sin(pi x) / (pi x), with 1 at 0."""
    x = _as_float(input)
    dtype = x.dtype
    product = clang.widen(x) * math.pi
    out = clang.where(clang.eq(product, 0), 1.0, clang.sin(product) / product)
    return clang.convert(out, dtype)


@register_grad(sinc)
def _sinc_grad(input: TensorProxy) -> TensorProxy:
    out = sinc(input)
    x, square = input * math.pi, input * input * math.pi
    at_zero = clang.eq(square, 0)  # so it is for tiny values
    slope = (x * clang.cos(x) - clang.sin(x)) / clang.where(at_zero, 1, square)
    slope = clang.where(at_zero, input * (-(math.pi**2) / 3), slope)  # 0, for which eager's second gradient is nan
    put_grad(input, get_grad(out) * clang.conj(slope))
    return out


@torchaliases("logit")
def logit(input: TensorProxy, eps: float | None = None) -> TensorProxy:
    """Return log(x / (1 - x)), with x limited to [eps, 1 - eps] if eps is given."""
    prims.check_dtype("logit", input, prims.REAL)
    x = _as_float(input)
    dtype = x.dtype
    x = clang.widen(x)
    if eps is not None:
        x = clang.where(x < eps, eps, clang.where(x > 1 - eps, 1 - eps, x))
    return clang.convert(clang.log(x / (1 - x)), dtype)


@torchsymbol(aten.logit_backward.default)
def logit_backward(grad_output: TensorProxy, self: TensorProxy, eps: float | None = None) -> TensorProxy:
    """Return the gradient of logit."""
    g, x = clang.widen(grad_output), clang.widen(self)
    low, outside = (0.0, math.nan) if eps is None else (eps, 0.0)
    slope = clang.where((x >= low) & (x <= 1 - low), g / (x * (1 - x)), outside)
    return clang.convert(slope, self.dtype)


prims.register_vjp(logit, input=lambda g, input, eps: logit_backward(g, _as_float(input), eps))


@torchaliases("entr")
def entr(input: TensorProxy) -> TensorProxy:
    """Return -x log(x), with 0 at 0 and -inf below."""
    x = _as_float(input)
    dtype = x.dtype
    x = clang.widen(x)
    below = clang.where(clang.eq(x, 0), 0.0, clang.where(clang.isnan(x), x, -math.inf))
    return clang.convert(clang.where(x > 0, -x * clang.log(x), below), dtype)


prims.register_vjp(entr, input=lambda g, input: g * -(clang.log(input) + 1))


@torchaliases("ndtr")
def ndtr(input: TensorProxy) -> TensorProxy:
    """Return the standard normal cumulative distribution function at x."""
    x = _as_float(input)
    dtype = x.dtype
    scaled = clang.widen(x) * math.sqrt(0.5)
    tail = clang.erfc(clang.abs(scaled)) * 0.5
    return clang.convert(clang.where(scaled < 0, tail, 1 - tail), dtype)


@register_grad(ndtr)
def _ndtr_grad(input: TensorProxy) -> TensorProxy:
    out = ndtr(input)
    scaled = input * math.sqrt(0.5)
    slope = clang.exp(-clang.square(scaled)) * (2 / math.sqrt(math.pi))
    put_grad(input, slope * (get_grad(out) * 0.5) * math.sqrt(0.5))
    return out


@torchsymbol(torch.polygamma, torch.special.polygamma)
def polygamma(n: int, input: TensorProxy) -> TensorProxy:
    """Return the n-th derivative of digamma."""
    return prims.polygamma(n, _as_float(input))


@torchsymbol(torch.Tensor.polygamma, inplace=torch.Tensor.polygamma_)
def tensor_polygamma(self: TensorProxy, n: int) -> TensorProxy:
    """Return the n-th derivative of digamma."""
    return prims.polygamma(n, _as_float(self))


@torchaliases("mvlgamma", "multigammaln")
def mvlgamma(input: TensorProxy, p: int) -> TensorProxy:
    """Return the log of the multivariate gamma function of dimension p."""
    torch_check(p >= 1, lambda: f"mvlgamma: p has to be greater than or equal to 1, but is {p}")
    x = _as_float(input)
    total = clang.lgamma(x)
    for i in range(1, p):
        total = total + clang.lgamma(x - i / 2)
    return total + p * (p - 1) / 4 * math.log(math.pi)


# of three tensors


@torchaliases("addcmul")
def addcmul(input: TensorProxy, tensor1: TensorProxy, tensor2: TensorProxy, *, value: Number = 1) -> TensorProxy:
    """Return input + value * tensor1 * tensor2."""
    product = tensor1 * tensor2
    return input + (product if isinstance(value, int) and value == 1 else product * value)


@torchaliases("addcdiv")
def addcdiv(input: TensorProxy, tensor1: TensorProxy, tensor2: TensorProxy, *, value: Number = 1) -> TensorProxy:
    """Return input + value * tensor1 / tensor2. Dtypes: floating point."""
    torch_check(
        clang.category(tensor1.dtype) > 1 or clang.category(tensor2.dtype) > 1,
        lambda: f"addcdiv: Integer division with addcdiv is no longer supported: {tensor1} by {tensor2}",
    )
    quotient = tensor1 / tensor2
    return input + (quotient if isinstance(value, int) and value == 1 else quotient * value)


prims.register_vjp(
    addcmul,
    input=lambda g: g,
    tensor1=lambda g, tensor2, value: g * clang.conj(tensor2 * value),
    tensor2=lambda g, tensor1, value: g * clang.conj(tensor1 * value),
)
prims.register_vjp(
    addcdiv,
    input=lambda g: g,
    tensor1=lambda g, tensor2, value: g * clang.conj(value / tensor2),
    tensor2=lambda g, tensor1, tensor2, value: -g * clang.conj(tensor1 * value / (tensor2 * tensor2)),
)


@torchaliases("lerp")
def lerp(input: TensorProxy, end: TensorProxy, weight: TensorOrNumber) -> TensorProxy:
    """Return input + weight * (end - input). Dtypes: the same floating point dtype for all."""
    prims.check_dtype("lerp", input, prims.FLOAT)
    for name, operand in (("end", end), ("weight", weight)):
        torch_check(
            not isinstance(operand, TensorProxy) or operand.dtype == input.dtype,
            lambda name=name, operand=operand: (
                f"lerp: expected dtype {input.dtype} for `{name}` but got dtype {operand.dtype}"
            ),
        )
    dtype = input.dtype
    start, end = clang.widen(input), clang.widen(end)
    distance = end - start
    if isinstance(weight, TensorProxy):
        weight = clang.widen(weight)
        out = clang.where(clang.abs(weight) < 0.5, start + weight * distance, end - distance * (1 - weight))
    else:
        out = start + distance * weight if builtins.abs(cast(float, weight)) < 0.5 else end - distance * (1 - weight)
    return clang.convert(out, dtype)


prims.register_vjp(
    lerp,
    input=lambda g, weight: g * (1 - prims.conjugate(weight)),
    end=lambda g, weight: g * prims.conjugate(weight),
    weight=lambda g, input, end: g * clang.conj(end - input),
)


# Bessel and Airy functions and orthogonal polynomials of torch's library


def _define(name: str, body: Callable) -> Symbol:
    prim = getattr(prims, name)
    body.__name__, body.__doc__ = name, prim.meta.__doc__
    return torchsymbol(getattr(torch.special, name))(body)


def _of_input(name: str) -> Symbol:
    prim = getattr(prims, name)

    def body(input: TensorProxy) -> TensorProxy:
        return prim(input)

    return _define(name, body)


def _of_x(name: str) -> Symbol:
    prim = getattr(prims, name)

    def body(x: TensorProxy) -> TensorProxy:
        return prim(x)

    return _define(name, body)


def _polynomial(name: str) -> Symbol:
    prim = getattr(prims, name)

    def body(x: TensorOrNumber, n: TensorOrNumber) -> TensorProxy:
        check_operands(name, x=x, n=n)
        return prim(*clang.prepare(name, x, n, kind=clang.Promotion.INT_TO_FLOAT))

    return _define(name, body)


for _name in BESSEL:
    _make = _of_input if _name.startswith("modified") else _of_x  # torch's name of the argument
    globals()[_name] = _make(_name)
for _name in POLYNOMIALS:
    globals()[_name] = _polynomial(_name)
