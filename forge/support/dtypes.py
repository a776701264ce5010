"""Dtypes by name, torch's and ExecuTorch's, and values as messages show them."""

from typing import Any

import torch

_EXECUTORCH = {
    "Byte": torch.uint8,
    "Char": torch.int8,
    "Short": torch.int16,
    "Int": torch.int32,
    "Long": torch.int64,
    "Half": torch.float16,
    "Float": torch.float32,
    "Double": torch.float64,
    "ComplexHalf": torch.complex32,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
    "Bool": torch.bool,
    "BFloat16": torch.bfloat16,
}

DTYPES: dict[str, torch.dtype] = {
    **{name: value for name, value in sorted(vars(torch).items()) if isinstance(value, torch.dtype)},
    **_EXECUTORCH,
}


def find_dtype(name: str) -> torch.dtype | None:
    """Return the dtype of a name ('float16', 'torch.float16', 'half', 'Half'), or None."""
    return DTYPES.get(name.removeprefix("torch."))


def dtype_name(dtype: torch.dtype) -> str:
    """Return 'float16' for torch.float16."""
    return str(dtype).removeprefix("torch.")


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor, or a proxy of one."""
    return hasattr(value, "ndim") and hasattr(value, "dtype")


def show(value: Any) -> str:
    """Return a value as a reason shows it."""
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(show, value))}{',' if len(value) == 1 else ''})"
    return "a tensor" if is_tensor(value) else str(value) if not isinstance(value, str) else repr(value)
