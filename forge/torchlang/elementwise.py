"""The elementwise functions of torch: arithmetic, comparisons, logic, bits. See also limits.py, special.py and
conversion.py."""

import builtins
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge import clang, prims
from forge.ir import Number, Symbol, TensorProxy, check
from forge.ir.memory import Memory
from forge.prims.core import torch_check
from forge.torchlang.aliases import TensorOrNumber, check_operands, results, torchaliases
from forge.torchlang.core import torchsymbol

# unary


def _unary(target: Symbol, *aliases: str, name: str = "", more: tuple[Callable, ...] = ()) -> Symbol:
    """Return the symbol of every spelling of a unary function of clang."""
    op = name or target.name

    def body(input: TensorProxy) -> TensorProxy:
        return target(input)

    body.__name__, body.__doc__ = op, target.__doc__
    return torchaliases(op, *aliases, more=more)(body)


_FURTHER_NAMES = {
    "abs": "absolute __abs__",
    "acos": "arccos",
    "acosh": "arccosh",
    "asin": "arcsin",
    "asinh": "arcsinh",
    "atan": "arctan",
    "atanh": "arctanh",
    "bitwise_not": "__invert__",
    "digamma": "psi",
    "lgamma": "gammaln",
    "trunc": "fix",
}
_OPERATORS: dict[str, tuple[Callable, ...]] = {"abs": (operator.abs,), "bitwise_not": (operator.invert,)}
for _name in """
    abs acos acosh angle asin asinh atan atanh bessel_j0 bessel_j1 bessel_y0 bessel_y1 bitwise_not ceil cos cosh
    digamma erf erfc erfcx erfinv exp exp2 expm1 floor i0 i0e i1 i1e isfinite isinf isnan lgamma log log10 log1p
    log2 log_ndtr logical_not ndtri reciprocal rsqrt sgn sign signbit sin sinh sqrt square tan trunc
""".split():
    _further = _FURTHER_NAMES.get(_name, "").split()
    globals()[_name] = _unary(getattr(clang, _name), *_further, more=_OPERATORS.get(_name, ()))
conj_physical = _unary(clang.conj, name="conj_physical")
sigmoid = _unary(clang.sigmoid, "expit", more=(F.sigmoid,))
tanh = _unary(clang.tanh, more=(F.tanh,))


@torchaliases("neg", "negative", "__neg__", more=(operator.neg,))
def neg(input: TensorProxy) -> TensorProxy:
    """Return -input. Dtypes: any but bool."""
    torch_check(
        input.dtype != torch.bool,
        lambda: f"neg: Negation, the `-` operator, on a bool tensor is not supported: {input}; use ~ or logical_not",
    )
    return clang.neg(input)


@torchaliases("positive", "__pos__", more=(operator.pos,))
def positive(input: TensorProxy) -> TensorProxy:
    """Return the input itself. Dtypes: any but bool."""
    torch_check(
        input.dtype != torch.bool, lambda: f"positive: The `+` operator, on a bool tensor is not supported: {input}"
    )
    return input


@torchaliases("frac")
def frac(input: TensorProxy) -> TensorProxy:
    """Return input - trunc(input). Dtypes: floating point."""
    prims.check_dtype("frac", input, prims.FLOAT)
    return input - clang.trunc(input)


prims.register_vjp(frac, input=lambda g: g)


@torchaliases("round")
def round(input: TensorProxy, *, decimals: int = 0) -> TensorProxy:
    """Return the nearest number with so many decimals, ties to even."""
    if decimals == 0:
        return clang.round(input)
    prims.check_dtype("round", input, prims.FLOAT)
    scale = 10 ** builtins.abs(decimals)
    return clang.round(input * scale) / scale if decimals > 0 else clang.round(input / scale) * scale


prims.register_vjp(round, input=lambda g: prims.zeros_like(g))


