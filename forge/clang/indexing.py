"""The indexing operations: Python's and NumPy's keys, and torch's functions that read and write at places given by
tensors."""

import builtins
from collections.abc import Callable, Sequence
from typing import Any

import torch

from forge import prims
from forge.clang.core import clangop, convert, expand_to
from forge.clang.elementwise import where
from forge.clang.shape import is_whole, position, reshape, select, slice_bounds, unsqueeze
from forge.ir import INT_TYPES, Dim, Number, TensorProxy, check
from forge.prims.core import check_dim, same, same_shape, statically_true, torch_check
from forge.prims.creation import nested_numbers
from forge.prims.indexing import INDEX_DTYPES

Undo = Callable[[TensorProxy], TensorProxy]
_MASK_DTYPES = (torch.bool, torch.uint8)


class IndexedView:
    """The part of a key that makes views, applied to a tensor.

    tensor: the view. indices: the remaining indices, one entry per dim of `tensor` (a mask stands for all of its dims),
    or empty. undo: a function for each view in order, from the view's new value to that of its base.
    """

    def __init__(self, x: TensorProxy) -> None:
        self.tensor = x
        self.indices: list[TensorProxy | None] = []
        self.undo: list[Undo] = []
        self.dim = 0

    def view(self, new: TensorProxy, undo: Undo) -> None:
        self.tensor = new
        self.undo.append(undo)

    def index(self, index: TensorProxy | None) -> None:
        self.indices.append(index)
        self.dim += index.ndim if index is not None and index.dtype in _MASK_DTYPES else 1

    def write(self, new: TensorProxy) -> TensorProxy:
        """Return the tensor with the viewed elements replaced by `new`."""
        for undo in reversed(self.undo):
            new = undo(new)
        return new


def is_basic(key: Any) -> bool:
    """Return whether a key makes a view: only ints, slices, None and Ellipsis."""
    items = key if isinstance(key, tuple) else (key,)
    return all(
        item is None
        or item is Ellipsis
        or isinstance(item, slice)
        or (isinstance(item, INT_TYPES) and not isinstance(item, bool))
        for item in items
    )


def read_key(op: str, x: TensorProxy, key: Any) -> IndexedView:
    """Apply a key's ints, slices and Nones, and collect its index tensors. Raises IndexError like torch."""
    result = IndexedView(x)
    for item in _complete(op, x, key):
        if item is None:
            _read_none(result)
        elif isinstance(item, slice):
            _read_slice(result, item)
        elif isinstance(item, TensorProxy):
            _read_tensor(result, item)
        else:
            _read_int(op, result, item)
    if all(index is None for index in result.indices):
        result.indices = []
    return result


def _complete(op: str, x: TensorProxy, key: Any) -> list[Any]:
    """Return the items of a key, with an Ellipsis expanded to slices."""
    items = [_as_item(op, x, item) for item in (key if isinstance(key, tuple) else (key,))]
    used = builtins.sum(_dims_of(item) for item in items)
    check(
        used <= x.ndim,
        lambda: f"{op}: too many indices for tensor of dimension {x.ndim}: {key!r} takes {used}",
        IndexError,
    )
    places = [i for i, item in enumerate(items) if item is Ellipsis]
    check(len(places) < 2, lambda: f"{op}: an index can only have a single ellipsis ('...'): {key!r}", IndexError)
    if not places:
        return items
    return [*items[: places[0]], *[slice(None)] * (x.ndim - used), *items[places[0] + 1 :]]


