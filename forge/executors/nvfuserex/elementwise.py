"""The rules of elementwise prims, in nvFuser's operators."""

from collections.abc import Callable
from typing import Any

import torch

from forge import prims
from forge.executors.executor import Decision, decline
from forge.executors.nvfuserex.definition import Ref
from forge.executors.nvfuserex.rules import add_rule, rule, same_names
from forge.executors.nvfuserex.writer import Writer
from forge.ir import Symbol, TensorProxy
from forge.ir.proxies import SYMBOLIC_TYPES


def _first_tensor(operands: tuple) -> TensorProxy:
    return next(each for each in operands if isinstance(each, TensorProxy))


def only_floats(*operands: Any) -> Decision:
    """Decline integers and bool."""
    dtype = _first_tensor(operands).dtype
    return dtype.is_floating_point or decline(f"nvFuser's operator is taken for floating point, not for {dtype}")


def no_bools(*operands: Any) -> Decision:
    """Decline bool."""
    dtype = _first_tensor(operands).dtype
    return dtype != torch.bool or decline("nvFuser's arithmetic on bool is not torch's")


def _wide_floats(*operands: Any) -> Decision:
    dtype = _first_tensor(operands).dtype
    wide = dtype in (torch.float32, torch.float64)
    return wide or decline(f"nvFuser computes in float32 what is of {dtype}, whose next number is another")


def number_of(value: Any, dtype: torch.dtype) -> Any:
    """Return a number in the dtype of the tensor that it replaces; a tensor is returned itself."""
    if isinstance(value, (TensorProxy, *SYMBOLIC_TYPES)):
        return value
    if dtype == torch.bool:
        return bool(value)
    return float(value) if dtype.is_floating_point else int(value)


def _operands(*operands: Any) -> list[Any]:
    dtype = _first_tensor(operands).dtype
    return [number_of(each, dtype) for each in operands]


# unary

same_names(
    (
        prims.acos,
        prims.acosh,
        prims.asin,
        prims.asinh,
        prims.atan,
        prims.atanh,
        prims.ceil,
        prims.cos,
        prims.cosh,
        prims.erf,
        prims.erfc,
        prims.erfinv,
        prims.exp,
        prims.exp2,
        prims.expm1,
        prims.floor,
        prims.isfinite,
        prims.isinf,
        prims.isnan,
        prims.lgamma,
        prims.log,
        prims.log10,
        prims.log1p,
        prims.log2,
        prims.reciprocal,
        prims.round,
        prims.rsqrt,
        prims.sigmoid,
        prims.sign,
        prims.signbit,
        prims.sin,
        prims.sinh,
        prims.sqrt,
        prims.tan,
        prims.tanh,
        prims.trunc,
    ),
    only_floats,
)
same_names((prims.abs, prims.neg), no_bools)


@rule(prims.bitwise_not)
def _bitwise_not(writer: Writer, x: TensorProxy) -> Ref:
    return writer.op("logical_not" if x.dtype == torch.bool else "bitwise_not", x)


@rule(prims.convert_element_type)
def _convert(writer: Writer, x: TensorProxy, dtype: torch.dtype) -> Ref:
    return writer.cast(x, dtype)


# binary


def _binary(prim: Symbol, checker: Callable[..., Decision] | None, name: str = "", of_bools: str = "") -> None:
    def write(writer: Writer, a: Any, b: Any) -> Ref:
        on_bools = of_bools and _first_tensor((a, b)).dtype == torch.bool
        return writer.op(of_bools if on_bools else name or prim.name, *_operands(a, b))

    add_rule(prim, write, checker)


_binary(prims.add, None, of_bools="logical_or")
_binary(prims.mul, None, of_bools="logical_and")
_binary(prims.sub, no_bools)
_binary(prims.div, only_floats)
_binary(prims.atan2, only_floats)
_binary(prims.pow, only_floats)
_binary(prims.fmod, only_floats)
_binary(prims.remainder, only_floats)
_binary(prims.nextafter, _wide_floats)
_binary(prims.maximum, None, of_bools="logical_or")
_binary(prims.minimum, None, of_bools="logical_and")
_binary(prims.bitwise_and, None, of_bools="logical_and")
_binary(prims.bitwise_or, None, of_bools="logical_or")
_binary(prims.bitwise_xor, None, of_bools="ne")
for _prim in (prims.eq, prims.ne):
    _binary(_prim, None)
for _prim in (prims.lt, prims.le, prims.gt, prims.ge):
    _binary(_prim, no_bools)


def _shifts_inside(a: Any, b: Any) -> Decision:
    dtype = _first_tensor((a, b)).dtype
    is_in_range = isinstance(b, int) and 0 <= b < dtype.itemsize * 8 and dtype != torch.bool
    return is_in_range or decline("a shift by as many bits as the dtype has, or by more, is not torch's in nvFuser")


_binary(prims.shift_left, _shifts_inside, "bitwise_left_shift")
_binary(prims.shift_right, _shifts_inside, "bitwise_right_shift")


@rule(prims.where)
def _where(writer: Writer, condition: TensorProxy, a: Any, b: Any) -> Ref:
    return writer.op("where", condition, *_operands(a, b))