def _angle_unit(name: str, factor: float) -> Symbol:
    def body(input: TensorProxy) -> TensorProxy:
        prims.check_dtype(name, input, prims.REAL)
        return input * factor

    body.__name__, body.__doc__ = name, f"input * {factor:.6g}. Dtypes: integers become the default float dtype."
    return torchaliases(name)(body)


deg2rad = _angle_unit("deg2rad", math.pi / 180)
rad2deg = _angle_unit("rad2deg", 180 / math.pi)


def _is_infinite(name: str, value: float) -> Symbol:
    def body(input: TensorProxy) -> TensorProxy:
        prims.check_dtype(name, input, prims.REAL, RuntimeError)
        if not input.dtype.is_floating_point:
            return prims.full(input.shape, False, torch.bool, input.device)
        return clang.eq(input, value)

    body.__name__, body.__doc__ = name, f"Whether input is {value}."
    return torchaliases(name)(body)


isposinf = _is_infinite("isposinf", math.inf)
isneginf = _is_infinite("isneginf", -math.inf)


@torchaliases("isreal")
def isreal(input: TensorProxy) -> TensorProxy:
    """Return whether the imaginary part is 0; True for real numbers."""
    if input.dtype.is_complex:
        return clang.eq(prims.imag(input), 0)
    return prims.full(input.shape, True, torch.bool, input.device)


@torchaliases("nan_to_num")
def nan_to_num(
    input: TensorProxy, nan: float | None = 0.0, posinf: float | None = None, neginf: float | None = None
) -> TensorProxy:
    """Replace nan and infinities by finite numbers, in both parts of a complex number: by default, 0 and the dtype's
    extremes."""
    if input.dtype.is_complex:
        parts = [nan_to_num(part, nan, posinf, neginf) for part in (prims.real(input), prims.imag(input))]
        return parts[0] + parts[1] * 1j
    if not input.dtype.is_floating_point:
        return prims.clone(input)
    limits = torch.finfo(input.dtype)
    out = clang.where(clang.isnan(input), 0.0 if nan is None else nan, input)
    out = clang.where(clang.eq(input, math.inf), limits.max if posinf is None else posinf, out)
    return clang.where(clang.eq(input, -math.inf), limits.min if neginf is None else neginf, out)


prims.register_vjp(nan_to_num, input=lambda g, input: clang.where(clang.isfinite(input), g, 0))


# arithmetic: with two numbers (sizes), torch's functions return 0-d tensors


def _tensor_first(input: TensorOrNumber, other: TensorOrNumber) -> TensorOrNumber:
    """Return the first operand; as a 0-d tensor if both are numbers."""
    if isinstance(input, TensorProxy) or isinstance(other, TensorProxy):
        return input
    return prims.full((), input, clang.dtype_of(input), torch.device("cpu"))


def _scale(op: str, input: TensorOrNumber, other: TensorOrNumber, alpha: Number) -> TensorOrNumber:
    if isinstance(alpha, int) and alpha == 1:
        return other
    torch_check(
        not isinstance(alpha, float) or clang.category(clang.compute_dtype(input, other)) > 1,
        lambda: f"{op}: For integral input tensors, argument alpha must not be a floating point number: {alpha}",
    )
    return other * alpha


@torchaliases("add", "__add__", "__radd__", more=(operator.add,), inplace=(operator.iadd, Tensor.__iadd__))
def add(input: TensorOrNumber, other: TensorOrNumber, *, alpha: Number = 1) -> TensorProxy:
    """Return input + alpha * other."""
    check_operands("add", input=input, other=other)
    input = _tensor_first(input, other)
    return clang.add(input, _scale("add", input, other, alpha))


def _check_subtractable(op: str, *operands: TensorOrNumber) -> None:
    for operand in operands:
        torch_check(
            not isinstance(operand, TensorProxy) or operand.dtype != torch.bool,
            lambda operand=operand: (
                f"{op}: Subtraction, the `-` operator, with a bool tensor is not supported: {operand}; "
                "use ~, ^ or logical_xor"
            ),
        )


