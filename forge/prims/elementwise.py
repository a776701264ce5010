"""The elementwise prims: operands have the same shape, dtype and device, because clang broadcasts and promotes.

A binary prim takes a number in place of one tensor; the number has the tensor's dtype. The file is long because prims
and their derivatives belong together.
"""

import cmath
import math
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, cast, overload

import torch

from forge.ir import (
    Number,
    Symbol,
    Tag,
    TensorProxy,
    check,
    current_trace,
    differentiable,
    get_grad,
    needs_grad,
    put_grad,
    register_grad,
)
from forge.ir.pytree import tensors
from forge.prims.core import (
    check_number_or_tensor,
    check_same_device,
    check_same_shape,
    like,
    make_prim,
    primitive,
    register_vjp,
    statically_true,
    torch_check,
)
from forge.prims.creation import full
from forge.torch_internals.versions import TORCH

TensorOrNumber = TensorProxy | Number


class Accepts(Enum):
    """The dtypes that an elementwise prim takes."""

    FLOAT = "a floating point or complex dtype"
    REAL = "a real dtype"
    NUMERIC = "any dtype but bool"
    COUNTING = "a real dtype but bool"
    INTEGER = "an integer dtype or bool"
    COMPLEX = "a complex dtype"
    ANY = "any dtype"

    def takes(self, dtype: torch.dtype) -> bool:
        if self is Accepts.FLOAT:
            return dtype.is_floating_point or dtype.is_complex
        if self is Accepts.REAL:
            return not dtype.is_complex
        if self is Accepts.NUMERIC:
            return dtype != torch.bool
        if self is Accepts.COUNTING:
            return dtype != torch.bool and not dtype.is_complex
        if self is Accepts.INTEGER:
            return not (dtype.is_floating_point or dtype.is_complex)
        return dtype.is_complex or self is Accepts.ANY


FLOAT, REAL, NUMERIC, COUNTING, INTEGER, COMPLEX, ANY = Accepts


# They order numbers: for complex ones, torch raises TypeError since torch 2.15.
_ORDERING = frozenset(
    """aminmax fmax fmin isneginf isposinf maximum minimum prims.argmax prims.argmin prims.max_dim prims.min_dim
    prims.sort prims.topk""".split()
)


def check_dtype(op: str, x: TensorProxy, accepts: Accepts, error: type[Exception] = NotImplementedError) -> None:
    """Raise NotImplementedError, as torch's kernels do, or `error` unless `accepts` takes x's dtype."""
    if op in _ORDERING and x.dtype.is_complex and TORCH >= (2, 15):
        error = TypeError
    check(
        accepts.takes(x.dtype),
        lambda: f"{op}: not implemented for {x.dtype}: x is {x}, but must have {accepts.value}; convert it first",
        error,
    )


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a complex number's parts; a real dtype is returned itself."""
    return dtype.to_real() if dtype.is_complex else dtype


def _unary(
    name: str, meaning: str, *, accepts: Accepts, result: torch.dtype | None = None, tags: Iterable[Tag] = ()
) -> Symbol[TensorProxy]:
    op = f"prims.{name}"

    def meta(x: TensorProxy) -> TensorProxy:
        check_dtype(op, x, accepts)
        return like(x, dtype=result)

    meta.__doc__ = f"{meaning}, elementwise.\n\nDtypes: {accepts.value}; out has {result or 'the same'}."
    return make_prim(name, name, meta=meta, tags=tags)


def _to_real(name: str, meaning: str, accepts: Accepts, tags: Iterable[Tag] = ()) -> Symbol[TensorProxy]:
    """Return a function of complex numbers whose values are real."""
    op = f"prims.{name}"

    def meta(x: TensorProxy) -> TensorProxy:
        check_dtype(op, x, accepts)
        return like(x, dtype=real_dtype(x.dtype))

    meta.__doc__ = f"{meaning}, elementwise.\n\nDtypes: {accepts.value}; out has that of x's parts."
    return make_prim(name, name, meta=meta, tags=tags)


