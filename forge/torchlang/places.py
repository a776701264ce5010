"""The functions of torch that write at given indices, read by a mask, or return where and what elements are."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from forge import clang, prims
from forge.ir import INT_TYPES, Dim, Number, TensorProxy, check
from forge.prims.core import check_dim, same, same_shape, statically_true, torch_check
from forge.torch_internals.functions import torch_unsafe_masked_index, torch_unsafe_masked_index_put_accumulate
from forge.torchlang import shape as shapes
from forge.torchlang.aliases import check_operands, torchaliases
from forge.torchlang.core import check_tensor, torchsymbol

TensorOrNumber = TensorProxy | Number
Indices = Sequence[TensorProxy]


@torchsymbol(torch.diagonal_scatter, Tensor.diagonal_scatter)
def diagonal_scatter(
    input: TensorProxy, src: TensorProxy, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> TensorProxy:
    """Return input with the diagonal that torch.diagonal views replaced by src."""
    diagonal = shapes.diagonal(input, offset, dim1, dim2)
    torch_check(
        same_shape(src.shape, diagonal.shape),
        lambda: (
            "diagonal_scatter: expected src to have a size equal to the slice of self. "
            f"src size = {list(src.shape)}, slice size = {list(diagonal.shape)}"
        ),
    )
    new = clang.convert(src, input.dtype)
    return prims.view_scatter(input, new, shapes.diagonal, (offset, dim1, dim2), {}, None)


_REDUCTIONS = ("prod", "mean", "amax", "amin")


def _check_index_reduce(input: TensorProxy, dim: int, index: TensorProxy, source: TensorProxy, reduce: str) -> None:
    op = "index_reduce_()"
    torch_check(
        reduce in _REDUCTIONS,
        lambda: f"index_reduce(): Expected reduce to be one of prod, mean, amax or amin but got {reduce}.",
    )
    check(index.ndim <= 1, lambda: f"{op}: Index is supposed to be a vector, but got {index}", IndexError)
    torch_check(
        index.dtype in (torch.int32, torch.int64),
        lambda: f"{op}: Expected dtype int32/int64 for index but got: {index}",
    )
    torch_check(
        input.dtype == source.dtype,
        lambda: f"{op}: self ({input}) and source ({source}) must have the same scalar type",
    )
    rest = [[n for i, n in enumerate(x.shape) if i != dim] for x in (input, source)]
    torch_check(
        same_shape(*rest),
        lambda: (
            "source tensor shape must match self tensor shape, excluding the specified dimension. "
            f"Got self.shape = {list(input.shape)} source.shape = {list(source.shape)}"
        ),
    )
    torch_check(
        source.ndim == 0 or same(index.numel(), source.shape[dim]),
        lambda: f"{op}: Number of indices in {index} should be equal to source.size(dim) of {source}, for dim: {dim}",
    )


@torchsymbol(torch.index_reduce, Tensor.index_reduce, inplace=Tensor.index_reduce_)
def index_reduce(
    input: TensorProxy, dim: int, index: TensorProxy, source: TensorProxy, reduce: str, *, include_self: bool = True
) -> TensorProxy:
    """Return input with the slices of source that have the same `index` reduced: "prod", "mean", "amax" or "amin"."""
    dim = check_dim("index_reduce", dim, input.ndim)
    _check_index_reduce(input, dim, index, source, reduce)
    if source.ndim == 0:
        index = clang.reshape(index, ())
    else:
        shape = [source.shape[i] if i == dim else 1 for i in range(source.ndim)]
        index = clang.expand(clang.reshape(index, shape), source.shape)
    return prims.scatter_reduce(input, dim, index, source, reduce, include_self)


@torchsymbol(torch.put, Tensor.put, inplace=Tensor.put_)
def put(input: TensorProxy, index: TensorProxy, source: TensorProxy, accumulate: bool = False) -> TensorProxy:
    """Return input with its elements at flat indices replaced by (with `accumulate`, increased by) source's, in
    order."""
    torch_check(index.dtype == torch.int64, lambda: f"put_(): Expected a long tensor for index, but got {index}")
    torch_check(
        input.dtype == source.dtype,
        lambda: f"put_(): self and source expected to have the same dtype, but they are {input} and {source}",
    )
    check(
        same(index.numel(), source.numel()),
        lambda: f"put_(): Expected source and index to have the same number of elements: {source} and {index}",
        IndexError,
    )
    check(
        not statically_true(input.numel() == 0) or statically_true(index.numel() == 0),
        lambda: f"put_(): Tried to put elements into an empty tensor: {input}",
        IndexError,
    )
    flat, index = clang.reshape(input, (input.numel(),)), clang.reshape(index, (index.numel(),))
    new = prims.index_put(flat, (index,), clang.reshape(source, (source.numel(),)), accumulate)
    return clang.reshape(new, input.shape)


# by a mask, at indices that may be out of range where it is false


def _check_masked(op: str, input: TensorProxy, mask: TensorProxy, indices: Indices) -> None:
    for index in indices:
        check_tensor(op, indices=index)
        torch_check(
            index.dtype in (torch.int32, torch.int64),
            lambda index=index: f"{op}: _unsafe_masked_index found unexpected index type: {index}",
        )


def _clip(index: TensorProxy, low: Dim, high: Dim) -> TensorProxy:
    return clang.minimum(clang.maximum(index, low), high)


@torchsymbol(torch_unsafe_masked_index)
def _unsafe_masked_index(input: TensorProxy, mask: TensorProxy, indices: Indices, fill: Number) -> TensorProxy:
    """Return input[indices] where mask is true, else `fill`; indices out of range are clamped."""
    op = "_unsafe_masked_index"
    _check_masked(op, input, mask, indices)
    if statically_true(input.numel() == 0):
        shape = prims.indexed_shape(op, input, tuple(indices))
        return prims.full(tuple(shape), fill, input.dtype, input.device)
    inside = [_clip(index, 0, input.shape[i] - 1) for i, index in enumerate(indices)]
    result = prims.index(input, tuple(inside))
    return clang.masked_fill(result, clang.logical_not(mask), _as(input.dtype, fill))


def _as(dtype: torch.dtype, number: Number) -> Number:
    """Return a number cast to a dtype as torch does."""
    return number if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool else int(cast(float, number))


@torchsymbol(torch_unsafe_masked_index_put_accumulate)
def _unsafe_masked_index_put_accumulate(
    input: TensorProxy, mask: TensorProxy, indices: Indices, values: TensorProxy
) -> TensorProxy:
    """Return input with values, where mask is true, added at `indices`; negative indices count from the end."""
    op = "_unsafe_masked_index_put_accumulate"
    _check_masked(op, input, mask, indices)
    if statically_true(input.numel() == 0):
        return prims.clone(input)
    inside = [_clip(index, -input.shape[i], input.shape[i] - 1) for i, index in enumerate(indices)]
    updates = clang.masked_fill(values, clang.logical_not(mask), 0)
    return prims.index_put(input, tuple(inside), updates, True)


prims.register_vjp(
    _unsafe_masked_index,
    input=lambda g, input, mask, indices: _unsafe_masked_index_put_accumulate(
        prims.full(input.shape, 0, g.dtype, g.device), mask, indices, g
    ),
)


prims.register_vjp(
    _unsafe_masked_index_put_accumulate,
    input=lambda g: g,
    values=lambda g, mask, indices: _unsafe_masked_index(g, mask, indices, 0),
)


# values of elements, and their indices


@torchsymbol(torch.isin)
def isin(
    elements: TensorOrNumber, test_elements: TensorOrNumber, *, assume_unique: bool = False, invert: bool = False
) -> TensorProxy:
    """Return whether each element is in test_elements (is not, with `invert`). nan is in none. Dtypes: real, not
    bool."""
    check_operands("isin", elements=elements, test_elements=test_elements)
    for each in (elements, test_elements):
        check(
            not isinstance(each, TensorProxy) or (each.dtype != torch.bool and not each.dtype.is_complex),
            lambda each=each: f"Unsupported input type encountered for isin(): {each}",
            NotImplementedError,
        )
    result = _is_in(elements, test_elements)
    return clang.logical_not(result) if invert else result


def _is_in(elements: TensorOrNumber, others: TensorOrNumber) -> TensorProxy:
    if not isinstance(others, TensorProxy):
        return clang.eq(elements, others)
    if not isinstance(elements, TensorProxy):
        return clang.any(clang.eq(others, elements))
    dtype = torch.promote_types(elements.dtype, others.dtype)
    elements, others = clang.convert(elements, dtype), clang.convert(others, dtype)
    if statically_true(others.numel() == 0):
        return prims.full(elements.shape, False, torch.bool, elements.device)
    ordered = prims.sort(clang.reshape(others, (others.numel(),)), 0)[0]
    place = prims.searchsorted(ordered, elements, False, torch.int64)
    nearest = prims.index(ordered, (clang.minimum(place, ordered.shape[0] - 1),))
    return clang.eq(nearest, elements)


@torchsymbol(torch.functional.unravel_index)
def unravel_index(indices: TensorProxy, shape: Dim | Sequence[Dim]) -> tuple[TensorProxy, ...]:
    """Return the indices along each dim of a tensor of `shape` for flat indices. Dtypes: integer; out is int64."""
    check(
        clang.category(indices.dtype) == 1,
        lambda: f"unravel_index: expected 'indices' to be integer dtype, but got {indices}",
        TypeError,
    )
    shape = (shape,) if isinstance(shape, INT_TYPES) else tuple(shape)
    check(
        not any(statically_true(size < 0) for size in shape),
        lambda: f"unravel_index: 'shape' cannot have negative values, but got {shape}",
        ValueError,
    )
    rest, result = clang.convert(indices, torch.int64), []
    for size in reversed(shape):
        result.append(clang.remainder(rest, size))
        rest = clang.floor_divide(rest, size)
    return tuple(reversed(result))


# hashes, and the indices of nonzero elements


@torchaliases("hash_tensor")
def hash_tensor(
    input: TensorProxy, dim: int | Sequence[int] = (), *, keepdim: bool = False, mode: int = 0
) -> TensorProxy:
    """Return the exclusive or of the elements' bits, in 64-bit dtypes, over `dim` (all by default). Dtypes: out is
    uint64."""
    torch_check(mode == 0, lambda: f"hash_tensor: Unknown hash_tensor mode: {mode}; 0 is the only one")
    return prims.hash_tensor(input, list(clang.as_tuple(dim)), keepdim=keepdim, mode=mode)


@torchaliases("nonzero_static")
def nonzero_static(input: TensorProxy, *, size: Dim, fill_value: int = -1) -> TensorProxy:
    """Return the indices of the first `size` nonzero elements, one per row, padded with fill_value."""
    torch_check(
        not statically_true(size < 0), lambda: f"nonzero_static: 'size' must be an non-negative integer, not {size}"
    )
    return prims.nonzero_static(input, size=size, fill_value=fill_value)
