"""Creation prims: tensors from nothing."""

from collections.abc import Sequence

import torch

from forge.ir import Dim, Number, Tag, TensorProxy, check, current_trace
from forge.prims.core import make_prim


def _full_meta(shape: Sequence[Dim], value: Number, dtype: torch.dtype, device: torch.device) -> TensorProxy:
    """A tensor filled with `value`."""
    return current_trace().tensor(shape, dtype, device)


full = make_prim("full", "full", meta=_full_meta)


def _empty_meta(shape: Sequence[Dim], dtype: torch.dtype, device: torch.device) -> TensorProxy:
    """A tensor of unspecified values."""
    return current_trace().tensor(shape, dtype, device)


empty = make_prim("empty", "empty", meta=_empty_meta, tags=[Tag.UNINITIALIZED])


def _iota_meta(length: Dim, start: Number, step: Number, dtype: torch.dtype, device: torch.device) -> TensorProxy:
    """start, start + step, … (length of them)."""
    check(not isinstance(length, int) or length >= 0, lambda: f"prims.iota: length is {length}, but must not be negative")
    return current_trace().tensor((length,), dtype, device)


iota = make_prim("iota", "iota", meta=_iota_meta)