def _binary(
    name: str, meaning: str, *, accepts: Accepts, result: torch.dtype | None = None, tags: Iterable[Tag] = ()
) -> Symbol[TensorProxy]:
    op = f"prims.{name}"

    def meta(a: TensorOrNumber, b: TensorOrNumber) -> TensorProxy:
        check_number_or_tensor(op, a=a, b=b)
        tensors = [value for value in (a, b) if isinstance(value, TensorProxy)]
        check(bool(tensors), lambda: f"{op}: a and b are numbers, but one must be a tensor", TypeError)
        for tensor in tensors:
            check_dtype(op, tensor, accepts)
        if len(tensors) == 2:
            check_same_shape(op, *tensors)
            one_dtype = tensors[0].dtype == tensors[1].dtype
            check(one_dtype, lambda: f"{op}: a is {a} and b is {b}, but must have one dtype", TypeError)
        device = check_same_device(op, a, b)
        out = like(tensors[0], dtype=result)
        out.device = device
        return out

    meta.__doc__ = f"{meaning}, elementwise.\n\nDtypes: {accepts.value}, one for both; out has {result or 'the same'}."
    return make_prim(name, name, meta=meta, tags=tags)


# torch has derivatives of these since torch 2.15
_NO_GRADIENT = () if TORCH >= (2, 15) else (Tag.NOT_DIFFERENTIABLE,)

# unary, floating point

acos = _unary("acos", "arc cosine", accepts=FLOAT)
acosh = _unary("acosh", "inverse hyperbolic cosine", accepts=FLOAT)
asin = _unary("asin", "arc sine", accepts=FLOAT)
asinh = _unary("asinh", "inverse hyperbolic sine", accepts=FLOAT)
atan = _unary("atan", "arc tangent", accepts=FLOAT)
atanh = _unary("atanh", "inverse hyperbolic tangent", accepts=FLOAT)
bessel_j0 = _unary("bessel_j0", "Bessel function of the first kind, order 0", accepts=FLOAT, tags=_NO_GRADIENT)
bessel_j1 = _unary("bessel_j1", "Bessel function of the first kind, order 1", accepts=FLOAT, tags=_NO_GRADIENT)
bessel_y0 = _unary("bessel_y0", "Bessel function of the second kind, order 0", accepts=FLOAT, tags=_NO_GRADIENT)
bessel_y1 = _unary("bessel_y1", "Bessel function of the second kind, order 1", accepts=FLOAT, tags=_NO_GRADIENT)
cos = _unary("cos", "cosine", accepts=FLOAT)
cosh = _unary("cosh", "hyperbolic cosine", accepts=FLOAT)
digamma = _unary("digamma", "logarithmic derivative of the gamma function", accepts=FLOAT)
erf = _unary("erf", "error function", accepts=FLOAT)
erfc = _unary("erfc", "1 - erf(x)", accepts=FLOAT)
erfcx = _unary("erfcx", "e^(x^2) * erfc(x)", accepts=FLOAT)
erfinv = _unary("erfinv", "inverse of erf", accepts=FLOAT)
exp = _unary("exp", "e^x", accepts=FLOAT)
exp2 = _unary("exp2", "2^x", accepts=FLOAT)
expm1 = _unary("expm1", "e^x - 1, accurate near 0", accepts=FLOAT)
i0 = _unary("i0", "modified Bessel function of the first kind, order 0", accepts=FLOAT)
i0e = _unary("i0e", "i0(x) * e^-|x|", accepts=FLOAT)
i1 = _unary("i1", "modified Bessel function of the first kind, order 1", accepts=FLOAT)
i1e = _unary("i1e", "i1(x) * e^-|x|", accepts=FLOAT)
lgamma = _unary("lgamma", "log of the absolute value of the gamma function", accepts=FLOAT)
log = _unary("log", "natural logarithm", accepts=FLOAT)
log10 = _unary("log10", "logarithm to base 10", accepts=FLOAT)
log1p = _unary("log1p", "log(1 + x), accurate near 0", accepts=FLOAT)
log2 = _unary("log2", "logarithm to base 2", accepts=FLOAT)
log_ndtr = _unary("log_ndtr", "log of the area under the standard normal density up to x", accepts=FLOAT)
ndtri = _unary("ndtri", "where the area under the standard normal density is x", accepts=FLOAT)
reciprocal = _unary("reciprocal", "1 / x", accepts=FLOAT)
rsqrt = _unary("rsqrt", "1 / sqrt(x)", accepts=FLOAT)
sigmoid = _unary("sigmoid", "1 / (1 + e^-x)", accepts=FLOAT)
sin = _unary("sin", "sine", accepts=FLOAT)
sinh = _unary("sinh", "hyperbolic sine", accepts=FLOAT)
sqrt = _unary("sqrt", "square root", accepts=FLOAT)
tan = _unary("tan", "tangent", accepts=FLOAT)
tanh = _unary("tanh", "hyperbolic tangent", accepts=FLOAT)

