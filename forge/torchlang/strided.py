"""The function torch.as_strided, which reads raw memory, and its copy.

Their results depend on the strides of the argument, and `storage_offset` counts from the start of its memory. The
symbols get both, and the position of the program's input that owns the memory.

torch.as_strided_scatter is opaque, because torch's gradient of it, which eager uses, is not its derivative.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forge import prims
from forge.ir import Dim, Symbol, TensorProxy, current_trace, outside_regions
from forge.ir.memory import Ambiguous, Memory, ViewStep
from forge.prims.core import same, statically_true, torch_check
from forge.torchlang.core import torchsymbol
from forge.torchlang.shape import row_major


class StridedView(NamedTuple):
    """The view by as_strided of a tensor with `strides`. `offset` counts from the tensor's first element, or from the
    start of the memory of the input `origin`."""

    size: tuple[Dim, ...]
    stride: tuple[Dim, ...]
    offset: Dim
    strides: tuple[Dim, ...]
    origin: prims.memory.Origin


def _check_strided(op: str, size: Sequence[Dim], stride: Sequence[Dim], offset: Dim | None) -> None:
    torch_check(
        len(size) == len(stride),
        lambda: f"{op}: mismatch in length of strides and shape: {tuple(stride)} and {tuple(size)}",
    )
    torch_check(
        not any(statically_true(step < 0) for step in stride),
        lambda: f"{op}: Negative strides are not supported at the moment, got strides: {list(stride)}",
    )
    torch_check(
        offset is None or not statically_true(offset < 0),
        lambda: f"{op}: Storage offset must be non-negative, but got {offset}",
    )


def _dense(x: TensorProxy) -> bool:
    """Return whether x is known to have exactly one element for each position in the memory that it spans."""
    if row_major(x):
        return True
    assert x.strides is not None, f"{x} is of an unknown layout"
    expected: Dim = 1
    for step, size in sorted(
        (step, n) for step, n in zip(x.strides, x.shape, strict=True) if not statically_true(n == 1)
    ):
        if not same(step, expected):
            return False
        expected = expected * size
    return True


def _within(x: TensorProxy, view: StridedView, offset: Dim) -> bool:
    """Return whether the view is within x; `offset` counts from x."""
    reach: Dim = offset + 1
    for size, step in zip(view.size, view.stride, strict=True):
        if statically_true(size == 0):
            return True
        reach = reach + (size - 1) * step
    return not statically_true(offset < 0) and not statically_true(reach > x.numel()) and _dense(x)


def _locate_view(
    op: str,
    memory: Memory,
    input: TensorProxy,
    size: Sequence[Dim],
    stride: Sequence[Dim],
    storage_offset: Dim | None = None,
) -> tuple[TensorProxy, StridedView, bool]:
    """Return the tensor of a call, the viewed part, and whether it is known to lie in the tensor. Raises
    NotImplementedError if its layout is not known, Ambiguous if the view includes surrounding memory that may not
    exist."""
    x = input
    _check_strided(op, size, stride, storage_offset)
    if x.strides is None or (storage_offset is not None and x.offset is None):
        raise NotImplementedError(f"{op} of {x}, whose layout is not known while tracing")
    storage = memory.ref(x).storage
    is_input = any(storage.root is each for each in current_trace().inputs)
    before = 0 if x.offset is None else x.offset
    relative = 0 if storage_offset is None else storage_offset - before
    origin = storage.root if is_input and storage_offset is not None else None
    offset = relative if origin is None else relative + _elements_before(origin, x.dtype)
    view = StridedView(tuple(size), tuple(stride), offset, x.strides, origin)
    overlaps = any(
        statically_true(step == 0) and not statically_true(n == 1) for step, n in zip(x.strides, x.shape, strict=True)
    )
    inside = not overlaps and _within(x, view, relative)
    if not inside and (not is_input or storage.version):
        raise Ambiguous(f"{op} of {x} shows memory that is not its own")
    return x, view, inside and origin is None


def _elements_before(x: TensorProxy, dtype: torch.dtype) -> Dim:
    """Return the number of elements of a dtype before x in its memory."""
    assert x.offset is not None, f"{x} is an input of an unknown offset"
    return x.offset if x.dtype == dtype else x.offset * x.dtype.itemsize // dtype.itemsize


def _with_offset(view: StridedView) -> StridedView:
    """Replace the origin by its offset, for a call on a value."""
    return view if view.origin is None else view._replace(origin=prims.byte_offset(view.origin))


def _show(symbol: Symbol, args: tuple, kwargs: dict, memory: Memory) -> TensorProxy:
    input, view, inside = _locate_view("as_strided", memory, *args, **kwargs)
    with outside_regions(not inside):  # whose code does not check the end of memory
        out = symbol(memory.read(input), *_with_offset(view))

    def invert(x: TensorProxy, new: TensorProxy) -> TensorProxy:
        if not inside:
            raise Ambiguous(f"an in-place change through as_strided of {input}, which may show memory around it")
        return prims.view_scatter(x, new, prims.as_strided, tuple(view), {}, None)

    memory.alias(out, input, ViewStep(prims.as_strided, tuple(view), {}, None, invert))
    return out


@torchsymbol(torch.as_strided, Tensor.as_strided, handler=_show)
def as_strided(input: TensorProxy, *view: Any) -> TensorProxy:
    """Return a view of input's memory with another shape and strides."""
    return prims.as_strided(input, *view)


def _copy(symbol: Symbol, args: tuple, kwargs: dict, memory: Memory) -> TensorProxy:
    input, view, _ = _locate_view("as_strided_copy", memory, *args, **kwargs)
    return symbol(memory.read(input), *_with_offset(view))


@torchsymbol(torch.as_strided_copy, handler=_copy)
def as_strided_copy(input: TensorProxy, *view: Any) -> TensorProxy:
    """Return a copy of the view that as_strided makes."""
    return prims.clone(prims.as_strided(input, *view), torch.contiguous_format)
