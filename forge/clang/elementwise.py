"""The elementwise operations with torch's broadcasting and type promotion."""

import builtins
from collections.abc import Callable
from typing import Any

import torch

from forge import prims
from forge.clang.core import broadcast, clangop, convert, prepare
from forge.clang.promotion import Promotion, category, compute_dtype
from forge.ir import Number, Symbol, TensorProxy
from forge.prims.core import torch_check

TensorOrNumber = TensorProxy | Number


def _define(prim: Symbol, body: Callable[..., TensorProxy], *methods: str) -> Symbol[TensorProxy]:
    body.__name__ = prim.name
    body.__doc__ = prim.__doc__
    return clangop(*methods)(body)


def _float_unary(prim: Symbol[TensorProxy]) -> Symbol[TensorProxy]:
    def body(x: TensorProxy) -> TensorProxy:
        return prim(convert(x, compute_dtype(x, kind=Promotion.INT_TO_FLOAT)))

    return _define(prim, body)


def _unary(prim: Symbol[TensorProxy], *methods: str) -> Symbol[TensorProxy]:
    return _define(prim, lambda x: prim(x), *methods)


def _integer_identity(prim: Symbol[TensorProxy]) -> Symbol[TensorProxy]:
    return _define(prim, lambda x: x if category(x.dtype) == 1 else prim(x))


acos = _float_unary(prims.acos)
acosh = _float_unary(prims.acosh)
angle = _float_unary(prims.angle)
asin = _float_unary(prims.asin)
asinh = _float_unary(prims.asinh)
atan = _float_unary(prims.atan)
atanh = _float_unary(prims.atanh)
bessel_j0 = _float_unary(prims.bessel_j0)
bessel_j1 = _float_unary(prims.bessel_j1)
bessel_y0 = _float_unary(prims.bessel_y0)
bessel_y1 = _float_unary(prims.bessel_y1)
cos = _float_unary(prims.cos)
cosh = _float_unary(prims.cosh)
digamma = _float_unary(prims.digamma)
erf = _float_unary(prims.erf)
erfc = _float_unary(prims.erfc)
erfcx = _float_unary(prims.erfcx)
erfinv = _float_unary(prims.erfinv)
exp = _float_unary(prims.exp)
exp2 = _float_unary(prims.exp2)
expm1 = _float_unary(prims.expm1)
i0 = _float_unary(prims.i0)
i0e = _float_unary(prims.i0e)
i1 = _float_unary(prims.i1)
i1e = _float_unary(prims.i1e)
lgamma = _float_unary(prims.lgamma)
log = _float_unary(prims.log)
log10 = _float_unary(prims.log10)
log1p = _float_unary(prims.log1p)
log2 = _float_unary(prims.log2)
log_ndtr = _float_unary(prims.log_ndtr)
ndtri = _float_unary(prims.ndtri)
reciprocal = _float_unary(prims.reciprocal)
rsqrt = _float_unary(prims.rsqrt)
sigmoid = _float_unary(prims.sigmoid)
sin = _float_unary(prims.sin)
sinh = _float_unary(prims.sinh)
sqrt = _float_unary(prims.sqrt)
tan = _float_unary(prims.tan)
tanh = _float_unary(prims.tanh)

ceil = _integer_identity(prims.ceil)
floor = _integer_identity(prims.floor)
round = _integer_identity(prims.round)
trunc = _integer_identity(prims.trunc)

abs = _unary(prims.abs)
bitwise_not = _unary(prims.bitwise_not, "invert")
isfinite = _unary(prims.isfinite)
isinf = _unary(prims.isinf)
isnan = _unary(prims.isnan)
neg = _unary(prims.neg)
sign = _unary(prims.sign)
signbit = _unary(prims.signbit)


@clangop()
def conj(x: TensorProxy) -> TensorProxy:
    """Return the complex conjugate; a real x is returned itself."""
    return prims.conj(x) if x.dtype.is_complex else x


@clangop()
def real(x: TensorProxy) -> TensorProxy:
    """Return the real part; a real x is returned itself."""
    return prims.real(x) if x.dtype.is_complex else x


@clangop()
def sgn(x: TensorProxy) -> TensorProxy:
    """Return x / |x|, with 0 at 0."""
    return prims.direction(x)


def squared_size(x: TensorProxy) -> TensorProxy:
    """Return |x|^2, a real number."""
    if not x.dtype.is_complex:
        return prims.mul(x, x)
    parts = prims.real(x), prims.imag(x)
    return prims.add(*[prims.mul(part, part) for part in parts])