# unary, any dtype

abs = _to_real("abs", "the absolute value", NUMERIC)
angle = _to_real("angle", "the angle in the complex plane, from -pi to pi", FLOAT)
bitwise_not = _unary("bitwise_not", "bitwise complement; logical not of a bool", accepts=INTEGER)
conj = _unary("conj", "the complex conjugate", accepts=ANY, tags=[Tag.MAY_BE_VIEW])
real = _to_real("real", "the real part", ANY, tags=[Tag.MAY_BE_VIEW])
imag = _to_real("imag", "the imaginary part of a complex number", COMPLEX, tags=[Tag.MAY_BE_VIEW])
sgn = _unary("sgn", "x / |x| of a complex number, 0 at 0", accepts=COMPLEX)
ceil = _unary("ceil", "the smallest integer that is not below x", accepts=COUNTING)
floor = _unary("floor", "the largest integer that is not above x", accepts=COUNTING)
isfinite = _unary("isfinite", "whether x is neither infinite nor nan", accepts=ANY, result=torch.bool)
isinf = _unary("isinf", "whether x is infinite", accepts=ANY, result=torch.bool)
isnan = _unary("isnan", "whether x is nan", accepts=ANY, result=torch.bool)
neg = _unary("neg", "-x", accepts=NUMERIC)
round = _unary("round", "the nearest integer, ties to even", accepts=COUNTING)
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
floor_divide = _binary("floor_divide", "floor(a / b)", accepts=COUNTING)
fmod = _binary("fmod", "the remainder with the sign of a", accepts=COUNTING)
ge = _binary("ge", "a >= b", accepts=REAL, result=torch.bool)
gt = _binary("gt", "a > b", accepts=REAL, result=torch.bool)
heaviside = _binary("heaviside", "0 for a < 0, b for a == 0, 1 for a > 0", accepts=REAL)
hypot = _binary("hypot", "sqrt(a^2 + b^2) without overflow", accepts=FLOAT)
igamma = _binary("igamma", "regularized lower incomplete gamma function of order a at b", accepts=FLOAT)
igammac = _binary("igammac", "regularized upper incomplete gamma function of order a at b", accepts=FLOAT)
le = _binary("le", "a <= b", accepts=REAL, result=torch.bool)
lt = _binary("lt", "a < b", accepts=REAL, result=torch.bool)
maximum = _binary("maximum", "the larger of a and b, nan if either is", accepts=REAL)
minimum = _binary("minimum", "the smaller of a and b, nan if either is", accepts=REAL)
mul = _binary("mul", "a * b (logical and of bools)", accepts=ANY)
ne = _binary("ne", "a != b", accepts=ANY, result=torch.bool)
nextafter = _binary("nextafter", "the next number after a towards b", accepts=FLOAT)
pow = _binary("pow", "a^b", accepts=NUMERIC)
remainder = _binary("remainder", "the remainder with the sign of b", accepts=COUNTING)
shift_left = _binary("shift_left", "a << b", accepts=INTEGER)
shift_right = _binary("shift_right", "a >> b, keeping the sign", accepts=INTEGER)
sub = _binary("sub", "a - b", accepts=NUMERIC)
zeta = _binary("zeta", "Hurwitz zeta function of a at b", accepts=FLOAT)


