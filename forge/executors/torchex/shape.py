"""How torch runs the shape family."""

from typing import Any

import torch

from forge import prims
from forge.executors.torchex.core import run_prim, run_prims
from forge.torchlang import torch_function_of

run_prims(
    {
        prims.reshape: torch.reshape,
        prims.permute: torch.permute,
        prims.squeeze: torch.squeeze,
        prims.cat: torch.cat,
        prims.flip: torch.flip,
        prims.clone: torch.Tensor.clone,
        prims.contiguous: torch.Tensor.contiguous,
        prims.detach: torch.Tensor.detach,
    }
)


@run_prim(prims.broadcast_in_dim)
def broadcast_in_dim(x: torch.Tensor, shape: tuple, dims: tuple) -> torch.Tensor:
    """x's dims placed at `dims`, then expanded."""
    for dim in range(len(shape)):
        if dim not in dims:
            x = x.unsqueeze(dim)
    return x.expand(shape)


@run_prim(prims.slice)
def slice_in_dim(x: torch.Tensor, dim: int, start: int, stop: int, step: int = 1) -> torch.Tensor:
    """x[start:stop:step] along dim."""
    return torch.ops.aten.slice(x, dim, start, stop, step)


@run_prim(prims.slice_backward)
def slice_backward(g: torch.Tensor, shape: tuple, dim: int, start: int, stop: int, step: int = 1) -> torch.Tensor:
    """Zeros with g in the slice."""
    return torch.ops.aten.slice_backward(g, shape, dim, start, stop, step)


@run_prim(prims.pad)
def pad(x: torch.Tensor, padding: tuple, value: Any) -> torch.Tensor:
    """torch's pad wants the last dim first."""
    flat = [amount for pair in reversed(padding) for amount in pair]
    return torch.constant_pad_nd(x, flat, value)


@run_prim(prims.view_scatter)
def view_scatter(
    x: torch.Tensor, y: torch.Tensor, view: Any, args: tuple, kwargs: dict, index: int | None = None
) -> torch.Tensor:
    """A clone of x with y copied into its view."""
    out = x.clone()
    function = view.op or torch_function_of(view)
    shown = function(out, *args, **kwargs)
    (shown if index is None else shown[index]).copy_(y)
    return out