def _dims_of(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if isinstance(item, TensorProxy) and item.dtype in _MASK_DTYPES else 1


def _as_item(op: str, x: TensorProxy, item: Any) -> Any:
    """Return a list as a tensor; any other valid item unchanged."""
    if isinstance(item, (list, tuple, range)):
        return _list_index(op, x, list(item))
    if isinstance(item, TensorProxy):
        check(
            item.dtype in (*INDEX_DTYPES, *_MASK_DTYPES),
            lambda: f"{op}: tensors used as indices must be long, int, byte or bool tensors, but got {item}",
            IndexError,
        )
        check(
            item.ndim > 0 or item.dtype not in _MASK_DTYPES,
            lambda: f"{op}: a 0-d mask as an index is not supported ({item}); see forge/clang/indexing.py",
            NotImplementedError,
        )
        return item
    check(
        not isinstance(item, bool),
        lambda: f"{op}: {item} as an index is not supported; see forge/clang/indexing.py",
        NotImplementedError,
    )
    check(
        item is None or item is Ellipsis or isinstance(item, (*INT_TYPES, slice)),
        lambda: (
            f"{op}: only integers, slices (`:`), ellipsis (`...`), None and long or byte Variables are valid indices "
            f"(got {type(item).__name__})"
        ),
        IndexError,
    )
    return item


def _list_index(op: str, x: TensorProxy, items: list[Any]) -> TensorProxy:
    numbers = list(nested_numbers(items))
    check(
        all(isinstance(number, INT_TYPES) for number in numbers),
        lambda: (
            f"{op}: a list of {type(numbers[0]).__name__} as an index is not supported, only of numbers; "
            "see forge/clang/indexing.py"
        ),
        NotImplementedError,
    )
    masked = bool(numbers) and all(isinstance(number, bool) for number in numbers)
    return prims.tensor(items, torch.bool if masked else torch.int64, x.device)


def _read_none(result: IndexedView) -> None:
    before, dim = result.tensor, result.dim
    result.view(unsqueeze(before, dim), lambda new: reshape(new, before.shape))
    result.index(None)


def _read_slice(result: IndexedView, item: slice) -> None:
    before, dim = result.tensor, result.dim
    bounds = slice_bounds(before.shape[dim], item.start, item.stop, item.step)
    if not is_whole(before.shape[dim], bounds):
        result.view(prims.slice(before, dim, *bounds), lambda new: prims.slice_scatter(before, new, dim, *bounds))
    result.index(None)


def _read_int(op: str, result: IndexedView, item: Dim) -> None:
    before, dim = result.tensor, result.dim
    start = position(op, item, before.shape[dim], dim)
    result.view(
        select(before, dim, start), lambda new: prims.slice_scatter(before, unsqueeze(new, dim), dim, start, start + 1)
    )


def _read_tensor(result: IndexedView, item: TensorProxy) -> None:
    if item.ndim > 0:
        if item.dtype in _MASK_DTYPES:
            _check_mask(result, item)
        result.index(item)
        return
    before, dim = result.tensor, result.dim  # a 0-d index selects, and is not among those that broadcast
    indices = (*[None] * dim, reshape(item, (1,)))
    result.view(
        prims.squeeze(prims.index(before, indices), (dim,)),
        lambda new: prims.index_put(before, indices, unsqueeze(new, dim)),
    )


def _check_mask(result: IndexedView, mask: TensorProxy) -> None:
    shape = result.tensor.shape[result.dim : result.dim + mask.ndim]
    for i, (ours, expected) in enumerate(zip(mask.shape, shape, strict=True)):
        check(
            same(ours, expected),
            lambda i=i: (
                f"getitem: The shape of the mask {list(mask.shape)} at index {i} does not match the shape of "
                f"the indexed tensor {list(result.tensor.shape)} at index {result.dim + i}"
            ),
            IndexError,
        )


@clangop()
def getitem(x: TensorProxy, key: Any) -> TensorProxy:
    """Return x[key]. Raises NotImplementedError for masks: the shape of the result would depend on data."""
    items = key if isinstance(key, tuple) else (key,)
    masked = any(isinstance(item, TensorProxy) and item.dtype in _MASK_DTYPES for item in items)
    check(
        not masked,
        lambda: (
            f"getitem: the shape of {x} indexed with a mask depends on the mask's data, which is not known while "
            "tracing; use torch.where or masked_fill"
        ),
        NotImplementedError,
    )
    result = read_key("getitem", x, key)
    if prims.has_mask(result.indices):  # made from a list of bools
        raise NotImplementedError("getitem: a list of bools as an index is not supported; see forge/clang/indexing.py")
    return prims.index(result.tensor, tuple(_trim(result.indices))) if result.indices else result.tensor


def _trim(indices: Sequence[TensorProxy | None]) -> list[TensorProxy | None]:
    last = max(i for i, index in enumerate(indices) if index is not None)
    return list(indices[: last + 1])


@clangop()
def with_item(x: TensorProxy, key: Any, value: TensorProxy | Number) -> TensorProxy:
    """Return x with x[key] replaced by `value`, which is converted to x's dtype and broadcast."""
    result = read_key("setitem", x, key)
    view = result.tensor
    tensor = value if isinstance(value, TensorProxy) else prims.full((), value, x.dtype, x.device)
    tensor = convert(tensor, x.dtype)
    if result.indices:
        return result.write(_put(view, tuple(_trim(result.indices)), tensor))
    return result.write(_fit_value(view, tensor))


def item_sum(x: TensorProxy, key: Any, shape: Sequence[Dim]) -> TensorProxy:
    """Return x[key] summed to `shape`: the gradient of a value written there. The key may contain a mask."""
    result = read_key("getitem", x, key)
    view = result.tensor
    if result.indices:
        indices = tuple(_trim(result.indices))
        if prims.has_mask(indices):
            return prims.index_sum(view, indices, tuple(shape))
        view = prims.index(view, indices)
    return reshape(view, (*[1] * (len(shape) - view.ndim), *view.shape))


def _fit_value(view: TensorProxy, value: TensorProxy) -> TensorProxy:
    """Return `value` in the shape of all of `view`; leading dims of length 1 are dropped, as in torch."""
    extra = builtins.max(value.ndim - view.ndim, 0)
    torch_check(
        all(statically_true(size == 1) for size in value.shape[:extra])
        and all(
            statically_true(size == 1) or same(size, target)
            for size, target in zip(reversed(value.shape), reversed(view.shape), strict=False)
        ),
        lambda: (
            f"setitem: shape mismatch: value tensor of shape {list(value.shape)} cannot be broadcast to "
            f"indexing result of shape {list(view.shape)}"
        ),
    )
    return expand_to(reshape(value, value.shape[extra:]), view.shape)


def _put(view: TensorProxy, indices: tuple[TensorProxy | None, ...], value: TensorProxy) -> TensorProxy:
    """Return `view` with the indexed elements replaced; a single mask becomes a where if the value allows it."""
    last = indices[-1]
    assert last is not None, "the indices end in a tensor"
    first = len(indices) - 1
    single = all(index is None for index in indices[:-1])
    if not single or last.dtype not in _MASK_DTYPES:
        return prims.index_put(view, indices, value)
    rest = view.ndim - first - last.ndim
    if value.ndim > rest and not all(statically_true(size == 1) for size in value.shape):
        return prims.index_put(view, indices, value)
    mask = last if last.dtype == torch.bool else last != 0
    mask = reshape(mask, (*[1] * first, *last.shape, *[1] * rest))
    value = reshape(value, value.shape[builtins.max(value.ndim - view.ndim, 0) :])
    return where(expand_to(mask, view.shape), expand_to(value, view.shape), view)


# functions along one dim; a 0-d tensor is indexed as a 1-d one


def _along(dim: int, index: TensorProxy) -> tuple[TensorProxy | None, ...]:
    return (*[None] * dim, index)


def _vector_index(op: str, x: TensorProxy, dim: int, index: TensorProxy) -> tuple[int, TensorProxy]:
    check(index.ndim <= 1, lambda: f"{op}: Index is supposed to be a vector, but it is {index}", IndexError)
    torch_check(index.dtype in INDEX_DTYPES, lambda: f"{op}: Expected dtype int32/int64 for index, but it is {index}")
    return check_dim(op, dim, x.ndim), reshape(index, (1,)) if index.ndim == 0 else index


@clangop()
def index_select(x: TensorProxy, dim: int, index: TensorProxy) -> TensorProxy:
    """Return the slices of x along `dim` at the indices in `index`. Shapes: index is a vector."""
    dim, index = _vector_index("index_select", x, dim, index)
    if x.ndim == 0:
        return reshape(prims.index(reshape(x, (1,)), (index,)), ())
    return prims.index(x, _along(dim, index))


@clangop()
def index_add(x: TensorProxy, dim: int, index: TensorProxy, source: TensorProxy) -> TensorProxy:
    """Return x with the slices of `source` added to the slices at `index`."""
    return _index_write("index_add", x, dim, index, source, accumulate=True)


@clangop()
def index_copy(x: TensorProxy, dim: int, index: TensorProxy, source: TensorProxy) -> TensorProxy:
    """Return x with the slices at `index` replaced by those of `source`."""
    return _index_write("index_copy", x, dim, index, source, accumulate=False)


def _index_write(
    op: str, x: TensorProxy, dim: int, index: TensorProxy, source: TensorProxy, accumulate: bool
) -> TensorProxy:
    dim, index = _vector_index(op, x, dim, index)
    torch_check(
        x.dtype == source.dtype,
        lambda: f"{op}: self and source expected to have the same dtype, but got {x} and {source}",
    )
    if x.ndim == 0:
        vector = prims.index_put(reshape(x, (1,)), (index,), reshape(source, (1,)), accumulate)
        return reshape(vector, ())
    expected = (*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :])
    source = unsqueeze(source, 0) if source.ndim == 0 else source
    torch_check(
        same_shape(source.shape, expected),
        lambda: (
            f"{op}: Source/destination tensor must have same slice shapes: source is {source}, but {x} indexed by "
            f"{index} along dim {dim} needs shape {list(expected)}"
        ),
    )
    return prims.index_put(x, _along(dim, index), source, accumulate)


