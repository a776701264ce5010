"""The functions of torch that read and write at places given by keys, index tensors and masks."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from forge import clang, prims
from forge.clang.core import known_equal
from forge.ir import Number, TensorProxy, check
from forge.prims.core import check_dim, same_shape, torch_check
from forge.torchlang.core import View, torchsymbol

TensorOrNumber = TensorProxy | Number


# keys


def _getitem_view(args: tuple, kwargs: dict) -> View:
    return View.ALWAYS if clang.is_basic(args[1]) else View.NEVER


def _getitem_back(x: TensorProxy, new: TensorProxy, key: Any) -> TensorProxy:
    return clang.with_item(x, key, new)


@torchsymbol(operator.getitem, Tensor.__getitem__, view=_getitem_view, invert=_getitem_back)
def getitem(input: TensorProxy, key: Any) -> TensorProxy:
    """Return input[key]: ints, slices, None and Ellipsis make a view, index tensors a copy.

    Raises: NotImplementedError for a mask.
    """
    return clang.getitem(input, key)


def with_item(input: torch.Tensor, key: Any, value: Any) -> torch.Tensor:
    """Return a copy of input with input[key] = value."""
    out = input.clone()
    out[key] = value
    return out


@torchsymbol(with_item, id="operator.setitem", inplace=(operator.setitem, Tensor.__setitem__))
def setitem(input: TensorProxy, key: Any, value: TensorOrNumber) -> TensorProxy:
    """Return input with input[key] replaced by `value`, which is converted and broadcast."""
    new = clang.with_item(input, key, value)
    return prims.clone(new) if _is_whole(input, key) else new  # otherwise the result would be a view of the value


def _is_whole(input: TensorProxy, key: Any) -> bool:
    """Return whether a key without index tensors covers every element of the input."""
    return clang.is_basic(key) and known_equal((clang.getitem(input, key).numel(),), (input.numel(),))


prims.register_vjp(
    setitem, input=lambda g, key: setitem(g, key, 0), value=lambda g, key, value: clang.item_sum(g, key, value.shape)
)


@torchsymbol(torch.index_put, Tensor.index_put, inplace=(torch.index_put_, Tensor.index_put_))
def index_put(
    input: TensorProxy, indices: Sequence[TensorProxy | None], values: TensorProxy, accumulate: bool = False
) -> TensorProxy:
    """Return input with input[indices] replaced by (with `accumulate`, increased by) values."""
    return prims.index_put(input, tuple(indices), values, accumulate)


@torchsymbol(torch.ops.aten.index, torch.ops.aten.index.Tensor, id="torch.ops.aten.index")
def aten_index(self: TensorProxy, indices: Sequence[TensorProxy | None]) -> TensorProxy:
    """Return self[indices], where None selects a whole dim."""
    check(
        not prims.has_mask(indices),
        lambda: "aten.index: the shape of the result of a mask depends on data, which is not known while tracing",
        NotImplementedError,
    )
    return prims.index(self, tuple(indices))


# along a dim


@torchsymbol(torch.index_select, Tensor.index_select)
def index_select(input: TensorProxy, dim: int, index: TensorProxy) -> TensorProxy:
    """Return the slices along `dim` at the indices in the vector `index`."""
    return clang.index_select(input, dim, index)


@torchsymbol(torch.index_add, Tensor.index_add, inplace=Tensor.index_add_)
def index_add(
    input: TensorProxy, dim: int, index: TensorProxy, source: TensorProxy, *, alpha: Number = 1
) -> TensorProxy:
    """Return input with alpha * the slices of `source` added to the slices at `index`."""
    scaled = source if isinstance(alpha, int) and alpha == 1 else source * alpha
    return clang.index_add(input, dim, index, scaled)


@torchsymbol(torch.index_copy, Tensor.index_copy, inplace=Tensor.index_copy_)
def index_copy(input: TensorProxy, dim: int, index: TensorProxy, source: TensorProxy) -> TensorProxy:
    """Return input with the slices at `index` replaced by those of `source`."""
    return clang.index_copy(input, dim, index, source)


@torchsymbol(torch.index_fill, Tensor.index_fill, inplace=Tensor.index_fill_)
def index_fill(input: TensorProxy, dim: int, index: TensorProxy, value: TensorOrNumber) -> TensorProxy:
    """Return input with the slices at `index` filled with `value`."""
    return clang.index_fill(input, dim, index, value)


@torchsymbol(torch.gather, Tensor.gather)
def gather(input: TensorProxy, dim: int, index: TensorProxy, *, sparse_grad: bool = False) -> TensorProxy:
    """Return out with out[i][j][k] = input[i][index[i][j][k]][k] for dim=1."""
    check(
        not sparse_grad,
        lambda: "gather: sparse_grad=True is not supported; see forge/torchlang/indexing.py",
        NotImplementedError,
    )
    return clang.gather(input, dim, index)


@torchsymbol(torch.take_along_dim, Tensor.take_along_dim)
def take_along_dim(input: TensorProxy, indices: TensorProxy, dim: int | None = None) -> TensorProxy:
    """Return gather's result, with input and indices broadcast except along `dim`, where negative indices count from
    the end; without `dim`, both are flattened."""
    torch_check(
        indices.dtype == torch.int64, lambda: f"take_along_dim: dtype of indices should be Long but got {indices}"
    )
    if dim is None:
        return clang.gather(clang.reshape(input, (-1,)), 0, clang.reshape(indices, (-1,)))
    torch_check(
        input.ndim == indices.ndim,
        lambda: (
            "take_along_dim: input and indices should have the same number of dimensions, "
            f"but got {input} and {indices}"
        ),
    )
    check(
        input.ndim > 0,
        lambda: f"take_along_dim: Dimension specified as {dim} but tensor has no dimensions: {input}",
        IndexError,
    )
    dim = check_dim("take_along_dim", dim, input.ndim)
    indices = clang.where(indices < 0, indices + input.shape[dim], indices)
    free = [tuple(size for i, size in enumerate(x.shape) if i != dim) for x in (input, indices)]
    shape = clang.broadcast_shapes("take_along_dim", *free)
    wide = [clang.expand_to(x, (*shape[:dim], x.shape[dim], *shape[dim:])) for x in (input, indices)]
    return clang.gather(wide[0], dim, wide[1])


@torchsymbol(torch.take, Tensor.take)
def take(input: TensorProxy, index: TensorProxy) -> TensorProxy:
    """Return the elements of flattened input at `index`."""
    torch_check(index.dtype == torch.int64, lambda: f"take(): Expected a long tensor for index, but got {index}")
    return prims.index(clang.reshape(input, (-1,)), (index,))


_LEGACY_REDUCE = {"add": "sum", "multiply": "prod"}


@torchsymbol(torch.scatter, Tensor.scatter, inplace=Tensor.scatter_)
def scatter(
    input: TensorProxy,
    dim: int,
    index: TensorProxy,
    src: TensorOrNumber | None = None,
    *,
    value: Number | None = None,
    reduce: str | None = None,
) -> TensorProxy:
    """Return input with out[i][index[i][j][k]][k] = src[i][j][k] for dim=1; with `reduce`, src is added or multiplied
    in."""
    src = value if src is None else src
    check(src is not None, lambda: "scatter: missing the argument 'src' or 'value'", TypeError)
    dim = check_dim("scatter", dim, input.ndim)
    if reduce is None:
        return prims.scatter(input, dim, index, src)
    torch_check(
        reduce in _LEGACY_REDUCE, lambda: f"scatter: reduce argument must be either add or multiply, got {reduce}"
    )
    if not isinstance(src, TensorProxy):
        src = prims.full(index.shape, src, input.dtype, input.device)
    return prims.scatter_reduce(input, dim, index, src, _LEGACY_REDUCE[reduce])


@torchsymbol(torch.scatter_add, Tensor.scatter_add, inplace=Tensor.scatter_add_)
def scatter_add(input: TensorProxy, dim: int, index: TensorProxy, src: TensorProxy) -> TensorProxy:
    """Return input with src added at the places to which scatter would write it."""
    return prims.scatter_add(input, check_dim("scatter_add", dim, input.ndim), index, src)


@torchsymbol(torch.scatter_reduce, Tensor.scatter_reduce, inplace=Tensor.scatter_reduce_)
def scatter_reduce(
    input: TensorProxy, dim: int, index: TensorProxy, src: TensorProxy, reduce: str, *, include_self: bool = True
) -> TensorProxy:
    """Return input with the values that scatter would write to one place reduced: "sum", "prod", "mean", "amax" or
    "amin"."""
    dim = check_dim("scatter_reduce", dim, input.ndim)
    return prims.scatter_reduce(input, dim, index, src, reduce, include_self)


# masks


@torchsymbol(torch.masked_fill, Tensor.masked_fill, inplace=Tensor.masked_fill_)
def masked_fill(input: TensorProxy, mask: TensorProxy, value: TensorOrNumber) -> TensorProxy:
    """Return `value` where mask is true, else input."""
    return clang.masked_fill(input, mask, value)


prims.register_vjp(
    masked_fill,
    input=lambda g, mask: clang.masked_fill(g, mask, 0),
    value=lambda g, mask: clang.where(mask, g, 0).sum(),
)


@torchsymbol(torch.masked_scatter, Tensor.masked_scatter, inplace=Tensor.masked_scatter_)
def masked_scatter(input: TensorProxy, mask: TensorProxy, source: TensorProxy) -> TensorProxy:
    """Return input with the elements where mask is true replaced by source's, in order."""
    return prims.masked_scatter(*clang.broadcast("masked_scatter", input, mask), source)