@primitive()
def where(condition: TensorProxy, a: TensorOrNumber, b: TensorOrNumber) -> TensorProxy:
    """Return condition ? a : b, elementwise.

    Shapes: the same for condition and the tensors among a and b.
    Dtypes: condition is bool; a, b and out have the same dtype.
    """
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


@primitive()
def convert_element_type(x: TensorProxy, dtype: torch.dtype) -> TensorProxy:
    """Return x with another dtype. Source: torch.Tensor.to."""
    check(
        isinstance(dtype, torch.dtype),
        lambda: f"prims.convert_element_type: dtype is {dtype!r}, but must be a torch.dtype",
        TypeError,
    )
    return like(x, dtype=dtype)


@primitive(tags=[Tag.MAY_BE_VIEW])
def device_put(x: TensorProxy, device: torch.device, non_blocking: bool = False) -> TensorProxy:
    """Return x on another device. Source: torch.Tensor.to."""
    check(
        isinstance(device, torch.device),
        lambda: f"prims.device_put: device is {device!r}, but must be a torch.device",
        TypeError,
    )
    return current_trace().tensor(x.shape, x.dtype, device)


@primitive()
def polygamma(n: int, x: TensorProxy) -> TensorProxy:
    """Return the n-th derivative of digamma. Source: torch.polygamma.

    Dtypes: x is floating point. Raises: RuntimeError for a negative n.
    """
    check_dtype("prims.polygamma", x, FLOAT)
    torch_check(n >= 0, lambda: f"polygamma: n is {n}, but polygamma(n, x) does not support negative n")
    return like(x)


# gradient rules

_TWO_OVER_SQRT_PI = 2 / math.sqrt(math.pi)
_SQRT_TWO_PI = math.sqrt(2 * math.pi)
_LN2, _LN10 = math.log(2), math.log(10)

# The gradient of each unary prim, an expression in the incoming gradient g, the argument x and the output.
_UNARY_GRADIENTS: dict[Symbol, Callable[[TensorProxy, TensorProxy, TensorProxy], TensorProxy]] = {
    acos: lambda g, x, out: -(g * rsqrt(1 - x * x)),
    acosh: lambda g, x, out: g * (rsqrt(x + 1) * rsqrt(x - 1) if x.dtype.is_complex else rsqrt(x * x - 1)),
    asin: lambda g, x, out: g * rsqrt(1 - x * x),
    asinh: lambda g, x, out: g * rsqrt(x * x + 1),
    atan: lambda g, x, out: g / (x * x + 1),
    atanh: lambda g, x, out: g / (1 - x * x),
    bessel_j0: lambda g, x, out: g * -bessel_j1(x),
    bessel_j1: lambda g, x, out: g * i1_slope(x, lambda over_x: bessel_j0(x) - out * over_x),
    bessel_y0: lambda g, x, out: g * -bessel_y1(x),
    bessel_y1: lambda g, x, out: g * eq(x, 0).where(math.inf, bessel_y0(x) - out / x),
    cos: lambda g, x, out: -(g * sin(x)),
    cosh: lambda g, x, out: g * sinh(x),
    digamma: lambda g, x, out: g * polygamma(1, x),
    erf: lambda g, x, out: g * (exp(-(x * x)) * _TWO_OVER_SQRT_PI),
    erfc: lambda g, x, out: g * (exp(-(x * x)) * -_TWO_OVER_SQRT_PI),
    erfcx: lambda g, x, out: g * (x * out * 2 - _TWO_OVER_SQRT_PI),
    erfinv: lambda g, x, out: g * (exp(erfinv(x) * erfinv(x)) * (1 / _TWO_OVER_SQRT_PI)),
    exp: lambda g, x, out: g * out,
    exp2: lambda g, x, out: g * out * _LN2,
    expm1: lambda g, x, out: g * (out + 1),
    i0: lambda g, x, out: g * i1(x),
    i0e: lambda g, x, out: g * (i1e(x) - sign(x) * out),
    i1: lambda g, x, out: g * i1_slope(x, lambda over_x: i0(x) - out * over_x),
    i1e: lambda g, x, out: g * i1_slope(x, lambda over_x: i0e(x) - out * (sign(x) + over_x)),
    lgamma: lambda g, x, out: g * digamma(x),
    log: lambda g, x, out: g / x,
    log10: lambda g, x, out: g / (x * _LN10),
    log1p: lambda g, x, out: g / (x + 1),
    log2: lambda g, x, out: g / (x * _LN2),
    log_ndtr: lambda g, x, out: g * (exp(x * x * -0.5 - out) / _SQRT_TWO_PI),
    ndtri: lambda g, x, out: g * (exp(out * out * 0.5) * _SQRT_TWO_PI),
    neg: lambda g, x, out: -g,
    reciprocal: lambda g, x, out: -g * (out * out),
    rsqrt: lambda g, x, out: g * -0.5 * out**3,
    sigmoid: lambda g, x, out: g * (out * (1 - out)),
    sin: lambda g, x, out: g * cos(x),
    sinh: lambda g, x, out: g * cosh(x),
    sqrt: lambda g, x, out: g / (out * 2),
    tan: lambda g, x, out: g * (out * out + 1),
    tanh: lambda g, x, out: g * (1 - out * out),
}