def widen(x: TensorProxy) -> TensorProxy:
    """Return x in the precision in which torch's kernels compute several steps: float32 for half precision."""
    return convert(x, torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


def _binary(
    name: str, *methods: str, prim: str | None = None, kind: Promotion = Promotion.DEFAULT
) -> Symbol[TensorProxy]:
    target: Symbol[TensorProxy] = getattr(prims, prim or name)

    def body(a: TensorOrNumber, b: TensorOrNumber) -> TensorProxy:
        return target(*prepare(name, a, b, kind=kind))

    body.__name__ = name
    body.__doc__ = target.__doc__
    symbol = clangop(*methods)(body)
    if target in prims.binary_derivatives:
        prims.binary_rule(symbol, prims.binary_derivatives[target])
    return symbol


def _comparison(target: Symbol[TensorProxy], mirror: Symbol[TensorProxy]) -> Symbol[TensorProxy]:
    def body(a: TensorOrNumber, b: TensorOrNumber) -> TensorProxy:
        a, b = prepare(target.name, a, b, kind=Promotion.TO_BOOL)
        return target(a, b) if isinstance(a, TensorProxy) else mirror(b, a)  # torch compares no number with a tensor

    return _define(target, body)


eq = _comparison(prims.eq, prims.eq)
ne = _comparison(prims.ne, prims.ne)
lt = _comparison(prims.lt, prims.gt)
le = _comparison(prims.le, prims.ge)
gt = _comparison(prims.gt, prims.lt)
ge = _comparison(prims.ge, prims.le)

FLOAT = Promotion.INT_TO_FLOAT

add = _binary("add", "iadd")
atan2 = _binary("atan2", kind=FLOAT)
bitwise_and = _binary("bitwise_and", "and_", "iand")
bitwise_or = _binary("bitwise_or", "or_", "ior")
bitwise_xor = _binary("bitwise_xor", "xor", "ixor")
copysign = _binary("copysign", kind=FLOAT)
div = _binary("div", "truediv", "itruediv", kind=FLOAT)
floor_divide = _binary("floor_divide", "floordiv", "ifloordiv")
fmod = _binary("fmod")
heaviside = _binary("heaviside")
hypot = _binary("hypot")
igamma = _binary("igamma", kind=FLOAT)
igammac = _binary("igammac", kind=FLOAT)
maximum = _binary("maximum")
minimum = _binary("minimum")
mul = _binary("mul", "imul")
nextafter = _binary("nextafter")
remainder = _binary("remainder", "mod", "imod")
shift_left = _binary("shift_left", "lshift", "ilshift")
shift_right = _binary("shift_right", "rshift", "irshift")
sub = _binary("sub", "isub")
zeta = _binary("zeta", kind=FLOAT)


@clangop("ipow")
def pow(a: TensorOrNumber, b: TensorOrNumber) -> TensorProxy:
    """Raise a to the power b, elementwise. Raises: RuntimeError for an integer to a negative integer number."""
    a, b = prepare("pow", a, b)
    integers = isinstance(a, TensorProxy) and category(a.dtype) < 2
    torch_check(
        not integers or not isinstance(b, int) or b >= 0,
        lambda: f"pow: Integers to negative integer powers are not allowed: {a} to the power {b}; convert it first",
    )
    return prims.pow(a, b)


prims.binary_rule(pow, prims.binary_derivatives[prims.pow])


@clangop()
def where(condition: TensorProxy, a: TensorOrNumber, b: TensorOrNumber) -> TensorProxy:
    """Return condition ? a : b, elementwise. Shapes: broadcast together. Dtypes: condition is bool; a and b are
    promoted."""
    torch_check(
        condition.dtype in (torch.bool, torch.uint8),
        lambda: f"where: expected condition to be a boolean tensor, but it is {condition}; compare it with 0 first",
    )
    condition = convert(condition, torch.bool)
    dtype = compute_dtype(a, b)
    a, b = convert(a, dtype), convert(b, dtype)
    if not isinstance(a, TensorProxy) and not isinstance(b, TensorProxy):
        a = prims.full((), a, dtype, condition.device)
    condition, a, b = broadcast("where", condition, a, b)
    return prims.where(condition, a, b)


prims.register_vjp(where, a=lambda g, condition: where(condition, g, 0), b=lambda g, condition: where(condition, 0, g))


@clangop()
def to(x: TensorProxy, dtype: torch.dtype) -> TensorProxy:
    """Return x as `dtype`; x itself if it has that dtype."""
    return convert(x, dtype)


@clangop()
def square(x: TensorProxy) -> TensorProxy:
    """Return x * x. Dtypes: the square of a bool is int64."""
    x = convert(x, torch.int64) if x.dtype == torch.bool else x
    return prims.mul(x, x)


prims.register_vjp(square, x=lambda g, x: g * (conj(x) * 2))


@clangop()
def logical_not(x: TensorProxy) -> TensorProxy:
    """Return whether x is 0. Dtypes: any; out is bool."""
    return prims.bitwise_not(x) if x.dtype == torch.bool else prims.eq(x, 0)


def as_bool(x: Any) -> Any:
    """Return whether x, a tensor or a number, is not 0."""
    if not isinstance(x, TensorProxy):
        return builtins.bool(x)
    return x if x.dtype == torch.bool else prims.ne(x, 0)