prims.register_vjp(
    index_select, x=lambda g, x, dim, index: index_add(prims.full(x.shape, 0, g.dtype, g.device), dim, index, g)
)
prims.register_vjp(
    index_add, x=lambda g: g, source=lambda g, dim, index, source: reshape(index_select(g, dim, index), source.shape)
)


@clangop()
def index_fill(x: TensorProxy, dim: int, index: TensorProxy, value: TensorProxy | Number) -> TensorProxy:
    """Return x with the slices at `index` filled with `value`. Shapes: value is 0-d."""
    torch_check(
        not isinstance(value, TensorProxy) or value.ndim == 0,
        lambda: f"index_fill: only supports a 0-dimensional value tensor, but got {value}",
    )
    dim, index = _vector_index("index_fill", x, dim, index)
    value = convert(value, x.dtype) if isinstance(value, TensorProxy) else prims.full((), value, x.dtype, x.device)
    if x.ndim == 0:
        return reshape(prims.index_put(reshape(x, (1,)), (index,), value), ())
    return prims.index_put(x, _along(dim, index), value)


prims.register_vjp(
    index_copy,
    x=lambda g, dim, index: index_fill(g, dim, index, 0),
    source=lambda g, dim, index, source: reshape(index_select(g, dim, index), source.shape),
)


