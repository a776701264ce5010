"""The prims that create tensors from scratch."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from forge.ir import NUMBER_TYPES, Dim, Number, Tag, TensorProxy, check, current_trace
from forge.prims.core import primitive, statically_true, torch_check


def check_lengths(op: str, shape: Sequence[Dim]) -> None:
    """Raise RuntimeError for a shape with a negative length."""
    for size in shape:
        check(
            not isinstance(size, TensorProxy),
            lambda: f"{op}: a size is a tensor, whose value is not known while tracing; use .item(): {list(shape)}",
            NotImplementedError,
        )
        torch_check(
            not statically_true(size < 0),
            lambda size=size: f"{op}: Trying to create tensor with negative dimension {size}: {list(shape)}",
        )


@primitive()
def full(shape: Sequence[Dim], value: Number, dtype: torch.dtype, device: torch.device) -> TensorProxy:
    """Return a tensor filled with `value`."""
    check_lengths("prims.full", shape)
    return current_trace().tensor(shape, dtype, device)


@primitive(tags=[Tag.UNINITIALIZED])
def empty(shape: Sequence[Dim], dtype: torch.dtype, device: torch.device) -> TensorProxy:
    """Return an uninitialized tensor."""
    check_lengths("prims.empty", shape)
    return current_trace().tensor(shape, dtype, device)


@primitive()
def iota(length: Dim, start: Number, step: Number, dtype: torch.dtype, device: torch.device) -> TensorProxy:
    """Return start, start + step, … (length of them)."""
    check(
        not isinstance(length, int) or length >= 0, lambda: f"prims.iota: length is {length}, but must not be negative"
    )
    return current_trace().tensor((length,), dtype, device)


@primitive()
def tensor(data: Any, dtype: torch.dtype, device: torch.device) -> TensorProxy:
    """Return the numbers of a nest of sequences. Shapes: the nest's. Source: torch.tensor."""
    return current_trace().tensor(nested_shape("prims.tensor", data), dtype, device)


def nested_shape(op: str, data: Any) -> list[int]:
    """Return the shape of a nest of sequences of numbers. Raises ValueError for a ragged nest, TypeError for other
    elements."""
    if isinstance(data, NUMBER_TYPES):
        return []
    check(
        isinstance(data, (tuple, list)),
        lambda: f"{op}: data holds {data!r}, but must be numbers or nested sequences of numbers",
        TypeError,
    )
    shapes = [nested_shape(op, item) for item in data]
    check(
        all(shape == shapes[0] for shape in shapes),
        lambda: f"{op}: expected sequences of one length, but data is ragged: {data!r}",
    )
    return [len(data), *(shapes[0] if shapes else [])]


def nested_numbers(data: Any) -> Iterator[Number]:
    """Yield the numbers of a nest of sequences, in order."""
    if not isinstance(data, (tuple, list)):
        yield data
        return
    for item in data:
        yield from nested_numbers(item)


@primitive()
def triangle_indices(
    upper: bool, rows: int, columns: int, offset: int, dtype: torch.dtype, device: torch.device
) -> TensorProxy:
    """Return the row and column indices of the upper or lower triangle of a matrix, row by row.

    Shapes: (2, number of elements). Source: torch.tril_indices, torch.triu_indices.
    """
    below = sum(min(max(row + offset + (0 if upper else 1), 0), columns) for row in range(rows))
    return current_trace().tensor((2, rows * columns - below if upper else below), dtype, device)