def i1_slope(x: TensorProxy, slope: Callable[[TensorProxy], TensorProxy]) -> TensorProxy:
    """Return the slope as a function of 1 / x, which is 1/2 near 0; before 2.15, torch treats nan as 0."""
    tiny = torch.finfo(x.dtype).eps
    is_large = abs(x) > tiny
    if TORCH >= (2, 15):
        is_large = is_large | ne(x, x)
    return is_large.where(slope(reciprocal(is_large.where(x, tiny))), 0.5)


@overload
def conjugate(value: TensorProxy) -> TensorProxy: ...
@overload
def conjugate(value: Number) -> Number: ...
def conjugate(value: TensorOrNumber) -> TensorOrNumber:
    """Return the complex conjugate; a real value is returned itself."""
    if isinstance(value, TensorProxy):
        return conj(value) if value.dtype.is_complex else value
    return value.conjugate() if isinstance(value, complex) else value


def register_unary(prim: Symbol[TensorProxy], gradient: Callable[..., TensorProxy]) -> None:
    @register_grad(prim)
    def rule(x: TensorProxy) -> TensorProxy:
        out = prim(x)
        # linear in the gradient: this is g times the conjugate of the slope, which is not the slope of the conjugate if
        # x lies on a branch cut
        put_grad(x, conjugate(gradient(conjugate(get_grad(out)), x, out)))
        return out


for _prim, _gradient in _UNARY_GRADIENTS.items():
    register_unary(_prim, _gradient)


register_vjp(conj, x=lambda g: conj(g))


def direction(x: TensorProxy) -> TensorProxy:
    """Return x / |x|, with 0 at 0, in x's dtype."""
    return sgn(x) if x.dtype.is_complex else sign(x)


register_vjp(abs, x=lambda g, x: g * direction(x))
# put_grad makes it complex
register_vjp(real, x=lambda g: g)
register_vjp(imag, x=lambda g: g * 1j)


@register_grad(angle)
def _angle_grad(x: TensorProxy) -> TensorProxy:
    out = angle(x)
    g = get_grad(out)
    if x.dtype.is_complex:
        size = abs(x)
        put_grad(x, (x == 0).where(0, g * x / (size * size) * 1j))
    else:
        put_grad(x, zeros_like(g))
    return out


@register_grad(sgn)
def _sgn_grad(x: TensorProxy) -> TensorProxy:
    """Project the gradient to the direction orthogonal to x and divide by |x|: the length of x does not matter."""
    out = sgn(x)
    g = get_grad(out)
    across = (g - real(g * conj(out)) * out) / abs(x)
    put_grad(x, (x == 0).where(0, across))
    return out


