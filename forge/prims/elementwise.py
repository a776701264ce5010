"""Elementwise prims: one shape, one dtype and one device in, broadcasting and promotion done by clang.

A binary prim takes a number in place of one tensor; the number has the tensor's dtype.
"""

import math
from collections.abc import Callable
from enum import Enum

import torch

from forge.ir import Number, Symbol, TensorProxy, check, get_grad, needs_grad, put_grad, register_grad
from forge.prims.core import (
    check_number_or_tensor,
    check_same_device,
    check_same_shape,
    check_tensor,
    like,
    make_prim,
)

TensorOrNumber = TensorProxy | Number


class Accepts(Enum):
    """The dtypes that an elementwise prim takes."""

    FLOAT = "a floating point or complex dtype"
    REAL = "a real dtype"
    NUMERIC = "any dtype but bool"
    INTEGER = "an integer dtype or bool"
    ANY = "any dtype"

    def takes(self, dtype: torch.dtype) -> bool:
        if self is Accepts.FLOAT:
            return dtype.is_floating_point or dtype.is_complex
        if self is Accepts.REAL:
            return not dtype.is_complex
        if self is Accepts.NUMERIC:
            return dtype != torch.bool
        if self is Accepts.INTEGER:
            return not (dtype.is_floating_point or dtype.is_complex)
        return True


FLOAT, REAL, NUMERIC, INTEGER, ANY = Accepts


def check_dtype(op: str, x: TensorProxy, accepts: Accepts) -> None:
    """Raises TypeError unless `accepts` takes x's dtype."""
    check(
        accepts.takes(x.dtype),
        lambda: f"{op}: x is {x}, but must have {accepts.value}; convert it first, as clang.{op.partition('.')[2]} does",
        TypeError,
    )


def _unary(name: str, meaning: str, *, accepts: Accepts, result: torch.dtype | None = None) -> Symbol:
    op = f"prims.{name}"

    def meta(x: TensorProxy) -> TensorProxy:
        check_tensor(op, x=x)
        check_dtype(op, x, accepts)
        return like(x, dtype=result)

    meta.__doc__ = f"{meaning}, elementwise.\n\nDtypes: {accepts.value}; out has {result or 'the same'}."
    return make_prim(name, name, meta=meta)


def _binary(name: str, meaning: str, *, accepts: Accepts, result: torch.dtype | None = None) -> Symbol:
    op = f"prims.{name}"

    def meta(a: TensorOrNumber, b: TensorOrNumber) -> TensorProxy:
        check_number_or_tensor(op, a=a, b=b)
        tensors = [value for value in (a, b) if isinstance(value, TensorProxy)]
        check(bool(tensors), lambda: f"{op}: a and b are numbers, but one must be a tensor", TypeError)
        for tensor in tensors:
            check_dtype(op, tensor, accepts)
        if len(tensors) == 2:
            check_same_shape(op, a, b)
            check(
                a.dtype == b.dtype, lambda: f"{op}: a is {a} and b is {b}, but must have one dtype", TypeError
            )
        device = check_same_device(op, a, b)
        out = like(tensors[0], dtype=result)
        out.device = device
        return out

    meta.__doc__ = f"{meaning}, elementwise.\n\nDtypes: {accepts.value}, one for both; out has {result or 'the same'}."
    return make_prim(name, name, meta=meta)


# unary, floating point