@torchaliases("sub", "subtract", "__sub__", more=(operator.sub,), inplace=(operator.isub, Tensor.__isub__))
def sub(input: TensorOrNumber, other: TensorOrNumber, *, alpha: Number = 1) -> TensorProxy:
    """Return input - alpha * other. Dtypes: any but bool."""
    check_operands("sub", input=input, other=other)
    input = _tensor_first(input, other)
    _check_subtractable("sub", input, other)
    return clang.sub(input, _scale("sub", input, other, alpha))


@torchaliases("rsub", "__rsub__")
def rsub(input: TensorProxy, other: TensorOrNumber, *, alpha: Number = 1) -> TensorProxy:
    """Return other - alpha * input. Dtypes: any but bool."""
    check_operands("rsub", input=input, other=other)
    _check_subtractable("rsub", input, other)
    return clang.sub(other, _scale("rsub", other, input, alpha))


@torchaliases("mul", "multiply", "__mul__", "__rmul__", more=(operator.mul,), inplace=(operator.imul, Tensor.__imul__))
def mul(input: TensorOrNumber, other: TensorOrNumber) -> TensorProxy:
    """Return input * other."""
    check_operands("mul", input=input, other=other)
    return clang.mul(_tensor_first(input, other), other)


@torchaliases("div", "divide", "true_divide", "__truediv__", inplace=(operator.itruediv, Tensor.__itruediv__))
def div(input: TensorOrNumber, other: TensorOrNumber, *, rounding_mode: str | None = None) -> TensorProxy:
    """Return input / other, rounded to an integer ("trunc", "floor") or not (None)."""
    check_operands("div", input=input, other=other)
    input = _tensor_first(input, other)
    if rounding_mode is None:
        return clang.div(input, other)
    if rounding_mode == "floor":
        return clang.floor_divide(input, other)
    torch_check(
        rounding_mode == "trunc",
        lambda: f"div: expected rounding_mode to be one of None, 'trunc', or 'floor' but found '{rounding_mode}'",
    )
    if clang.category(clang.compute_dtype(input, other)) > 1:
        return _div_trunc(input, other)
    floored = clang.floor_divide(input, other)  # exact, which a division of floats is not
    return floored + clang.convert((floored < 0) & (floored * other != input), floored.dtype)


def _trunc_quotient(input: TensorOrNumber, other: TensorOrNumber) -> TensorProxy:
    """Return trunc(input / other), with gradients of 0 even where other is 0."""
    return clang.trunc(clang.div(input, other))


_div_trunc = Symbol("div_trunc", "torchlang.div_trunc", body=_trunc_quotient)
prims.binary_rule(_div_trunc, lambda input, other, out, g: (lambda: prims.zeros_like(g), lambda: prims.zeros_like(g)))


def _divide(symbol: Symbol, args: tuple, kwargs: dict, memory: Memory) -> TensorProxy:
    operands = memory.read_all(args)
    return (div if isinstance(operands[0], TensorProxy) else symbol)(*operands)


@torchsymbol(operator.truediv, handler=_divide, id="operator.truediv")
def divided_by_tensor(input: Number, other: TensorProxy) -> TensorProxy:
    """Return input / other for a number and a tensor: torch's operator multiplies the reciprocal, and saves its result.

    A tensor as first operand is torch.div's.
    """
    return clang.mul(clang.reciprocal(other), input)


@torchaliases(
    "floor_divide", "__floordiv__", more=(operator.floordiv,), inplace=(operator.ifloordiv, Tensor.__ifloordiv__)
)
def floor_divide(input: TensorOrNumber, other: TensorOrNumber) -> TensorProxy:
    """Return floor(input / other); unlike torch.div, torch has no derivative for it."""
    check_operands("floor_divide", input=input, other=other)
    return clang.floor_divide(_tensor_first(input, other), other)


