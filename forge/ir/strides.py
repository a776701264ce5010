"""Strides: comparing them, those of contiguous tensors, and tensors with given ones."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch

from forge.ir.proxies import Dim
from forge.ir.structure import key_of
from forge.torch_internals.tensors import reinterpret_tensor

D = TypeVar("D", int, Dim)


def same(one: Dim | tuple[Dim, ...], other: Dim | tuple[Dim, ...] | None) -> bool:
    """Return whether sizes or strides are equal for all values of their symbols; installs no guards."""
    return key_of(one) == key_of(other)


def has_expanded_dim(strides: Iterable[Dim]) -> bool:
    """Return whether elements share memory. Such strides cannot be promised: a copy would write to it twice."""
    return any(isinstance(step, int) and step == 0 for step in strides)


def contiguous(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Return the strides of a contiguous tensor."""
    sizes = [max(size, 1) if isinstance(size, int) else size for size in shape]
    return without_gaps(sizes, reversed(range(len(sizes))))


def without_gaps(shape: Sequence[D], order: Iterable[int]) -> tuple[D, ...]:
    """Return the strides of a dense tensor whose dims are in `order`, fastest first."""
    strides: list[D] = [1] * len(shape)
    step: D = 1
    for dim in order:
        strides[dim] = step
        step = step * shape[dim]
    return tuple(strides)


def extent(tensor: torch.Tensor) -> int:
    """Return the number of elements between the first and the last of a tensor in memory, inclusive."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


Metadata = tuple[str, torch.dtype, tuple[Dim | None, ...]]  # of a call's result: the call, the dtype and the shape


def require_metadata(x: torch.Tensor, metadata: Metadata | None) -> None:
    """Raise RuntimeError if a call's result has another dtype or shape than the code that reads it was compiled for. A
    length that is None may be any."""
    if metadata is None:
        return
    call, dtype, shape = metadata
    lengths = zip(x.shape, shape, strict=False)
    if x.dtype == dtype and x.ndim == len(shape) and all(size is None or size == length for length, size in lengths):
        return
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    raise RuntimeError(
        f"{call} returns a tensor of {x.dtype} and shape {list(x.shape)}, where its meta function has {dtype} and "
        f"shape [{sizes}]; the code that reads it is compiled for the latter"
    )


# torch.as_strided without autograd: the elements of x's memory from `offset` on, with this shape and these strides
reinterpreted = reinterpret_tensor


def in_row_major(x: torch.Tensor, metadata: Metadata | None = None) -> torch.Tensor:
    """Return the tensor, or a copy, in row-major order, with its values in its memory (no lazy bits). Raises
    RuntimeError if it does not have `metadata`."""
    require_metadata(x, metadata)
    return x.contiguous().resolve_conj().resolve_neg()


def to_strides(x: torch.Tensor, strides: tuple[int, ...], metadata: Metadata | None = None) -> torch.Tensor:
    """Return the tensor, or a copy, with these strides and its values in its memory (no lazy bits). Raises RuntimeError
    if it does not have `metadata`."""
    require_metadata(x, metadata)
    if not (x.is_neg() or x.is_conj()):
        if x.stride() == strides:
            return x
        if all(one == other or size == 1 for one, other, size in zip(x.stride(), strides, x.shape, strict=True)):
            return x.as_strided(x.shape, strides)
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def is_expanded(x: torch.Tensor) -> bool:
    """Return whether several elements of a dim share a memory location, as after expand."""
    steps = zip(x.shape, x.stride(), strict=True)
    return any(type(step) is int and step == 0 and not (type(size) is int and size == 1) for size, step in steps)


def may_overlap_itself(x: torch.Tensor) -> bool:
    """Return whether two elements may share a memory location: a dim's stride does not exceed the extent of smaller
    strides."""
    if x.is_contiguous():
        return False
    reach = 0
    for step, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and step <= reach:
            return True
        reach += (size - 1) * step
    return False
