"""The rules of operations that move elements, in nvFuser's operators."""

from collections.abc import Sequence
from typing import Any

import torch

from forge import prims
from forge.executors.executor import Decision, decline
from forge.executors.nvfuserex.definition import Ref
from forge.executors.nvfuserex.elementwise import number_of
from forge.executors.nvfuserex.rules import rule
from forge.executors.nvfuserex.writer import Writer
from forge.ir import Dim, TensorProxy


def _same(writer: Writer, x: TensorProxy, *how: Any) -> Ref:
    return writer.op("set", x)


for _prim in (prims.detach, prims.clone, prims.contiguous):
    rule(_prim)(_same)


@rule(prims.reshape)
def _reshape(writer: Writer, x: TensorProxy, shape: Sequence[Dim]) -> Ref:
    if not x.ndim:
        return writer.op("broadcast", x, (True,) * len(shape)) if shape else writer.op("set", x)
    if not shape:
        return writer.op("squeeze", x, tuple(range(x.ndim)))
    return writer.op("reshape", x, tuple(shape))


@rule(prims.permute)
def _permute(writer: Writer, x: TensorProxy, dims: Sequence[int]) -> Ref:
    return writer.op("permute", x, tuple(dims)) if x.ndim else writer.op("set", x)


@rule(prims.broadcast_in_dim)
def _broadcast_in_dim(writer: Writer, x: TensorProxy, shape: Sequence[Dim], dims: Sequence[int]) -> Ref:
    return writer.op("broadcast_in_dim", x, tuple(shape), tuple(dims)) if shape else writer.op("set", x)


@rule(prims.squeeze)
def _squeeze(writer: Writer, x: TensorProxy, dims: Sequence[int]) -> Ref:
    return writer.op("squeeze", x, tuple(dims)) if x.ndim and dims else writer.op("set", x)


# parts


def _with_item(values: Sequence[Any], place: int, value: Any) -> list[Any]:
    return [*values[:place], value, *values[place + 1 :]]


def _part(writer: Writer, x: TensorProxy, dim: int, start: Dim, stop: Dim) -> Ref:
    starts = _with_item([0] * x.ndim, dim, start)
    return writer.op("slice", x, tuple(starts), tuple(_with_item(x.shape, dim, stop)))


def _steps_by_one(x: TensorProxy, dim: int, start: Dim, stop: Dim, step: int = 1) -> Decision:
    return step == 1 or decline(f"nvFuser's slices have no step, and here it is {step}")


@rule(prims.slice, _steps_by_one)
def _slice(writer: Writer, x: TensorProxy, dim: int, start: Dim, stop: Dim, step: int = 1) -> Ref:
    return _part(writer, x, dim, start, stop)


def _fills(g: TensorProxy, shape: Sequence[Dim], dim: int, start: Dim, stop: Dim, step: int = 1) -> Decision:
    return _steps_by_one(g, dim, start, stop, step)


@rule(prims.slice_backward, _fills)
def _slice_backward(
    writer: Writer, g: TensorProxy, shape: Sequence[Dim], dim: int, start: Dim, stop: Dim, step: int = 1
) -> Ref:
    around = _with_item([(0, 0)] * g.ndim, dim, (start, shape[dim] - stop))
    return _write_pad(writer, g, g.dtype, around, 0)


def _replaces(x: TensorProxy, y: TensorProxy, dim: int, start: Dim, stop: Dim, step: int = 1) -> Decision:
    is_static = all(isinstance(each, int) for each in (start, stop, x.shape[dim]))
    return _steps_by_one(x, dim, start, stop, step) and (
        is_static or decline("the replaced index differs from run to run")
    )


@rule(prims.slice_scatter, _replaces)
def _slice_scatter(
    writer: Writer, x: TensorProxy, y: TensorProxy, dim: int, start: int, stop: int, step: int = 1
) -> Ref:
    ends = ((0, start), (stop, x.shape[dim]))
    before, after = (_part(writer, x, dim, *each) if each[0] < each[1] else None for each in ends)
    middle = y if start < stop else None
    parts = [part for part in (before, middle, after) if part is not None]
    return writer.op("cat", tuple(parts), dim) if len(parts) > 1 else writer.op("set", parts[0])


@rule(prims.cat)
def _cat(writer: Writer, tensors: Sequence[TensorProxy], dim: int) -> Ref:
    return writer.op("cat", tuple(tensors), dim) if len(tensors) > 1 else writer.op("set", tensors[0])


# padding


def _widths(padding: Sequence[tuple[Dim, Dim]]) -> tuple[Dim, ...]:
    """Return the widths in nvFuser's order: the last dim's first."""
    return tuple(width for pair in reversed(padding) for width in pair)


def _write_pad(writer: Writer, x: Any, dtype: torch.dtype, padding: Sequence[tuple[Dim, Dim]], value: Any) -> Ref:
    return writer.op("pad", x, _widths(padding), number_of(value, dtype))


def _pads_only(x: TensorProxy, padding: Sequence[tuple[Dim, Dim]], value: Any) -> Decision:
    grows = x.ndim and all(isinstance(width, int) and width >= 0 for pair in padding for width in pair)
    return bool(grows) or decline("nvFuser pads by static, non-negative widths")


@rule(prims.pad, _pads_only)
def _pad(writer: Writer, x: TensorProxy, padding: Sequence[tuple[int, int]], value: Any) -> Ref:
    return _write_pad(writer, x, x.dtype, padding, value)
