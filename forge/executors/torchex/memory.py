"""The torch executor's implementations of the memory family."""

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from forge import prims
from forge.executors.torchex.core import run_prim, run_prims, torchex
from forge.ir import Dim, Tag
from forge.ir.memory import overlaps
from forge.torch_internals.functions import torch_foreach_copy_

ROW_BYTES = 16  # cuBLAS's fast kernels require rows that begin at multiples of it


@run_prim(prims.with_data)
def with_data(x: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return the value; the gradient rule defines its autograd history."""
    return new


run_prims(
    {
        prims.copy_: torch.Tensor.copy_,
        prims.item: torch.Tensor.item,
        prims.length: torch.Tensor.size,
        prims.alias: torch.ops.aten.alias.default,
    }
)


@run_prim(prims.copy_data_)
def copy_data_(x: torch.Tensor, y: torch.Tensor) -> None:
    """Write to x's memory without a bump of its version counter."""
    x.data.copy_(y)


def copy_each_(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Write each source to its target's memory, in few kernel launches."""
    if not any(map(torch.Tensor.is_neg, targets)):
        torch_foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):  # torch's function does not write to negated views
        target.copy_(source)


copies = torchex.register_operator("copy_each_", meta=lambda targets, sources: None, fn=copy_each_, tags=[Tag.EFFECT])


@run_prim(prims.byte_offset)
def byte_offset(x: torch.Tensor) -> Dim:
    """Return the storage offset in bytes, because views of other dtypes count elements of another size."""
    return x.storage_offset() * x.element_size()


def _relative(x: torch.Tensor, offset: Dim, origin: torch.Tensor | Dim | None) -> Dim:
    """Return an offset relative to x's first element, in elements of x's dtype."""
    if origin is None:
        return offset
    return offset - (byte_offset(origin) if isinstance(origin, torch.Tensor) else origin) // x.element_size()


def _reach(shape: tuple, strides: tuple) -> int:
    """Return the number of elements of memory that a tensor spans."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def _span(shape: tuple, strides: tuple, size: tuple, stride: tuple, offset: Dim) -> tuple[Dim, Dim]:
    """Return (elements before x, elements in all) of memory that holds x and the view, which may exceed x."""
    before = max(-offset, 0)
    return before, before + max(_reach(shape, strides), offset + _reach(size, stride), 0)


@run_prim(prims.as_strided)
def as_strided(
    x: torch.Tensor, size: tuple, stride: tuple, offset: Dim, strides: tuple, origin: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Return a view of x if x has the strides that the program assumes and its storage contains the view; else a view
    of a copy that is padded with zeros."""
    offset = _relative(x, offset, origin)
    begin = x.storage_offset() + offset
    if _lies_by(x, strides) and begin >= 0 and _is_in_memory(x, begin + _reach(size, stride)):
        return x.as_strided(size, stride, begin)
    memory, before = _memory_of(x, size, stride, offset, strides)
    return memory.as_strided(size, stride, before + offset)


def _lies_by(x: torch.Tensor, strides: tuple) -> bool:
    """Return whether x has these strides; the stride of a dim of size 1 is ignored."""
    dims = zip(x.shape, x.stride(), strides, strict=True)
    return 0 in x.shape or all(size == 1 or own == step for size, own, step in dims)


def _is_in_memory(x: torch.Tensor, end: Dim) -> bool:
    """Return whether x's storage has elements of x's dtype up to `end`."""
    size = x.untyped_storage().nbytes()
    if isinstance(size, torch.SymInt):  # no operator returns it, so make_fx cannot trace it
        with disable_proxy_modes_tracing():
            return bool(end * x.element_size() <= size)
    return end * x.element_size() <= size


def _memory_of(x: torch.Tensor, size: tuple, stride: tuple, offset: Dim, strides: tuple) -> tuple[torch.Tensor, Dim]:
    """Return memory that holds x with these strides, zero outside x, and the offset of x in it."""
    before, count = _span(x.shape, strides, size, stride, offset)
    memory = x.new_zeros(count)
    if overlaps(x.shape, strides):  # elements that share memory are equal
        places = _offsets(count, x.shape, strides, before, x.device)
        return memory.index_copy_(0, places, x.reshape(-1)), before
    return torch.as_strided_scatter(memory, x, x.shape, strides, before), before


@run_prim(prims.as_strided_backward)
def as_strided_backward(
    g: torch.Tensor, shape: tuple, stride: tuple, offset: Dim, strides: tuple, origin: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Add each element of g at its position in the view; drop the gradient outside x. Elements of x that share memory
    share their gradient equally."""
    offset = _relative(g, offset, origin)
    before, count = _span(shape, strides, g.shape, stride, offset)
    memory = _added_up(g, count, stride, before + offset)
    if overlaps(shape, strides):
        memory = memory / _added_up(g.new_ones(shape), count, strides, before)
    return memory.as_strided(shape, strides, before)


def _added_up(g: torch.Tensor, count: Dim, stride: tuple, offset: Dim) -> torch.Tensor:
    """Return `count` elements of memory, each the sum of the elements of g at its offset in a view of these strides."""
    return g.new_zeros(count).index_add_(0, _offsets(count, g.shape, stride, offset, g.device), g.reshape(-1))


def _offsets(count: Dim, shape: tuple, stride: tuple, offset: Dim, device: torch.device) -> torch.Tensor:
    """Return the offset of each element of a view of this shape and these strides, in `count` elements of memory."""
    every = torch.arange(count, device=device)  # type: ignore[arg-type]  # its stub leaves out torch.SymInt
    return every.as_strided(shape, stride, offset).reshape(-1)


def strided_scatter(
    x: torch.Tensor,
    y: torch.Tensor,
    size: tuple,
    stride: tuple,
    offset: Dim,
    strides: tuple,
    origin: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Return a copy of x whose as_strided view is y."""
    offset = _relative(x, offset, origin)
    memory, before = _memory_of(x, size, stride, offset, strides)
    return torch.as_strided_scatter(memory, y, size, stride, before + offset).as_strided(x.shape, strides, before)