acos = _unary("acos", "arc cosine", accepts=FLOAT)
acosh = _unary("acosh", "inverse hyperbolic cosine", accepts=FLOAT)
asin = _unary("asin", "arc sine", accepts=FLOAT)
asinh = _unary("asinh", "inverse hyperbolic sine", accepts=FLOAT)
atan = _unary("atan", "arc tangent", accepts=FLOAT)
atanh = _unary("atanh", "inverse hyperbolic tangent", accepts=FLOAT)
cos = _unary("cos", "cosine", accepts=FLOAT)
cosh = _unary("cosh", "hyperbolic cosine", accepts=FLOAT)
digamma = _unary("digamma", "logarithmic derivative of the gamma function", accepts=FLOAT)
erf = _unary("erf", "error function", accepts=FLOAT)
erfc = _unary("erfc", "1 - erf(x)", accepts=FLOAT)
erfinv = _unary("erfinv", "inverse of erf", accepts=FLOAT)
exp = _unary("exp", "e^x", accepts=FLOAT)
exp2 = _unary("exp2", "2^x", accepts=FLOAT)
expm1 = _unary("expm1", "e^x - 1, accurate near 0", accepts=FLOAT)
lgamma = _unary("lgamma", "log of the absolute value of the gamma function", accepts=FLOAT)
log = _unary("log", "natural logarithm", accepts=FLOAT)
log10 = _unary("log10", "logarithm to base 10", accepts=FLOAT)
log1p = _unary("log1p", "log(1 + x), accurate near 0", accepts=FLOAT)
log2 = _unary("log2", "logarithm to base 2", accepts=FLOAT)
reciprocal = _unary("reciprocal", "1 / x", accepts=FLOAT)
rsqrt = _unary("rsqrt", "1 / sqrt(x)", accepts=FLOAT)
sigmoid = _unary("sigmoid", "1 / (1 + e^-x)", accepts=FLOAT)
sin = _unary("sin", "sine", accepts=FLOAT)
sinh = _unary("sinh", "hyperbolic sine", accepts=FLOAT)
sqrt = _unary("sqrt", "square root", accepts=FLOAT)
tan = _unary("tan", "tangent", accepts=FLOAT)
tanh = _unary("tanh", "hyperbolic tangent", accepts=FLOAT)

# unary, any dtype

abs = _unary("abs", "absolute value of a real number", accepts=REAL)
bitwise_not = _unary("bitwise_not", "bitwise complement; logical not of a bool", accepts=INTEGER)
ceil = _unary("ceil", "the smallest integer that is not below x", accepts=REAL)
floor = _unary("floor", "the largest integer that is not above x", accepts=REAL)
isfinite = _unary("isfinite", "whether x is neither infinite nor nan", accepts=ANY, result=torch.bool)
isinf = _unary("isinf", "whether x is infinite", accepts=ANY, result=torch.bool)
isnan = _unary("isnan", "whether x is nan", accepts=ANY, result=torch.bool)
neg = _unary("neg", "-x", accepts=NUMERIC)
round = _unary("round", "the nearest integer, ties to even", accepts=REAL)
sign = _unary("sign", "-1, 0 or 1", accepts=REAL)
signbit = _unary("signbit", "whether the sign bit is set", accepts=REAL, result=torch.bool)
trunc = _unary("trunc", "the integer part", accepts=REAL)

# binary

add = _binary("add", "a + b (logical or of bools)", accepts=ANY)
atan2 = _binary("atan2", "the angle of the point (b, a)", accepts=FLOAT)
bitwise_and = _binary("bitwise_and", "a & b", accepts=INTEGER)
bitwise_or = _binary("bitwise_or", "a | b", accepts=INTEGER)
bitwise_xor = _binary("bitwise_xor", "a ^ b", accepts=INTEGER)
copysign = _binary("copysign", "a with the sign of b", accepts=FLOAT)
div = _binary("div", "a / b", accepts=FLOAT)
eq = _binary("eq", "a == b", accepts=ANY, result=torch.bool)
floor_divide = _binary("floor_divide", "floor(a / b)", accepts=REAL)
fmod = _binary("fmod", "the remainder with the sign of a", accepts=REAL)
ge = _binary("ge", "a >= b", accepts=REAL, result=torch.bool)
gt = _binary("gt", "a > b", accepts=REAL, result=torch.bool)
hypot = _binary("hypot", "sqrt(a^2 + b^2) without overflow", accepts=FLOAT)
le = _binary("le", "a <= b", accepts=REAL, result=torch.bool)
lt = _binary("lt", "a < b", accepts=REAL, result=torch.bool)
maximum = _binary("maximum", "the larger of a and b, nan if either is", accepts=REAL)
minimum = _binary("minimum", "the smaller of a and b, nan if either is", accepts=REAL)
mul = _binary("mul", "a * b (logical and of bools)", accepts=ANY)
ne = _binary("ne", "a != b", accepts=ANY, result=torch.bool)
nextafter = _binary("nextafter", "the next number after a towards b", accepts=FLOAT)
pow = _binary("pow", "a^b", accepts=ANY)
remainder = _binary("remainder", "the remainder with the sign of b", accepts=REAL)
shift_left = _binary("shift_left", "a << b", accepts=INTEGER)
shift_right = _binary("shift_right", "a >> b, keeping the sign", accepts=INTEGER)
sub = _binary("sub", "a - b", accepts=NUMERIC)