prims.binary_rule(floor_divide, lambda input, other, out, g: (None, None))


@torchaliases("pow", "__pow__", more=(operator.pow,), inplace=(operator.ipow, Tensor.__ipow__))
def pow(input: TensorOrNumber, exponent: TensorOrNumber) -> TensorProxy:
    """Return input to the power exponent."""
    check_operands("pow", input=input, exponent=exponent)
    return clang.pow(input, exponent)


@torchaliases("float_power")
def float_power(input: TensorOrNumber, exponent: TensorOrNumber) -> TensorProxy:
    """Return input to the power exponent, in float64 or complex128."""
    check_operands("float_power", input=input, exponent=exponent)
    is_complex = clang.compute_dtype(input, exponent).is_complex
    dtype = torch.complex128 if is_complex else torch.float64
    number: Callable[[Any], complex] = complex if is_complex else float
    base, power = (
        clang.convert(each, dtype) if isinstance(each, TensorProxy) else number(each) for each in (input, exponent)
    )
    return clang.pow(base, power)


@torchaliases("ldexp")
def ldexp(input: TensorProxy, other: TensorProxy) -> TensorProxy:
    """Return input * 2^other."""
    return clang.mul(input, clang.pow(2.0, other))


prims.register_vjp(
    ldexp,
    input=lambda g, other: g * clang.conj(clang.pow(2.0, other)),
    other=lambda g, out: g * clang.conj(out) * math.log(2),
)


@torchaliases("heaviside")
def heaviside(input: TensorProxy, values: TensorProxy) -> TensorProxy:
    """Return 0 where input is negative, 1 where it is positive, `values` where it is 0. Dtypes: the same for both."""
    torch_check(
        input.dtype == values.dtype,
        lambda: f"heaviside: not implemented for tensors with different dtypes: input is {input}, values is {values}",
    )
    return clang.heaviside(input, values)


def _binary(
    target: Symbol, *aliases: str, name: str = "", more: tuple[Callable, ...] = (), inplace: tuple[Callable, ...] = ()
) -> Symbol:
    """Return the symbol of every spelling of a binary function of clang, its operators and their in-place forms."""
    op = name or target.name

    def body(input: TensorOrNumber, other: TensorOrNumber) -> TensorProxy:
        if not (isinstance(input, TensorProxy) and isinstance(other, TensorProxy)):
            check_operands(op, input=input, other=other)
        for each in (input, other) if op in ("maximum", "minimum") else ():
            if isinstance(each, TensorProxy):
                prims.check_dtype(op, each, prims.REAL)
        return target(input, other)

    body.__name__, body.__doc__ = op, target.__doc__
    return torchaliases(op, *aliases, more=more, inplace=inplace)(body)


atan2 = _binary(clang.atan2, "arctan2")
copysign = _binary(clang.copysign)
fmod = _binary(clang.fmod)
hypot = _binary(clang.hypot)
igamma = _binary(clang.igamma, "gammainc")
igammac = _binary(clang.igammac, "gammaincc")
maximum = _binary(clang.maximum)
minimum = _binary(clang.minimum)
nextafter = _binary(clang.nextafter)
remainder = _binary(clang.remainder, "__mod__", more=(operator.mod,), inplace=(operator.imod,))
zeta = _binary(clang.zeta)
eq = _binary(clang.eq, "__eq__", more=(operator.eq,))
ne = _binary(clang.ne, "not_equal", "__ne__", more=(operator.ne,))
lt = _binary(clang.lt, "less", "__lt__", more=(operator.lt,))
le = _binary(clang.le, "less_equal", "__le__", more=(operator.le,))
gt = _binary(clang.gt, "greater", "__gt__", more=(operator.gt,))
ge = _binary(clang.ge, "greater_equal", "__ge__", more=(operator.ge,))
bitwise_and = _binary(
    clang.bitwise_and, "__and__", "__rand__", more=(operator.and_,), inplace=(operator.iand, Tensor.__iand__)
)
bitwise_or = _binary(
    clang.bitwise_or, "__or__", "__ror__", more=(operator.or_,), inplace=(operator.ior, Tensor.__ior__)
)
bitwise_xor = _binary(
    clang.bitwise_xor, "__xor__", "__rxor__", more=(operator.xor,), inplace=(operator.ixor, Tensor.__ixor__)
)
bitwise_left_shift = _binary(
    clang.shift_left,
    "__lshift__",
    name="bitwise_left_shift",
    more=(operator.lshift,),
    inplace=(operator.ilshift, Tensor.__ilshift__),
)
bitwise_right_shift = _binary(
    clang.shift_right,
    "__rshift__",
    name="bitwise_right_shift",
    more=(operator.rshift,),
    inplace=(operator.irshift, Tensor.__irshift__),
)


