"""How torch runs the memory family."""

import torch

from forge import prims
from forge.executors.torchex.core import run_prim, run_prims


@run_prim(prims.with_data)
def with_data(x: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The value; its history is the gradient rule's."""
    return new


run_prims({prims.copy_: torch.Tensor.copy_, prims.item: torch.Tensor.item, prims.alias: torch.ops.aten.alias.default})


@run_prim(prims.copy_data_)
def copy_data_(x: torch.Tensor, y: torch.Tensor) -> None:
    """Writes into x's memory, of which x's version says nothing."""
    x.data.copy_(y)


@run_prim(prims.as_strided)
def as_strided(x: torch.Tensor, size: tuple, stride: tuple, offset: int, strides: tuple) -> torch.Tensor:
    """A view where x has the strides that the program knows of it, else a view of a copy that has them."""
    if x.stride() != strides:
        x = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
    return x.as_strided(size, stride, x.storage_offset() + offset)


@run_prim(prims.as_strided_backward)
def as_strided_backward(g: torch.Tensor, shape: tuple, stride: tuple, offset: int, strides: tuple) -> torch.Tensor:
    """Each element of g is added where the view showed it."""
    reach = 1 + sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
    memory = g.new_zeros(reach)
    places = torch.arange(reach, device=g.device).as_strided(g.shape, stride, offset)
    memory.index_add_(0, places.reshape(-1), g.reshape(-1))
    return memory.as_strided(shape, strides)
