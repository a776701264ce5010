"""The creation of tensors, with torch's defaults of dtype and device."""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch

from forge import prims
from forge.clang.promotion import category
from forge.ir import INT_TYPES, Dim, Number, Real, TensorProxy, check
from forge.prims.core import torch_check
from forge.prims.creation import nested_numbers


def canonical_device(device: torch.device | str | int | None = None) -> torch.device:
    """Return a device with its index, as tensors have it; torch's default device for None."""
    result = torch.get_default_device() if device is None else torch.device(device)
    if result.index is None and result.type not in ("cpu", "meta"):
        return torch.device(result.type, torch.get_device_module(result.type).current_device())
    return result


def dtype_of(*numbers: Number) -> torch.dtype:
    """Return the dtype that torch infers for Python numbers: bool, int64, the default float dtype, or its complex
    one."""
    dtype = torch.bool
    for number in numbers:
        if isinstance(number, complex):
            return torch.promote_types(torch.get_default_dtype(), torch.complex32)
        if isinstance(number, (float, torch.SymFloat)):
            dtype = torch.get_default_dtype()
        elif isinstance(number, INT_TYPES) and not isinstance(number, bool) and category(dtype) == 0:
            dtype = torch.int64
    return dtype


def from_numbers(data: Any, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> TensorProxy:
    """Return the tensor of a number or of nested sequences of numbers."""
    numbers = list(nested_numbers(data))
    if dtype is None:
        dtype = dtype_of(*numbers) if numbers else torch.get_default_dtype()
    if not isinstance(data, (tuple, list)):
        return prims.full((), data, dtype, canonical_device(device))
    return prims.tensor(data, dtype, canonical_device(device))


def arange(start: Real, end: Real, step: Real, dtype: torch.dtype | None, device: torch.device) -> TensorProxy:
    """Return start, start + step, … before end. Dtypes: int64 for integers, else the default float dtype."""
    if dtype is None:
        inferred = dtype_of(start, end, step)
        dtype = torch.int64 if category(inferred) < 2 else inferred
    check(not dtype.is_complex, lambda: f"arange: not implemented for dtype={dtype}", NotImplementedError)
    torch_check(step != 0, lambda: "arange: step must be nonzero")
    if all(isinstance(number, int) for number in (start, end, step)):
        torch_check(
            (end - start) * step >= 0,
            lambda: f"arange: upper bound and lower bound inconsistent with step sign: {start} to {end} by {step}",
        )
    return prims.iota(arange_length(start, end, step), start, step, dtype, device)


def arange_length(start: Real, end: Real, step: Real) -> Dim:
    """Return the number of elements of an arange; symbolic bounds stay symbolic."""
    if isinstance(start, INT_TYPES) and isinstance(end, INT_TYPES) and isinstance(step, INT_TYPES):
        rounding = step - 1 if step > 0 else step + 1
        size = (end - start + rounding) // step
        return size if isinstance(size, int) or prims.statically_true(size >= 0) else torch.sym_max(size, 0)
    size = math.ceil(cast(float, (end - start) / step))
    torch_check(
        not isinstance(size, int) or size >= 0,
        lambda: f"arange: upper bound and lower bound inconsistent with step sign: {start} to {end} by {step}",
    )
    return size


def linspace(
    start: TensorProxy | Number, end: TensorProxy | Number, steps: int, dtype: torch.dtype, device: torch.device
) -> TensorProxy:
    """Return `steps` numbers from start to end, evenly spaced, counted from both ends as torch does."""
    torch_check(steps >= 0, lambda: f"linspace: number of steps must be non-negative, but got {steps}")
    wide = dtype if category(dtype) > 1 else torch.float64
    step = (end - start) / max(steps - 1, 1)
    index = prims.iota(steps, 0, 1, torch.int64, device)
    low, high = (index.to(wide) * step) + start, ((steps - 1 - index).to(wide) * -step) + end
    return (index < steps // 2).where(low, high).to(dtype) if steps > 1 else low.to(dtype)


def check_supported(op: str, **options: Any) -> None:
    """Raise NotImplementedError for an option of torch's factories that changes the kind of tensor."""
    allowed = {"layout": (None, torch.strided), "requires_grad": (False,), "generator": (None,), "names": (None,)}
    for name, value in options.items():
        check(
            name not in allowed or value in allowed[name],
            lambda name=name, value=value: f"{op}: {name}={value} is not supported; see forge/torchlang/creation.py",
            NotImplementedError,
        )


def lengths(size: Sequence[Any]) -> tuple[Dim, ...]:
    """Return the size of zeros(2, 3) and zeros((2, 3)) alike."""
    result = tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list)) else tuple(size)
    for length in result:
        check(
            not isinstance(length, TensorProxy),
            lambda length=length: (
                f"a size has the tensor {length}, whose value is not known while tracing; use .item()"
            ),
            NotImplementedError,
        )
    return result
