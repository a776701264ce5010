"""The torch executor's implementations of the shape family."""

from collections.abc import Callable
from typing import Any

import torch

from forge import clang, prims, torchlang
from forge.executors.executor import decline
from forge.executors.torchex.core import run_clang, run_prim, run_prims, run_torchlang, torch_prims, torchex
from forge.executors.torchex.memory import strided_scatter
from forge.ir import Dim, Symbol, Tag, TensorProxy
from forge.prims.core import like
from forge.torchlang import torch_function_of

aten = torch.ops.aten

run_prims(
    {
        prims.reshape: torch.reshape,
        prims.squeeze: torch.squeeze,
        prims.slice: aten.slice.Tensor,
        prims.slice_backward: aten.slice_backward.default,
        prims.slice_scatter: torch.slice_scatter,
        prims.cat: torch.cat,
        prims.flip: torch.flip,
        prims.detach: torch.Tensor.detach,
        prims.diagonal: torch.diagonal,
        prims.diagonal_backward: aten.diagonal_backward.default,
        prims.windows: torch.Tensor.unfold,
        prims.windows_backward: aten.unfold_backward.default,
    }
)
run_clang(
    {
        clang.cat: torch.cat,
        clang.flatten: torch.flatten,
        clang.select: torch.select,
        clang.stack: torch.stack,
        clang.transpose: torch.transpose,
        clang.tril: torch.tril,
        clang.triu: torch.triu,
        clang.unsqueeze: torch.unsqueeze,
    }
)
# strides may differ from eager's after another executor: reshape returns a view if possible, and never fails
run_torchlang(
    torchlang.view,
    torch.Tensor.reshape,
    checker=lambda self, *shape, **kwargs: not kwargs or decline("Tensor.reshape has no argument 'size'"),
)
run_torchlang(torchlang.view_as, torch.Tensor.reshape_as)


@run_prim(prims.clone)
def clone(x: torch.Tensor, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
    """Call torch.clone, whose memory format is a keyword."""
    return torch.clone(x, memory_format=memory_format)


@run_prim(prims.contiguous)
def contiguous(x: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
    """Call Tensor.contiguous, whose memory format is a keyword."""
    return x.contiguous(memory_format=memory_format)


def broadcast_in_dim(x: torch.Tensor, shape: tuple, dims: tuple) -> torch.Tensor:
    """Place x's dims at `dims`, then expand."""
    for dim in range(len(shape)):
        if dim not in dims:
            x = x.unsqueeze(dim)
    return x.expand(shape)


torch_prims.register_implementation(prims.broadcast_in_dim, broadcast_in_dim)
torch_prims.register_implementation(prims.permute, torch.permute)
_place_and_expand = torchex.register_operator(
    "broadcast_in_dim", like=prims.broadcast_in_dim, fn=broadcast_in_dim, tags=[Tag.VIEW]
)
_expand = torchex.register_operator(
    "expand", meta=lambda x, shape: like(x, shape=shape), fn=torch.Tensor.expand, tags=[Tag.VIEW]
)
_unsqueeze = torchex.register_operator("unsqueeze", like=clang.unsqueeze, fn=torch.unsqueeze, tags=[Tag.VIEW])
_permute = torchex.register_operator("permute", like=prims.permute, fn=torch.permute, tags=[Tag.VIEW])
_t = torchex.register_operator(
    "t", meta=lambda x: prims.permute.definition(x, (1, 0)), fn=torch.Tensor.t, tags=[Tag.VIEW]
)


def _broadcast(x: TensorProxy, shape: tuple[Dim, ...], dims: tuple[int, ...]) -> TensorProxy:
    """Record only the operations needed: an expand if the dims are the last, an unsqueeze for one new dim of size 1."""
    new = [dim for dim in range(len(shape)) if dim not in dims]
    same_sizes = all(prims.statically_true(x.shape[i] == shape[dim]) for i, dim in enumerate(dims))
    if len(new) == 1 and same_sizes and prims.statically_true(shape[new[0]] == 1):
        return _unsqueeze(x, new[0])
    if all(dim < len(new) for dim in new):
        return _expand(x, shape)
    return _expand(_unsqueeze(x, new[0]), shape) if len(new) == 1 else _place_and_expand(x, shape, dims)


torchex.register_implementation(prims.broadcast_in_dim, execution_transform=_broadcast)
torchex.register_implementation(
    prims.permute, execution_transform=lambda x, dims: _t(x) if tuple(dims) == (1, 0) else _permute(x, dims)
)


@run_prim(prims.pad)
def pad(x: torch.Tensor, padding: tuple, value: Any) -> torch.Tensor:
    """Call torch's pad, which takes the last dim first."""
    flat = [amount for pair in reversed(padding) for amount in pair]
    return torch.constant_pad_nd(x, flat, value)


def _function_of(view: Symbol) -> Callable:
    """Return the function that runs a view: an opaque call's function, this executor's implementation of a prim, or the
    torch function."""
    if view.op is not None:
        return view.op
    if not view.is_prim:
        return torch_function_of(view)
    op = torchex.implementations[view.id].op
    assert op is not None and op.op is not None, f"{view.id} is not run by one function"
    return op.op


@run_prim(prims.view_scatter)
def view_scatter(
    x: torch.Tensor, y: torch.Tensor, view: Any, args: tuple, kwargs: dict, index: int | None = None
) -> torch.Tensor:
    """Return a clone of x with y copied into its view."""
    if view is prims.as_strided:  # its strides may differ from x's
        return strided_scatter(x, y, *args)
    out = x.clone()
    views = _function_of(view)(out, *args, **kwargs)
    (views if index is None else views[index]).copy_(y)
    return out
