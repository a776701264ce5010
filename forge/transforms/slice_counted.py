"""Indices that are ranges become slices.

    embedding(arange(n), weight) = weight[:n]
    index_select(x, 1, arange(0, n, 2)) = x[:, 0:n:2]

Positions of a decoder and relative positions are such indices. A region reads a slice like any other tensor, and its
gradient is the incoming one padded with zeros: torch sorts the rows of an embedding, and adds an index's one by one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false

from forge import prims, torchlang
from forge.ir import BoundSymbol, Symbol, TensorProxy, Trace
from forge.ir.proxies import Dim, hint_of
from forge.prims.core import statically_true
from forge.transforms.makers import Makers
from forge.transforms.replacement import rewrite

_DTYPES = frozenset({torch.int32, torch.int64, torch.float32, torch.float64})  # which count to _MOST without rounding
_MOST = 2**24  # the most rows of a table: float32 represents every integer up to it


class Count(NamedTuple):
    """The values start, start + step, … along a dim of a tensor, the same along all others; dim is None if step is
    0."""

    start: Dim
    step: Dim
    dim: int | None


def slice_counted(trace: Trace, in_torch: Callable[[BoundSymbol], bool] = lambda bound: True) -> Trace:
    """Return the trace with copies of slices in place of reads by ranges.

    in_torch: whether a call runs as torch runs it.
    """
    makers = Makers(trace)

    def read(bound: BoundSymbol) -> TensorProxy | None:
        rule = _READS.get(bound.symbol)
        if rule is None or not in_torch(bound):
            return None
        place = rule(**bound.symbol.bind(bound.args, bound.kwargs))
        if place is None:
            return None
        x, dim, index = place
        count = _count(index, makers)
        return None if count is None or count.dim is None else _slice(x, dim, index, count, bound.output.strides)

    return rewrite(trace, "slice_counted", read)


Place = tuple[TensorProxy, int, TensorProxy]  # the tensor, its dim and the index along it


def _of_embedding(
    input: TensorProxy, weight: TensorProxy, padding_idx: int | None, scale_grad_by_freq: bool, **rest: Any
) -> Place | None:
    return (weight, 0, input) if padding_idx is None and not scale_grad_by_freq else None


def _of_index_select(input: TensorProxy, dim: int, index: TensorProxy) -> Place | None:
    return (input, dim % input.ndim, index) if input.ndim and index.ndim else None


def _of_getitem(input: TensorProxy, key: Any) -> Place | None:
    """Return the only index of a call, after dims that are taken whole."""
    items = list(key) if isinstance(key, tuple) else [key]
    places = [place for place, item in enumerate(items) if isinstance(item, TensorProxy)]
    others = [item for item in items if not isinstance(item, TensorProxy)]
    if len(places) != 1 or any(item != slice(None) for item in others):
        return None
    index = items[places[0]]
    return (input, places[0], index) if index.ndim else None


def _of_aten_index(self: TensorProxy, indices: Any) -> Place | None:
    return _of_getitem(self, tuple(slice(None) if each is None else each for each in indices))


_READS: dict[Any, Callable[..., Place | None]] = {
    torchlang.embedding: _of_embedding,
    torchlang.index_select: _of_index_select,
    torchlang.getitem: _of_getitem,
    torchlang.aten_index: _of_aten_index,
}


def _slice(
    x: TensorProxy, dim: int, index: TensorProxy, count: Count, strides: tuple[Dim, ...] | None
) -> TensorProxy | None:
    """Return a copy of the elements that an index reads, with these strides; None if it may be out of bounds."""
    start, step, along = count
    assert along is not None
    length, size = index.shape[along], x.shape[dim]
    last = start + step * (length - 1)
    if not (isinstance(step, int) and step > 0 and statically_true(start >= 0)):
        return None
    if not all(map(guard_or_false, (length > 0, last < size, size <= _MOST))):
        return None
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    part = torchlang.getitem(x, (*[slice(None)] * dim, slice(start, last + 1, step)))
    ones: list[Dim] = [1] * index.ndim
    ones[along] = length
    spread = torchlang.expand(torchlang.reshape(part, (*before, *ones, *after)), (*before, *index.shape, *after))
    return _in_order_of(spread, strides)


def _in_order_of(x: TensorProxy, strides: tuple[Dim, ...] | None) -> TensorProxy:
    """Return a copy whose dims have the memory order of these strides, since random numbers are drawn in that order,
    and the caller may see it."""
    order = sorted(range(x.ndim), key=lambda dim: 0 if strides is None else -hint_of(strides[dim]))
    copy = torchlang.clone(torchlang.permute(x, order), memory_format=torch.contiguous_format)
    return torchlang.permute(copy, sorted(range(x.ndim), key=order.__getitem__))


def _count(value: Any, makers: Makers) -> Count | None:
    """Return the range that a tensor's values, or a number, form, if they do."""
    if not isinstance(value, TensorProxy):
        return _constant(value)
    call = makers.prim(value.name) if value.dtype in _DTYPES else None
    rule = _RULES.get(call.symbol) if call is not None else None
    count = None if call is None or rule is None else rule(makers, *call.args, **call.kwargs)
    return count if count is not None and _is_exact(value, count) else None


