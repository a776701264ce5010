"""OpInfos of linear layers with quantized weights."""

from typing import Any

import torch

from forge.testing.table import Value, op, sample, t, values, wrong
from forge.torchlang.nn.quantized import OPERATORS

_FLOAT32 = torch.float32


def _bytes(*shape: int, dtype: torch.dtype = torch.int8) -> Value:
    return Value(lambda target: torch.randint(0, 256, shape, device=target.device).to(torch.uint8).view(dtype))


def _fp8(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Value:
    return t(*shape, dtype=_FLOAT32, low=-3, high=3).then(torch.Tensor.to, dtype)


def _scale(*shape: int) -> Value:
    return t(*shape, dtype=_FLOAT32, low=0.01, high=0.1)


def _zero(*shape: int) -> Value:
    return t(*shape, dtype=_FLOAT32, low=0, high=15)


def _op(name: str, *rows: Any) -> None:
    op(f"forge.{name}", *rows, op=OPERATORS[name], symbols=(f"torch.ops.forge.{name}",))


_op(
    "linear_int8",
    sample(t(1, 8), _bytes(4, 8), _scale(4)),
    sample(t(8), _bytes(4, 8), _scale(4), t(4)),
    sample(t(2, 5, 8), _bytes(4, 8), _scale(4, 2), t(4)),
    sample(t(8, 3).t(), _bytes(4, 8), _scale(4), bias=t(4)),
    sample(t(0, 8), _bytes(4, 8), _scale(4)),
    wrong(t(2, 8), _bytes(4, 6), _scale(4), match="shapes cannot be multiplied"),
    wrong(t(2, 8), t(4, 8), _scale(4), match=r"weight is \w+\[4, 8\], but must have a dtype of i8", error=TypeError),
    wrong(t(2, 8), _bytes(4, 8), values([1, 2, 3, 4], torch.int32), match="scale is .* of floats", error=TypeError),
    wrong(t(2, 8), _bytes(4, 8), _scale(3), match=r"must have the shape \(4,\) or \(4, groups\)"),
    wrong(t(2, 8), _bytes(4, 8), _scale(4, 3), match="whose groups do not divide the 8 elements"),
)
_op(
    "linear_fp8",
    sample(t(1, 8), _fp8(4, 8), _scale(4)),
    sample(t(2, 5, 8), _fp8(4, 8, dtype=torch.float8_e5m2), _scale(4), t(4)),
    sample(t(3, 8), _fp8(4, 8), _scale(4, 4)),
    wrong(t(2, 8), _bytes(4, 8), _scale(4), match="must have a dtype of float8", error=TypeError),
)
_op(
    "linear_int4",
    sample(t(1, 8), _bytes(4, 4, dtype=torch.uint8), _scale(4)),
    sample(t(2, 5, 8), _bytes(4, 4, dtype=torch.uint8), _scale(4, 2), None, t(4)),
    sample(t(3, 8), _bytes(4, 4, dtype=torch.uint8), _scale(4, 2), _zero(4, 2)),
    sample(t(8), _bytes(4, 4, dtype=torch.uint8), _scale(4), zero_point=_zero(4), bias=t(4)),
    wrong(t(2, 8), _bytes(4, 4, dtype=torch.uint8), _scale(4, 2), _zero(4), match="must have the shape of scale"),
    wrong(t(2, 8), _bytes(4, 4, dtype=torch.uint8), _scale(4, 8), match="whose groups do not divide the 8 elements"),
    wrong(t(2, 8), _bytes(4, 8, dtype=torch.uint8), _scale(4), match="shapes cannot be multiplied"),
)