prims.register_vjp(
    index_fill,
    x=lambda g, dim, index: index_fill(g, dim, index, 0),
    value=lambda g, x, dim, index: where(
        index_fill(prims.full(x.shape, False, torch.bool, x.device), dim, index, True), g, 0
    ).sum(),
)


@clangop()
def gather(x: TensorProxy, dim: int, index: TensorProxy) -> TensorProxy:
    """Return out with out[i][j][k] = x[i][index[i][j][k]][k] for dim=1."""
    return prims.gather(x, check_dim("gather", dim, x.ndim), index)


@clangop()
def masked_fill(x: TensorProxy, mask: TensorProxy, value: TensorProxy | Number) -> TensorProxy:
    """Return `value` where mask is true, else x; x and mask are broadcast together. Shapes: value is 0-d. Dtypes:
    x's."""
    torch_check(mask.dtype == torch.bool, lambda: f"masked_fill: only supports boolean masks, but got mask {mask}")
    torch_check(
        not isinstance(value, TensorProxy) or value.ndim == 0,
        lambda: f"masked_fill: only supports a 0-dimensional value tensor, but got tensor {value}",
    )
    value = convert(value, x.dtype) if isinstance(value, TensorProxy) else prims.full((), value, x.dtype, x.device)
    return where(mask, value, x)


prims.register_vjp(
    masked_fill, x=lambda g, mask: masked_fill(g, mask, 0), value=lambda g, mask: where(mask, g, 0).sum()
)