def _logical(name: str, combine: Symbol) -> Symbol:
    def body(input: TensorProxy, other: TensorProxy) -> TensorProxy:
        return combine(clang.as_bool(input), clang.as_bool(other))

    body.__name__, body.__doc__ = name, f"{combine.name} of whether input and other are not 0. Dtypes: out is bool."
    return torchaliases(name)(body)


logical_and = _logical("logical_and", clang.bitwise_and)
logical_or = _logical("logical_or", clang.bitwise_or)
logical_xor = _logical("logical_xor", clang.bitwise_xor)


@torchaliases("isclose")
def isclose(
    input: TensorProxy, other: TensorProxy, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> TensorProxy:
    """Return whether |input - other| <= atol + rtol * |other|. Dtypes: the same for both; out is bool."""
    torch_check(
        input.dtype == other.dtype,
        lambda: f"isclose: {input} and {other} must have one dtype: {input.dtype} did not match {other.dtype}",
    )
    close = clang.eq(input, other)
    if clang.category(input.dtype) < 2:
        if not rtol and not atol:
            return close
        default = torch.get_default_dtype()
        input, other = clang.convert(input, default), clang.convert(other, default)
    elif equal_nan:
        close = close | (clang.isnan(input) & clang.isnan(other))
    distance = clang.abs(input - other)
    return close | (clang.isfinite(distance) & (distance <= clang.abs(other) * rtol + atol))


# where


@torchsymbol(torch.where)
def where(
    condition: TensorProxy, input: TensorOrNumber | None = None, other: TensorOrNumber | None = None
) -> TensorProxy:
    """Return input where condition, else other. Dtypes: condition is bool."""
    check(
        input is not None and other is not None,
        lambda: (
            "where: torch.where(condition) alone has a shape that depends on data; use torch.where(condition, a, b)"
        ),
        NotImplementedError,
    )
    return clang.where(condition, input, other)


@torchsymbol(Tensor.where)
def tensor_where(self: TensorProxy, condition: TensorProxy, other: TensorOrNumber) -> TensorProxy:
    """Return self where condition, else other."""
    return clang.where(condition, self, other)


# divisors, multiples, and the parts of floating point numbers


def _of_integers(name: str) -> Symbol:
    prim = getattr(prims, name)

    def body(input: TensorProxy, other: TensorProxy) -> TensorProxy:
        return prim(*clang.prepare(name, input, other))

    body.__name__, body.__doc__ = name, f"{prim.meta.__doc__} Dtypes: integers."
    return torchaliases(name)(body)


gcd = _of_integers("gcd")
lcm = _of_integers("lcm")


@torchaliases("frexp")
def frexp(input: TensorProxy) -> tuple[TensorProxy, TensorProxy]:
    """Return (mantissa, exponent) with input = mantissa * 2^exponent. Dtypes: floating point; the exponent is int32."""
    return results.frexp(prims.frexp(input))
