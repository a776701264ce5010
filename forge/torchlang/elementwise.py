"""Elementwise functions of torch."""

import math
import operator

import torch
from torch import Tensor

from forge import clang, prims
from forge.ir import NUMBER_TYPES, Number, Symbol, TensorProxy, check
from forge.torchlang.core import torchsymbol

TensorOrNumber = TensorProxy | Number


def _unary(name: str) -> Symbol:
    """torch.name, Tensor.name and their in-place forms, as clang has it."""
    function, method = getattr(torch, name), getattr(Tensor, name)
    written = [getattr(owner, name + "_") for owner in (torch, Tensor) if hasattr(owner, name + "_")]
    target = getattr(clang, name)

    def body(input: TensorProxy) -> TensorProxy:
        return target(input)

    body.__name__, body.__doc__ = name, target.__doc__
    return torchsymbol(function, method, inplace=written)(body)


for _name in """acos acosh asin asinh atan atanh ceil cos cosh digamma erf erfc erfinv exp exp2 expm1 floor isfinite isinf
isnan lgamma log log10 log1p log2 reciprocal rsqrt sigmoid sign signbit sin sinh sqrt square tan tanh trunc
logical_not""".split():
    globals()[_name] = _unary(_name)


@torchsymbol(torch.abs, Tensor.abs, operator.abs, torch.absolute, Tensor.absolute, inplace=(torch.abs_, Tensor.abs_))
def abs(input: TensorProxy) -> TensorProxy:
    """The absolute value."""
    return clang.abs(input)


@torchsymbol(torch.neg, Tensor.neg, operator.neg, torch.negative, Tensor.negative, inplace=(torch.neg_, Tensor.neg_))
def neg(input: TensorProxy) -> TensorProxy:
    """-input. Dtypes: any but bool."""
    check(
        input.dtype != torch.bool,
        lambda: f"neg: Negation, the `-` operator, on a bool tensor is not supported: {input}; use ~ or logical_not",
        RuntimeError,
    )
    return clang.neg(input)


@torchsymbol(torch.bitwise_not, Tensor.bitwise_not, operator.invert, inplace=Tensor.bitwise_not_)
def bitwise_not(input: TensorProxy) -> TensorProxy:
    """The bitwise complement; logical not of a bool."""
    return clang.bitwise_not(input)


def _scaled(other: TensorOrNumber, alpha: Number) -> TensorOrNumber:
    return other if isinstance(alpha, int) and alpha == 1 else other * alpha


@torchsymbol(torch.add, Tensor.add, operator.add, inplace=(Tensor.add_, operator.iadd))
def add(input: TensorOrNumber, other: TensorOrNumber, *, alpha: Number = 1) -> TensorProxy:
    """input + alpha * other."""
    return clang.add(input, _scaled(other, alpha))


@torchsymbol(
    torch.sub,
    Tensor.sub,
    operator.sub,
    torch.subtract,
    Tensor.subtract,
    inplace=(Tensor.sub_, operator.isub, Tensor.subtract_),
)
def sub(input: TensorOrNumber, other: TensorOrNumber, *, alpha: Number = 1) -> TensorProxy:
    """input - alpha * other."""
    return clang.sub(input, _scaled(other, alpha))


@torchsymbol(
    torch.mul,
    Tensor.mul,
    operator.mul,
    torch.multiply,
    Tensor.multiply,
    inplace=(Tensor.mul_, operator.imul, Tensor.multiply_),
)
def mul(input: TensorOrNumber, other: TensorOrNumber) -> TensorProxy:
    """input * other."""
    return clang.mul(input, other)


@torchsymbol(
    torch.div,
    Tensor.div,
    operator.truediv,
    torch.divide,
    Tensor.divide,
    torch.true_divide,
    Tensor.true_divide,
    inplace=(Tensor.div_, operator.itruediv, Tensor.divide_, Tensor.true_divide_),
)
def div(input: TensorOrNumber, other: TensorOrNumber, *, rounding_mode: str | None = None) -> TensorProxy:
    """input / other, rounded to an integer ("trunc", "floor") or not (None)."""
    if rounding_mode is None:
        return clang.div(input, other)
    if rounding_mode == "floor":
        return clang.floor_divide(input, other)
    check(
        rounding_mode == "trunc",
        lambda: f"div: expected rounding_mode to be one of None, 'trunc', or 'floor' but found '{rounding_mode}'",
        RuntimeError,
    )
    dtype = clang.compute_dtype(input, other)
    return clang.convert(clang.trunc(clang.div(input, other)), dtype)


_BINARY = {
    "atan2": (),
    "copysign": (),
    "floor_divide": (operator.floordiv,),
    "fmod": (),
    "hypot": (),
    "maximum": (),
    "minimum": (),
    "nextafter": (),
    "remainder": (operator.mod,),
    "pow": (operator.pow,),
    "eq": (operator.eq,),
    "ne": (operator.ne, torch.not_equal, Tensor.not_equal),
    "lt": (operator.lt, torch.less, Tensor.less),
    "le": (operator.le, torch.less_equal, Tensor.less_equal),
    "gt": (operator.gt, torch.greater, Tensor.greater),
    "ge": (operator.ge, torch.greater_equal, Tensor.greater_equal),
    "bitwise_and": (operator.and_,),
    "bitwise_or": (operator.or_,),
    "bitwise_xor": (operator.xor,),
}
_INPLACE_OPERATORS = {
    "floor_divide": operator.ifloordiv,
    "remainder": operator.imod,
    "pow": operator.ipow,
    "bitwise_and": operator.iand,
    "bitwise_or": operator.ior,
    "bitwise_xor": operator.ixor,
}


def _binary(name: str, *others: object) -> Symbol:
    """torch.name, Tensor.name, an operator and their in-place forms, as clang has it."""
    target = getattr(clang, name)
    written = [getattr(Tensor, name + "_")] if hasattr(Tensor, name + "_") else []
    if name in _INPLACE_OPERATORS:
        written.append(_INPLACE_OPERATORS[name])

    def body(input: TensorOrNumber, other: TensorOrNumber) -> TensorProxy:
        return target(input, other)

    if name == "pow":

        def body(input: TensorOrNumber, exponent: TensorOrNumber) -> TensorProxy:
            return target(input, exponent)

    body.__name__, body.__doc__ = name, target.__doc__
    return torchsymbol(getattr(torch, name), getattr(Tensor, name), *others, inplace=written)(body)


for _name, _others in _BINARY.items():
    globals()[_name] = _binary(_name, *_others)



@torchsymbol(torch.where)
def where(condition: TensorProxy, input: TensorOrNumber, other: TensorOrNumber) -> TensorProxy:
    """input where condition, else other. Dtypes: condition is bool."""
    return clang.where(condition, input, other)


@torchsymbol(Tensor.where)
def tensor_where(self: TensorProxy, condition: TensorProxy, other: TensorOrNumber) -> TensorProxy:
    """self where condition, else other."""
    return clang.where(condition, self, other)