def zeros_like(x: TensorProxy) -> TensorProxy:
    """Return zeros with x's shape, dtype and device."""
    return full(x.shape, 0, x.dtype, x.device)


# constant almost everywhere: torch gives zeros, not None
for _prim in (ceil, floor, round, sign, trunc):
    register_vjp(_prim, x=lambda g: zeros_like(g))


register_vjp(polygamma, x=lambda g, n, x: g * polygamma(n + 1, x))
register_vjp(where, a=lambda g, condition: where(condition, g, 0), b=lambda g, condition: where(condition, 0, g))
# put_grad converts back
register_vjp(convert_element_type, x=lambda g: g)
register_vjp(device_put, x=lambda g, x, non_blocking: device_put(g, x.device, non_blocking))


# A binary derivative maps (a, b, out, g) to a pair of thunks, one per operand; None if torch has no gradient. clang's
# broadcasting counterpart of a prim (clang.mul of prims.mul) takes its rule from this table.
Thunk = Callable[[], TensorProxy]
BinaryDerivative = Callable[..., tuple[Thunk | None, Thunk | None]]


@primitive(tags=[Tag.EFFECT, Tag.NOT_DIFFERENTIABLE])
def no_derivative(gradient: TensorProxy, of: str) -> TensorProxy:
    """Return the gradient of a function without a derivative in torch: it raises NotImplementedError, like torch's
    backward.

    Source: torch.floor_divide's backward.
    """
    return like(gradient)


def refuse_gradient(symbol: Symbol) -> None:
    """Register the rule of a prim whose results have a history in torch, although it has no derivative: the backward
    raises."""

    @register_grad(symbol)
    def rule(*args: Any, **kwargs: Any) -> Any:
        out = symbol(*args, **kwargs)
        for result in filter(differentiable, tensors(out)):
            no_derivative(get_grad(result), symbol.name)
        for x in filter(needs_grad, tensors((args, kwargs))):
            put_grad(x, full(x.shape, 0, x.dtype, x.device))
        return out


def binary_rule(symbol: Symbol[TensorProxy], derivative: BinaryDerivative) -> None:
    """Register the rule of a binary symbol from its derivative; if that is None, the backward raises."""

    @register_grad(symbol)
    def rule(a: TensorOrNumber, b: TensorOrNumber) -> TensorProxy:
        out = symbol(a, b)
        g = get_grad(out)
        conjugated = conjugate(g)  # as for the unary prims
        for operand, thunk, name in zip((a, b), derivative(a, b, out, conjugated), "ab", strict=True):
            if needs_grad(operand):
                gradient = no_derivative(conjugated, f"{symbol.name}: {name}") if thunk is None else thunk()
                put_grad(operand, g if gradient is conjugated else conjugate(gradient))
        return out


def log_of_number(number: Number) -> Number:
    """Return the logarithm of a number, or nan if it is negative, as in torch."""
    if isinstance(number, complex):
        return cmath.log(number) if number else -math.inf
    return math.log(cast(float, number)) if number > 0 else -math.inf if number == 0 else math.nan


def _pow_derivative(a: TensorOrNumber, b: TensorOrNumber, out: TensorProxy, g: TensorProxy) -> tuple[Thunk, Thunk]:
    def of_base() -> TensorProxy:
        assert isinstance(a, TensorProxy)  # otherwise it has no gradient
        if isinstance(b, TensorProxy):
            return (b == 0).where(0, g * (b * a ** (b - 1)))
        if statically_true(b == 2):
            return g * (a * 2)
        if statically_true(b == 0):
            return zeros_like(g)
        base = (
            a if statically_true(b != 0) else (full((), b, torch.float64, a.device) == 0).where(1, a)
        )  # for a symbol b
        return g * (base ** (b - 1) * b)

    def of_exponent() -> TensorProxy:
        assert isinstance(b, TensorProxy)
        slope = g * (out * (a.to(out.dtype).log() if isinstance(a, TensorProxy) else log_of_number(a)))
        if not isinstance(a, TensorProxy) and a != 0:
            return slope
        flat = (imag(b) == 0) & (real(b) >= 0) if b.dtype.is_complex else b >= 0
        return (((a == 0) & flat) if isinstance(a, TensorProxy) else flat).where(0, slope)

    return of_base, of_exponent


