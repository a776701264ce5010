"""Strides: comparing them, those of contiguous tensors, and tensors with given ones."""

from collections.abc import Iterable

import torch

from forge.ir.proxies import Dim
from forge.ir.structure import key_of
from forge.torch_internals.tensors import reinterpret_tensor


def same(one: Dim | tuple[Dim, ...], other: Dim | tuple[Dim, ...] | None) -> bool:
    """Return whether sizes or strides are the same whatever the symbols in them are; nothing is guarded."""
    return key_of(one) == key_of(other)


def has_expanded_dim(strides: Iterable[Dim]) -> bool:
    """Return whether elements share memory, which cannot be promised: a copy would write to it twice."""
    return any(isinstance(step, int) and step == 0 for step in strides)


def contiguous(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Return the strides of a contiguous tensor."""
    strides: list[Dim] = []
    step: Dim = 1
    for length in reversed(shape):
        strides.append(step)
        step = step * (max(length, 1) if isinstance(length, int) else length)
    return tuple(reversed(strides))


# torch.as_strided without autograd: the elements of x's memory from `offset` on, with this shape and these strides
reinterpreted = reinterpret_tensor


def in_row_major(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy, in row-major order, whose memory holds its values."""
    return x.contiguous().resolve_conj().resolve_neg()


def restrided(x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor with these strides, whose memory holds its values: itself where it is so."""
    if not (x.is_neg() or x.is_conj()):
        if x.stride() == strides:
            return x
        if all(one == other or length == 1 for one, other, length in zip(x.stride(), strides, x.shape, strict=True)):
            return x.as_strided(x.shape, strides)
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def is_expanded(x: torch.Tensor) -> bool:
    """Return whether several elements of a dim are one place in memory, as after expand."""
    steps = zip(x.shape, x.stride(), strict=True)
    return any(type(step) is int and step == 0 and not (type(length) is int and length == 1) for length, step in steps)