def _is_exact(x: TensorProxy, count: Count) -> bool:
    """Return whether a tensor's dtype represents all numbers of its range exactly."""
    if not x.dtype.is_floating_point:
        return True
    ends = [count.start] if count.dim is None else [count.start, count.start + count.step * (x.shape[count.dim] - 1)]
    return all(guard_or_false(end >= -_MOST) and guard_or_false(end <= _MOST) for end in ends)


def _constant(number: Any) -> Count | None:
    if isinstance(number, float):
        return Count(int(number), 0, None) if number.is_integer() else None
    return Count(number, 0, None) if type(number) in (int, torch.SymInt) else None


def _of_iota(
    makers: Makers, length: Dim, start: Any, step: Any, dtype: torch.dtype, device: torch.device
) -> Count | None:
    first, second = _constant(start), _constant(step)
    return None if first is None or second is None else Count(first.start, second.start, 0)


def _of_full(makers: Makers, shape: tuple[Dim, ...], value: Any, *options: Any, **kwargs: Any) -> Count | None:
    return _constant(value)


def _of_cumsum(makers: Makers, x: TensorProxy, dim: int, *options: Any, **kwargs: Any) -> Count | None:
    count = _count(x, makers)
    return Count(count.start, count.start, dim) if count is not None and count.dim is None and x.ndim else None


def _of_same(makers: Makers, x: TensorProxy, *options: Any, **kwargs: Any) -> Count | None:
    return _count(x, makers)


def _of_add(makers: Makers, a: Any, b: Any, sign: int = 1) -> Count | None:
    one, other = _count(a, makers), _count(b, makers)
    if one is None or other is None or None is not one.dim != other.dim is not None:
        return None
    dim = other.dim if one.dim is None else one.dim
    return Count(one.start + sign * other.start, one.step + sign * other.step, dim)


def _of_sub(makers: Makers, a: Any, b: Any) -> Count | None:
    return _of_add(makers, a, b, -1)


def _of_mul(makers: Makers, a: Any, b: Any) -> Count | None:
    one, other = _count(a, makers), _count(b, makers)
    if one is None or other is None or (one.dim is not None and other.dim is not None):
        return None
    counted, factor = (one, other) if other.dim is None else (other, one)
    return Count(counted.start * factor.start, counted.step * factor.start, counted.dim)


def _of_broadcast(makers: Makers, x: TensorProxy, shape: tuple[Dim, ...], dims: tuple[int, ...]) -> Count | None:
    count = _count(x, makers)
    if count is None or count.dim is None:
        return count
    dim = dims[count.dim]
    return count._replace(dim=dim) if statically_true(x.shape[count.dim] == shape[dim]) else None


def _of_squeeze(makers: Makers, x: TensorProxy, dims: tuple[int, ...]) -> Count | None:
    count = _count(x, makers)
    if count is None or count.dim is None:
        return count
    return None if count.dim in dims else count._replace(dim=count.dim - sum(dim < count.dim for dim in dims))


def _of_reshape(makers: Makers, x: TensorProxy, shape: tuple[Dim, ...]) -> Count | None:
    """Return the range of a vector after a reshape that only adds or removes dims of size 1."""
    count = _count(x, makers)
    if count is None or count.dim is None:
        return count
    lengths = [dim for dim, size in enumerate(shape) if not statically_true(size == 1)]
    is_vector = all(statically_true(size == 1) for dim, size in enumerate(x.shape) if dim != count.dim)
    if not is_vector or len(lengths) != 1 or not statically_true(shape[lengths[0]] == x.shape[count.dim]):
        return None
    return count._replace(dim=lengths[0])


def _of_slice(makers: Makers, x: TensorProxy, dim: int, start: Dim, stop: Dim, step: int = 1) -> Count | None:
    count = _count(x, makers)
    if count is None or count.dim != dim:
        return count
    return Count(count.start + start * count.step, count.step * step, dim)


_RULES: dict[Symbol, Callable[..., Count | None]] = {
    prims.iota: _of_iota,
    prims.full: _of_full,
    prims.cumsum: _of_cumsum,
    prims.convert_element_type: _of_same,
    prims.device_put: _of_same,
    prims.clone: _of_same,
    prims.contiguous: _of_same,
    prims.add: _of_add,
    prims.sub: _of_sub,
    prims.mul: _of_mul,
    prims.broadcast_in_dim: _of_broadcast,
    prims.squeeze: _of_squeeze,
    prims.reshape: _of_reshape,
    prims.slice: _of_slice,
}
