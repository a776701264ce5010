"""The torch executor's implementations of the memory family."""

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from forge import prims
from forge.executors.torchex.core import run_prim, run_prims, torchex
from forge.ir import Dim, Tag
from forge.ir.memory import overlaps
from forge.torch_internals.functions import torch_foreach_copy_

ROW_BYTES = 16  # the fast kernels of cuBLAS take matrices whose rows begin at multiples of it


@run_prim(prims.with_data)
def with_data(x: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return the value; its history is the gradient rule's."""
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
    """Write into x's memory, of which x's version says nothing."""
    x.data.copy_(y)


def copy_each_(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Write each source into its target's memory, in few kernels."""
    if not any(map(torch.Tensor.is_neg, targets)):
        torch_foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):  # torch's function writes to no negated view
        target.copy_(source)


copies = torchex.register_operator("copy_each_", meta=lambda targets, sources: None, fn=copy_each_, tags=[Tag.EFFECT])


@run_prim(prims.byte_offset)
def byte_offset(x: torch.Tensor) -> Dim:
    """Return the storage offset in bytes: a view of another dtype counts other elements."""
    return x.storage_offset() * x.element_size()


def _relative(x: torch.Tensor, offset: Dim, origin: torch.Tensor | Dim | None) -> Dim:
    """Elements of x's dtype, after its first one."""
    if origin is None:
        return offset
    return offset - (byte_offset(origin) if isinstance(origin, torch.Tensor) else origin) // x.element_size()


def _reach(shape: tuple, strides: tuple) -> int:
    """Return the number of elements of memory that a tensor spans."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def _span(shape: tuple, strides: tuple, size: tuple, stride: tuple, offset: Dim) -> tuple[Dim, Dim]:
    """(elements before x, elements in all) of memory that holds x and what is shown of its surroundings."""
    before = max(-offset, 0)
    return before, before + max(_reach(shape, strides), offset + _reach(size, stride), 0)


@run_prim(prims.as_strided)
def as_strided(
    x: torch.Tensor, size: tuple, stride: tuple, offset: Dim, strides: tuple, origin: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Return a view where x has the strides that the program knows of it, and memory around it where that is shown;
    else a view of a copy, with zeros around it."""
    offset = _relative(x, offset, origin)
    begin = x.storage_offset() + offset
    if _lies_by(x, strides) and begin >= 0 and _is_in_memory(x, begin + _reach(size, stride)):
        return x.as_strided(size, stride, begin)
    memory, before = _memory_of(x, size, stride, offset, strides)
    return memory.as_strided(size, stride, before + offset)


def _lies_by(x: torch.Tensor, strides: tuple) -> bool:
    """Return whether x's elements lie where these strides say; that of a dim of one element says nothing."""
    dims = zip(x.shape, x.stride(), strides, strict=True)
    return 0 in x.shape or all(size == 1 or own == step for size, own, step in dims)


def _is_in_memory(x: torch.Tensor, end: Dim) -> bool:
    """Return whether the memory that x lies in has elements of x's dtype up to `end`."""
    size = x.untyped_storage().nbytes()
    if isinstance(size, torch.SymInt):  # of no operator: make_fx cannot record where it comes from
        with disable_proxy_modes_tracing():
            return bool(end * x.element_size() <= size)
    return end * x.element_size() <= size


def _memory_of(x: torch.Tensor, size: tuple, stride: tuple, offset: Dim, strides: tuple) -> tuple[torch.Tensor, Dim]:
    """Memory that holds x with these strides, and zeros where more is shown; at which element x begins in it."""
    before, count = _span(x.shape, strides, size, stride, offset)
    memory = x.new_zeros(count)
    if overlaps(x.shape, strides):  # elements that are one in memory are equal
        places = _offsets(count, x.shape, strides, before, x.device)
        return memory.index_copy_(0, places, x.reshape(-1)), before
    return torch.as_strided_scatter(memory, x, x.shape, strides, before), before


@run_prim(prims.as_strided_backward)
def as_strided_backward(
    g: torch.Tensor, shape: tuple, stride: tuple, offset: Dim, strides: tuple, origin: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Each element of g is added where the view showed it; what it showed around x is left out. Elements of x that are
    one in memory share its part."""
    offset = _relative(g, offset, origin)
    before, count = _span(shape, strides, g.shape, stride, offset)
    memory = _added_up(g, count, stride, before + offset)
    if overlaps(shape, strides):
        memory = memory / _added_up(g.new_ones(shape), count, strides, before)
    return memory.as_strided(shape, strides, before)


def _added_up(g: torch.Tensor, count: Dim, stride: tuple, offset: Dim) -> torch.Tensor:
    """Return `count` elements of memory, each the sum of the elements of g that a view of these strides has there."""
    return g.new_zeros(count).index_add_(0, _offsets(count, g.shape, stride, offset, g.device), g.reshape(-1))


def _offsets(count: Dim, shape: tuple, stride: tuple, offset: Dim, device: torch.device) -> torch.Tensor:
    """Return the offsets, in `count` elements of memory, of the elements of a view of this shape and these strides."""
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
    """Return a copy of x with y where as_strided shows it."""
    offset = _relative(x, offset, origin)
    memory, before = _memory_of(x, size, stride, offset, strides)
    return torch.as_strided_scatter(memory, y, size, stride, before + offset).as_strided(x.shape, strides, before)