def _where_meta(condition: TensorProxy, a: TensorOrNumber, b: TensorOrNumber) -> TensorProxy:
    """condition ? a : b, elementwise.

    Shapes: one for condition and the tensors among a and b.
    Dtypes: condition is bool; a and b have one dtype, which out has.
    """
    check_tensor("prims.where", condition=condition)
    check(
        condition.dtype == torch.bool,
        lambda: f"prims.where: condition is {condition}, but must be bool; compare it with 0 first",
        TypeError,
    )
    tensors = [value for value in (a, b) if isinstance(value, TensorProxy)]
    check(bool(tensors), lambda: "prims.where: a and b are numbers, but one must be a tensor", TypeError)
    check_same_shape("prims.where", condition, *tensors)
    check(
        tensors[0].dtype == tensors[-1].dtype,
        lambda: f"prims.where: a is {a} and b is {b}, but must have one dtype",
        TypeError,
    )
    device = check_same_device("prims.where", condition, *tensors)
    out = like(tensors[0])
    out.device = device
    return out


where = make_prim("where", "where", meta=_where_meta)


def _convert_meta(x: TensorProxy, dtype: torch.dtype) -> TensorProxy:
    """x with another dtype. Source: torch.Tensor.to."""
    check_tensor("prims.convert_element_type", x=x)
    check(
        isinstance(dtype, torch.dtype),
        lambda: f"prims.convert_element_type: dtype is {dtype!r}, but must be a torch.dtype",
        TypeError,
    )
    return like(x, dtype=dtype)


convert_element_type = make_prim("convert_element_type", "convert_element_type", meta=_convert_meta)


# gradient rules


def _register_unary(prim: Symbol, derivative: Callable[[TensorProxy, TensorProxy], TensorProxy | Number]) -> None:
    """The rule of a unary prim whose derivative is an expression in x and out."""

    @register_grad(prim)
    def rule(x: TensorProxy) -> TensorProxy:
        out = prim(x)
        put_grad(x, get_grad(out) * derivative(x, out))
        return out


_TWO_OVER_SQRT_PI = 2 / math.sqrt(math.pi)

for _prim, _derivative in {
    acos: lambda x, out: -rsqrt(1 - x * x),
    acosh: lambda x, out: rsqrt(x * x - 1),
    asin: lambda x, out: rsqrt(1 - x * x),
    asinh: lambda x, out: rsqrt(x * x + 1),
    atan: lambda x, out: reciprocal(x * x + 1),
    atanh: lambda x, out: reciprocal(1 - x * x),
    cos: lambda x, out: -sin(x),
    cosh: lambda x, out: sinh(x),
    erf: lambda x, out: exp(-(x * x)) * _TWO_OVER_SQRT_PI,
    erfc: lambda x, out: exp(-(x * x)) * -_TWO_OVER_SQRT_PI,
    erfinv: lambda x, out: exp(out * out) * (1 / _TWO_OVER_SQRT_PI),
    exp: lambda x, out: out,
    exp2: lambda x, out: out * math.log(2),
    expm1: lambda x, out: out + 1,
    lgamma: lambda x, out: digamma(x),
    log: lambda x, out: reciprocal(x),
    log10: lambda x, out: reciprocal(x * math.log(10)),
    log1p: lambda x, out: reciprocal(x + 1),
    log2: lambda x, out: reciprocal(x * math.log(2)),
    reciprocal: lambda x, out: -(out * out),
    rsqrt: lambda x, out: out * out * out * -0.5,
    sigmoid: lambda x, out: out * (1 - out),
    sin: lambda x, out: cos(x),
    sinh: lambda x, out: cosh(x),
    sqrt: lambda x, out: 0.5 / out,
    tan: lambda x, out: out * out + 1,
    tanh: lambda x, out: 1 - out * out,
    abs: lambda x, out: sign(x),
}.items():
    _register_unary(_prim, _derivative)


@register_grad(neg)
def _neg_grad(x: TensorProxy) -> TensorProxy:
    out = neg(x)
    put_grad(x, -get_grad(out))
    return out


def _register_piecewise_constant(prim: Symbol) -> None:
    """The rule of a prim that is constant almost everywhere: torch gives zeros, not None."""

    @register_grad(prim)
    def rule(x: TensorProxy) -> TensorProxy:
        out = prim(x)
        put_grad(x, get_grad(out) * 0)
        return out


