"""The type promotion of operands. Source: torch's "Type Promotion" documentation (tensor attributes),
torch.result_type."""

from enum import Enum, auto
from functools import cache
from typing import Any

import torch

from forge.ir import Number, TensorProxy

__all__ = ["Promotion", "category", "compute_dtype"]


class Promotion(Enum):
    """The rules by which an elementwise operation chooses its compute dtype and its result dtype."""

    DEFAULT = auto()  # computes and returns the promoted dtype
    INT_TO_FLOAT = auto()  # integers become the default float dtype (sin, true division)
    TO_BOOL = auto()  # computes in the promoted dtype, returns bool (comparisons)


_CATEGORY = {bool: 0, int: 1, torch.SymInt: 1, torch.SymBool: 0, float: 2, torch.SymFloat: 2, complex: 3}


def category(dtype: torch.dtype) -> int:
    """Return the category of a dtype: 0 bool, 1 integer, 2 floating point, 3 complex."""
    if dtype == torch.bool:
        return 0
    if dtype.is_complex:
        return 3
    return 2 if dtype.is_floating_point else 1


def compute_dtype(*operands: TensorProxy | Number, kind: Promotion = Promotion.DEFAULT) -> torch.dtype:
    """Return the dtype in which an elementwise operation on these operands computes."""
    key = tuple(
        [(a.dtype, len(a.shape) > 0) if isinstance(a, TensorProxy) else (_CATEGORY[type(a)], False) for a in operands]
    )
    return _promote(key, kind is Promotion.INT_TO_FLOAT, torch.get_default_dtype())


_COMPLEX_OF = {torch.float64: torch.complex128, torch.float16: torch.complex32}
_LIFTED: dict[torch.dtype, torch.dtype] = (
    {torch.bfloat16: torch.bcomplex32} if hasattr(torch, "bcomplex32") else {}
)  # since torch 2.14


@cache
def _promote(key: tuple[tuple[Any, bool], ...], int_to_float: bool, default_float: torch.dtype) -> torch.dtype:
    dimensioned = [dtype for dtype, has_dims in key if has_dims]
    scalar_tensors = [dtype for dtype, has_dims in key if not has_dims and isinstance(dtype, torch.dtype)]
    numbers = [kind for kind, _ in key if isinstance(kind, int)]
    result: torch.dtype | None = None
    for group in (dimensioned, scalar_tensors):
        if not group:
            continue
        promoted = group[0]
        for dtype in group[1:]:
            promoted = torch.promote_types(promoted, dtype)
        if result is None or category(promoted) > category(result):
            result = promoted if result is None else _lift(result, promoted)
    if numbers:
        highest = max(numbers)
        if result is None or highest > category(result):
            complex_dtype = _COMPLEX_OF.get(default_float, torch.complex64)
            number_dtype = (torch.bool, torch.int64, default_float, complex_dtype)[highest]
            result = number_dtype if result is None else _lift(result, number_dtype)
    assert result is not None
    if int_to_float and category(result) < 2:
        return default_float
    return result


def _lift(lower: torch.dtype, higher: torch.dtype) -> torch.dtype:
    """Return the dtype of `lower` combined with an operand of a higher category but lower priority."""
    if higher.is_complex and lower.is_floating_point:
        return (_COMPLEX_OF | _LIFTED).get(lower, torch.complex64)
    return higher
