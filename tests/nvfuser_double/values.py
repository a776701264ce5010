"""Operands of a definition: dtypes, tensors and numbers."""

from enum import Enum
from typing import Any

import torch


class DataType(Enum):
    """The dtypes of nvFuser."""

    Double = torch.float64
    Float = torch.float32
    Half = torch.float16
    BFloat16 = torch.bfloat16
    Int = torch.int64
    Int32 = torch.int32
    Bool = torch.bool
    ComplexFloat = torch.complex64
    ComplexDouble = torch.complex128
    Float4_e2m1fn = "float4"
    Float8_e4m3fn = torch.float8_e4m3fn
    Float8_e5m2 = torch.float8_e5m2
    Index = "index"
    Null = "null"


class Value:
    """A value of a definition, by its index in it."""

    def __init__(self, place: int, dtype: DataType) -> None:
        self.place = place
        self._dtype = dtype

    def dtype(self) -> DataType:
        """Return its dtype."""
        return self._dtype

    def __repr__(self) -> str:
        return f"{type(self).__name__} {self.place} of {self._dtype.name}"


class TensorView(Value):
    """A tensor."""


class Val(Value):
    """A number."""

    def is_symbolic(self) -> Any:
        """Return True: the value is known only when the definition runs."""
        return True