def _extremum_derivative(loses: Callable[..., TensorProxy]) -> BinaryDerivative:
    """Return the derivative of an extremum: ties share the gradient, as in torch; both operands have it where one is
    nan."""

    def derivative(a: TensorOrNumber, b: TensorOrNumber, out: TensorProxy, g: TensorProxy) -> tuple[Thunk, Thunk]:
        def of(x: TensorOrNumber, y: TensorOrNumber) -> Thunk:
            def thunk() -> TensorProxy:
                assert isinstance(x, TensorProxy)  # otherwise it has no gradient
                return (x == y).where(g * 0.5, loses(x, y).where(0, g))

            return thunk

        return of(a, b), of(b, a)

    return derivative


def _over_square(a: TensorOrNumber, b: TensorOrNumber) -> TensorProxy:
    """Return 1 / (a^2 + b^2), or 0 where that is infinite."""
    square = a * a + b * b
    assert isinstance(square, TensorProxy)
    at_zero = square == 0
    return at_zero.where(0, reciprocal(at_zero.where(1, square)))


def _ratio(out: TensorProxy, a: TensorProxy) -> TensorProxy:
    """Return out / a, or 0 where a is 0."""
    at_zero = a == 0
    return at_zero.where(0, out / at_zero.where(1, a))


def _igamma_slope(a: TensorOrNumber, b: TensorProxy) -> TensorProxy:
    log_gamma = a.lgamma() if isinstance(a, TensorProxy) else math.lgamma(cast(float, a))
    logarithm = (a - 1) * b.log() - b - log_gamma
    assert isinstance(logarithm, TensorProxy)
    return logarithm.exp()


def _next_zeta(a: TensorOrNumber, b: TensorProxy) -> TensorProxy:
    return (a + 1).zeta(b) if isinstance(a, TensorProxy) else zeta(a + 1, b)


binary_derivatives: dict[Symbol, BinaryDerivative] = {
    add: lambda a, b, out, g: (lambda: g, lambda: g),
    sub: lambda a, b, out, g: (lambda: g, lambda: -g),
    mul: lambda a, b, out, g: (lambda: g * b, lambda: g * a),
    div: lambda a, b, out, g: (lambda: g / b, lambda: -(g * (a / b / b))),  # a / b is the forward's: cse merges it
    pow: _pow_derivative,
    maximum: _extremum_derivative(lambda x, y: x < y),
    minimum: _extremum_derivative(lambda x, y: x > y),
    atan2: lambda a, b, out, g: (lambda: g * b * _over_square(a, b), lambda: g * -a * _over_square(a, b)),
    hypot: lambda a, b, out, g: (lambda: g * a / out, lambda: g * b / out),
    fmod: lambda a, b, out, g: (lambda: g, lambda: -(g * (a / b).trunc())),
    remainder: lambda a, b, out, g: (lambda: g, lambda: -(g * (a // b))),
    floor_divide: lambda a, b, out, g: (lambda: zeros_like(g), lambda: zeros_like(g)),
    copysign: lambda a, b, out, g: (lambda: g * _ratio(out, a), lambda: zeros_like(g)),
    nextafter: lambda a, b, out, g: (lambda: (a == b).where(0, g), lambda: zeros_like(g)),
    heaviside: lambda a, b, out, g: (None, None),
    igamma: lambda a, b, out, g: (None, lambda: g * _igamma_slope(a, b)),
    igammac: lambda a, b, out, g: (None, lambda: -(g * _igamma_slope(a, b))),
    zeta: lambda a, b, out, g: (None, lambda: g * -a * _next_zeta(a, b)),
}

for _prim, _derivative in binary_derivatives.items():
    binary_rule(_prim, _derivative)