# slices as functions: the views' inverses


@torchsymbol(torch.select_scatter, Tensor.select_scatter)
def select_scatter(input: TensorProxy, src: TensorProxy, dim: int, index: int) -> TensorProxy:
    """Return input with input.select(dim, index) replaced by src."""
    dim = check_dim("select_scatter", dim, input.ndim)
    shape = (*input.shape[:dim], *input.shape[dim + 1 :])
    torch_check(
        same_shape(shape, src.shape),
        lambda: (
            f"select_scatter: expected src to have a size equal to the slice of self. src size = "
            f"{list(src.shape)}, slice size = {list(shape)}"
        ),
    )
    return clang.with_item(input, (*[slice(None)] * dim, index), src)


@torchsymbol(torch.slice_scatter, Tensor.slice_scatter)
def slice_scatter(
    input: TensorProxy, src: TensorProxy, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> TensorProxy:
    """Return input with input[start:end:step] along `dim` replaced by src."""
    dim = check_dim("slice_scatter", dim, input.ndim)
    bounds = clang.slice_bounds(input.shape[dim], start, end, step)
    first, last, stride = bounds
    shape = (*input.shape[:dim], (last - first + stride - 1) // stride, *input.shape[dim + 1 :])
    torch_check(
        same_shape(shape, src.shape),
        lambda: (
            f"slice_scatter: expected src to have a size equal to the slice of self. src size = "
            f"{list(src.shape)}, slice size = {list(shape)}"
        ),
    )
    return prims.slice_scatter(input, clang.convert(src, input.dtype), dim, *bounds)


# whole-tensor writes


def _run_copy(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return torch.empty_like(self).copy_(src, non_blocking)


@torchsymbol(_run_copy, torch.ops.aten.copy.default, id="torch.Tensor.copy_", inplace=Tensor.copy_)
def copy(self: TensorProxy, src: TensorProxy, non_blocking: bool = False) -> TensorProxy:
    """Return src in self's shape, dtype and device; in row-major order, whatever the strides of src."""
    if src.device != self.device:
        src = prims.device_put(src, self.device, non_blocking)
    return prims.contiguous(_copy_like(self, src))


def _copy_like(self: TensorProxy, src: TensorProxy) -> TensorProxy:
    """Return src in self's shape and dtype, in new memory: neither src nor a view of it."""
    converted = clang.convert(src, self.dtype)
    new = clang.expand(converted, self.shape)
    return new if new is converted and new is not src else prims.clone(new)


# the previous value of a tensor that is written as a whole has a gradient of zeros, as in eager, where it keeps its
# history
prims.register_vjp(
    copy,
    src=lambda g, self, src, non_blocking: (
        g if src.device == self.device else prims.device_put(g, src.device, non_blocking)
    ),
    self=lambda g, self: prims.zeros_like(self),
)


def _run_zero(input: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(input)


@torchsymbol(_run_zero, id="torch.Tensor.zero_", inplace=(torch.zero_, Tensor.zero_))
def zero(input: TensorProxy) -> TensorProxy:
    """Return zeros in input's shape and dtype."""
    return prims.full(input.shape, 0, input.dtype, input.device)


prims.register_vjp(zero, input=lambda g, input: prims.zeros_like(input))


@torchsymbol(torch.fill, inplace=(torch.fill_, Tensor.fill_))
def fill(input: TensorProxy, value: TensorOrNumber) -> TensorProxy:
    """Return `value` in input's shape and dtype. Shapes: value is 0-d."""
    if not isinstance(value, TensorProxy):
        return prims.full(input.shape, value, input.dtype, input.device)
    torch_check(value.ndim == 0, lambda: f"fill: fill_ only supports 0-dimension value tensor but got tensor {value}")
    return _copy_like(input, value)


prims.register_vjp(fill, value=lambda g: g, input=lambda g, input: prims.zeros_like(input))


# places


@torchsymbol(torch.searchsorted)
def searchsorted(
    sorted_sequence: TensorProxy,
    input: TensorOrNumber,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: TensorProxy | None = None,
) -> TensorProxy:
    """Return the index at which each value would be inserted in an ascending row: before equal elements, after them if
    `right`."""
    torch_check(
        side in (None, "left", "right") and not (side == "left" and right),
        lambda: (
            f"searchsorted: side is {side!r} with right={right}; it can only be 'left' or 'right', and not opposites"
        ),
    )
    if sorter is not None:
        sorted_sequence = clang.gather(sorted_sequence, sorted_sequence.ndim - 1, sorter)
    if not isinstance(input, TensorProxy):
        input = prims.full((), input, sorted_sequence.dtype, sorted_sequence.device)
    dtype = torch.int32 if out_int32 else torch.int64
    return prims.searchsorted(sorted_sequence, input, right or side == "right", dtype)


@torchsymbol(torch.bucketize)
def bucketize(
    input: TensorOrNumber, boundaries: TensorProxy, *, out_int32: bool = False, right: bool = False
) -> TensorProxy:
    """Return the bucket between ascending boundaries that contains each value."""
    torch_check(boundaries.ndim == 1, lambda: f"bucketize: boundaries tensor must be 1 dimension, but got {boundaries}")
    if not isinstance(input, TensorProxy):
        input = prims.full((), input, boundaries.dtype, boundaries.device)
    return prims.searchsorted(boundaries, input, right, torch.int32 if out_int32 else torch.int64)