for _prim in (ceil, floor, round, sign, trunc):
    _register_piecewise_constant(_prim)


@register_grad(where)
def _where_grad(condition: TensorProxy, a: TensorOrNumber, b: TensorOrNumber) -> TensorProxy:
    out = where(condition, a, b)
    g = get_grad(out)
    put_grad(a, where(condition, g, 0))
    put_grad(b, where(condition, 0, g))
    return out


@register_grad(convert_element_type)
def _convert_grad(x: TensorProxy, dtype: torch.dtype) -> TensorProxy:
    out = convert_element_type(x, dtype)
    put_grad(x, get_grad(out))  # put_grad converts back
    return out


# A binary derivative maps (a, b, out, g) to a pair of thunks, one per operand. clang's broadcasting twin of a prim
# (clang.mul of prims.mul) takes its rule from this table.
BinaryDerivative = Callable[..., tuple[Callable | None, Callable | None]]
binary_derivatives: dict[Symbol, BinaryDerivative] = {}


def binary_rule(symbol: Symbol, derivative: BinaryDerivative) -> None:
    """Registers the rule of a binary symbol from its derivative."""

    @register_grad(symbol)
    def rule(a: TensorOrNumber, b: TensorOrNumber) -> TensorProxy:
        out = symbol(a, b)
        g = get_grad(out)
        for operand, thunk in zip((a, b), derivative(a, b, out, g), strict=True):
            if thunk is not None and needs_grad(operand):
                put_grad(operand, thunk())
        return out


def _pow_derivative(a: TensorOrNumber, b: TensorOrNumber, out: TensorProxy, g: TensorProxy) -> tuple:
    def of_base() -> TensorProxy:
        if isinstance(b, TensorProxy):
            return _where(b == 0, 0, g * (b * a ** (b - 1)))
        if b == 2:
            return g * (a * 2)
        return g * 0 if b == 0 else g * (a ** (b - 1) * b)

    def of_exponent() -> TensorProxy:
        log_a = log(a) if isinstance(a, TensorProxy) else (math.log(a) if a > 0 else -math.inf)
        slope = g * (out * log_a)
        if isinstance(a, TensorProxy):
            return _where((a == 0) & (b >= 0), 0, slope)
        return _where(b >= 0, 0, slope) if a == 0 else slope

    return of_base, of_exponent


def _where(condition: TensorProxy, a: TensorOrNumber, b: TensorOrNumber) -> TensorProxy:
    return condition.where(a, b)


def _extremum_derivative(wins: Callable) -> BinaryDerivative:
    """Ties share the gradient, as in torch."""

    def derivative(a: TensorOrNumber, b: TensorOrNumber, out: TensorProxy, g: TensorProxy) -> tuple:
        def of(x: TensorOrNumber, y: TensorOrNumber) -> Callable:
            return lambda: _where(x == y, g * 0.5, _where(wins(x, y), g, 0))

        return of(a, b), of(b, a)

    return derivative


binary_derivatives.update(
    {
        add: lambda a, b, out, g: (lambda: g, lambda: g),
        sub: lambda a, b, out, g: (lambda: g, lambda: -g),
        mul: lambda a, b, out, g: (lambda: g * b, lambda: g * a),
        div: lambda a, b, out, g: (lambda: g / b, lambda: -(g * (out / b))),
        pow: _pow_derivative,
        maximum: _extremum_derivative(lambda x, y: x > y),
        minimum: _extremum_derivative(lambda x, y: x < y),
        atan2: lambda a, b, out, g: (lambda: g * (b / (a * a + b * b)), lambda: g * (-a / (a * a + b * b))),
        hypot: lambda a, b, out, g: (lambda: g * (a / out), lambda: g * (b / out)),
        fmod: lambda a, b, out, g: (lambda: g, lambda: -(g * (a / b).trunc())),
        remainder: lambda a, b, out, g: (lambda: g, lambda: -(g * (a / b).floor())),
        floor_divide: lambda a, b, out, g: (lambda: g * 0, lambda: g * 0),
        copysign: lambda a, b, out, g: (lambda: g * (out * a).sign(), lambda: g * 0),
    }
)

for _prim, _derivative in binary_derivatives.items():
    binary_rule(_prim, _derivative)
