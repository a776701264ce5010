"""The functions of torch that return a tensor's elements in another shape or order.

The file is long because torch has most functions in several forms.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from forge import clang, prims
from forge.ir import Dim, Symbol, Tag, TensorProxy, check, current_trace
from forge.ir.memory import Ambiguous, Memory, ViewStep
from forge.prims.core import check_dim, check_dims, statically_true, torch_check
from forge.torch_internals.autograd import get_data_attr
from forge.torch_internals.functions import vf_broadcast_tensors, vf_meshgrid
from forge.torchlang.aliases import Lengths
from forge.torchlang.core import View, getter, torchsymbol

Format = torch.memory_format


def varargs(first: Any, rest: tuple) -> tuple:
    """Return the arguments of x.view(2, 3) and x.view((2, 3)) alike."""
    return tuple(first) if isinstance(first, (tuple, list)) else (first, *rest)


def _sizes(args: tuple, size: Any, op: str) -> tuple:
    """Return the sizes of x.view(2, 3), x.view((2, 3)) or x.view(size=(2, 3))."""
    check(bool(args) or size is not None, lambda: f"{op}: missing the argument 'size'", TypeError)
    return clang.lengths(args or size)


def _reshape_back(x: TensorProxy, new: TensorProxy, *args: Any, **kwargs: Any) -> TensorProxy:
    return clang.reshape(new, x.shape)


def row_major(x: TensorProxy) -> bool:
    """Return whether x is known to lie in memory in row-major order."""
    if x.strides is None:
        return False
    expected: Dim = 1
    for size, stride in zip(reversed(x.shape), reversed(x.strides), strict=True):
        if not statically_true(size == 1) and not statically_true(stride == expected):
            return False
        expected = expected * size
    return True


def _view_if_row_major(args: tuple, kwargs: dict) -> View:
    return View.ALWAYS if row_major(args[0]) else View.MAYBE


# another shape


@torchsymbol(Tensor.view, view=View.ALWAYS, invert=_reshape_back)
def view(
    self: TensorProxy, *shape: Lengths | torch.dtype, size: Sequence[Dim] | None = None, dtype: Any = None
) -> TensorProxy:
    """Return the same memory with another shape."""
    check(
        dtype is None and not (shape and isinstance(shape[0], torch.dtype)),
        lambda: "Tensor.view(dtype) is not supported; see forge/torchlang/shape.py",
        NotImplementedError,
    )
    return clang.reshape(self, _sizes(shape, size, "view"))


@torchsymbol(Tensor.reshape, view=_view_if_row_major, invert=_reshape_back)
def tensor_reshape(self: TensorProxy, *args: Lengths, shape: Sequence[Dim] | None = None) -> TensorProxy:
    """Return the elements in row-major order with another shape."""
    return clang.reshape(self, _sizes(args, shape, "reshape"))


@torchsymbol(torch.reshape, view=_view_if_row_major, invert=_reshape_back)
def reshape(input: TensorProxy, shape: Sequence[Dim]) -> TensorProxy:
    """Return the elements in row-major order with another shape."""
    return clang.reshape(input, shape)


@torchsymbol(Tensor.view_as, view=View.ALWAYS, invert=_reshape_back)
def view_as(self: TensorProxy, other: TensorProxy) -> TensorProxy:
    """Return the same memory with other's shape."""
    return clang.reshape(self, other.shape)


@torchsymbol(Tensor.reshape_as, view=_view_if_row_major, invert=_reshape_back)
def reshape_as(self: TensorProxy, other: TensorProxy) -> TensorProxy:
    """Return the elements with other's shape."""
    return clang.reshape(self, other.shape)


@torchsymbol(torch.flatten, Tensor.flatten, view=_view_if_row_major, invert=_reshape_back)
def flatten(input: TensorProxy, start_dim: int = 0, end_dim: int = -1) -> TensorProxy:
    """Flatten the dims from start_dim to end_dim; a 0-d tensor becomes 1-d."""
    return clang.flatten(input, start_dim, end_dim)


@torchsymbol(torch.ravel, Tensor.ravel, view=_view_if_row_major, invert=_reshape_back)
def ravel(input: TensorProxy) -> TensorProxy:
    """Flatten all dims."""
    return clang.reshape(input, (-1,))


@torchsymbol(torch.unflatten, Tensor.unflatten, view=View.ALWAYS, invert=_reshape_back)
def unflatten(input: TensorProxy, dim: int, sizes: Sequence[Dim]) -> TensorProxy:
    """Split one dim into several; one length may be -1."""
    return clang.unflatten(input, dim, sizes)


@torchsymbol(torch.unsqueeze, Tensor.unsqueeze, view=View.ALWAYS, invert=_reshape_back)
def unsqueeze(input: TensorProxy, dim: int) -> TensorProxy:
    """Insert a dim of length 1 before `dim`."""
    return clang.unsqueeze(input, dim)


@torchsymbol(torch.squeeze, Tensor.squeeze, view=View.ALWAYS, invert=_reshape_back)
def squeeze(input: TensorProxy, dim: int | Sequence[int] | None = None) -> TensorProxy:
    """Drop those of `dim` (all by default) whose length is 1."""
    return clang.squeeze(input, None if dim is None else clang.as_tuple(dim))


@torchsymbol(Tensor.expand, view=View.ALWAYS)
def expand(
    self: TensorProxy, *sizes: Lengths, size: Sequence[Dim] | None = None, implicit: bool = False
) -> TensorProxy:
    """Broadcast to a shape, where -1 keeps a length."""
    return clang.expand(self, _sizes(sizes, size, "expand"))


@torchsymbol(Tensor.expand_as, view=View.ALWAYS)
def expand_as(self: TensorProxy, other: TensorProxy) -> TensorProxy:
    """Broadcast to other's shape."""
    return clang.expand(self, other.shape)


@torchsymbol(Tensor.broadcast_to, view=View.ALWAYS)
def tensor_broadcast_to(self: TensorProxy, *sizes: Lengths, size: Sequence[Dim] | None = None) -> TensorProxy:
    """Broadcast to a shape."""
    return clang.expand(self, _sizes(sizes, size, "broadcast_to"))


@torchsymbol(torch.broadcast_to, view=View.ALWAYS)
def broadcast_to(input: TensorProxy, size: Sequence[Dim]) -> TensorProxy:
    """Broadcast to a shape."""
    return clang.expand(input, size)


@torchsymbol(torch.functional.broadcast_tensors, vf_broadcast_tensors)
def broadcast_tensors(*tensors: Any) -> tuple[TensorProxy, ...]:
    """Return the tensors, broadcast together."""
    tensors = varargs(tensors[0], tensors[1:]) if tensors else ()
    shape = clang.broadcast_shapes("broadcast_tensors", *[tensor.shape for tensor in tensors]) if tensors else ()
    return tuple(clang.expand(tensor, shape) for tensor in tensors)


@torchsymbol(torch.functional.meshgrid, vf_meshgrid)
def meshgrid(*tensors: Any, indexing: str | None = None) -> tuple[TensorProxy, ...]:
    """Return coordinate grids of vectors: "ij" (the default) for matrix order, "xy" with the first two dims
    exchanged."""
    tensors = varargs(tensors[0], tensors[1:])
    torch_check(
        indexing in (None, "ij", "xy"),
        lambda: f"meshgrid: indexing must be one of 'xy' or 'ij', but received: {indexing}",
    )
    for tensor in tensors:
        torch_check(
            tensor.ndim < 2,
            lambda tensor=tensor: f"meshgrid: Expected 0D or 1D tensor in the tensor list but got: {tensor}",
        )
        torch_check(
            tensor.dtype == tensors[0].dtype,
            lambda: f"meshgrid expects all tensors to have the same dtype, but they are {list(tensors)}",
        )
    order = list(range(len(tensors)))
    if indexing == "xy" and len(tensors) > 1:
        order[:2] = [1, 0]
    vectors = [clang.reshape(tensor, (-1,)) for tensor in tensors]
    shape = tuple(vectors[i].shape[0] for i in order)
    return tuple(prims.broadcast_in_dim(vector, shape, (order.index(i),)) for i, vector in enumerate(vectors))


def _atleast(rank: int) -> Symbol:
    def body(*tensors: Any) -> TensorProxy | tuple[TensorProxy, ...]:
        if len(tensors) == 1 and not isinstance(tensors[0], (tuple, list)):
            return _pad_rank(tensors[0], rank)
        return tuple(_pad_rank(tensor, rank) for tensor in varargs(tensors[0], tensors[1:]))

    body.__name__, body.__doc__ = f"atleast_{rank}d", f"Dims of length 1 added to make {rank}, as numpy does."
    return torchsymbol(getattr(torch.functional, body.__name__), view=View.ALWAYS, invert=_reshape_back)(body)


def _pad_rank(x: TensorProxy, rank: int) -> TensorProxy:
    while x.ndim < rank:
        x = clang.unsqueeze(x, x.ndim if x.ndim == 2 else 0)
    return x


atleast_1d, atleast_2d, atleast_3d = _atleast(1), _atleast(2), _atleast(3)


# another order of dims


@torchsymbol(
    torch.transpose,
    Tensor.transpose,
    torch.swapdims,
    Tensor.swapdims,
    view=View.ALWAYS,
    invert=lambda x, new, dim0, dim1: clang.transpose(new, dim0, dim1),
)
def transpose(input: TensorProxy, dim0: int, dim1: int) -> TensorProxy:
    """Exchange two dims."""
    return clang.transpose(input, dim0, dim1)


@torchsymbol(
    torch.swapaxes,
    Tensor.swapaxes,
    view=View.ALWAYS,
    invert=lambda x, new, axis0, axis1: clang.transpose(new, axis0, axis1),
)
def swapaxes(input: TensorProxy, axis0: int, axis1: int) -> TensorProxy:
    """Exchange two dims."""
    return clang.transpose(input, axis0, axis1)


def _inverse(dims: Sequence[int], ndim: int) -> tuple[int, ...]:
    dims = [dim % ndim for dim in dims]
    return tuple(sorted(range(len(dims)), key=dims.__getitem__))


def _permute_back(x: TensorProxy, new: TensorProxy, *args: Any, dims: Sequence[int] | None = None) -> TensorProxy:
    return clang.permute(new, _inverse(_sizes(args, dims, "permute"), x.ndim))


@torchsymbol(Tensor.permute, view=View.ALWAYS, invert=_permute_back)
def tensor_permute(self: TensorProxy, *args: Lengths, dims: Sequence[int] | None = None) -> TensorProxy:
    """Permute the dims: dim i is dim dims[i] of self."""
    return clang.permute(self, _sizes(args, dims, "permute"))


@torchsymbol(torch.permute, view=View.ALWAYS, invert=_permute_back)
def permute(input: TensorProxy, dims: Sequence[int]) -> TensorProxy:
    """Permute the dims: dim i is dim dims[i] of input."""
    return clang.permute(input, dims)


def _move(name: str) -> Symbol:
    def body(input: TensorProxy, source: int | Sequence[int], destination: int | Sequence[int]) -> TensorProxy:
        return clang.movedim(input, source, destination)

    def invert(
        x: TensorProxy, new: TensorProxy, source: int | Sequence[int], destination: int | Sequence[int]
    ) -> TensorProxy:
        return clang.movedim(new, destination, source)

    body.__name__, body.__doc__ = name, "The dims `source` moved to `destination`, the others in order."
    return torchsymbol(getattr(torch, name), getattr(Tensor, name), view=View.ALWAYS, invert=invert)(body)


movedim, moveaxis = _move("movedim"), _move("moveaxis")


def _t(x: TensorProxy) -> TensorProxy:
    torch_check(x.ndim <= 2, lambda: f"t() expects a tensor with <= 2 dimensions, but self is {x}")
    return clang.transpose(x, 0, 1) if x.ndim == 2 else x


def _own_inverse(
    name: str, meaning: Callable[[TensorProxy], TensorProxy], *functions: Callable, attribute: bool = False
) -> Symbol:
    """Return the symbol of a view without arguments that is its own inverse."""

    def body(input: TensorProxy) -> TensorProxy:
        return meaning(input)

    body.__name__, body.__doc__ = name, "Dims in reverse order: of all, or of the last two; conjugated by the adjoint."
    return torchsymbol(
        *functions,
        id=f"torch.Tensor.{name}" if attribute else None,
        methods=(name,) if attribute else (),
        view=View.ALWAYS,
        invert=lambda x, new: meaning(new),
    )(body)


# Since torch 2.14, Dynamo records torch.ops.aten.numpy_T for .T.
t = _own_inverse("t", _t, torch.t, Tensor.t)
T = _own_inverse("T", clang.reverse_dims, getter("T"), torch.ops.aten.numpy_T, attribute=True)


def _matrices_transposed(x: TensorProxy) -> TensorProxy:
    return x if x.ndim == 0 else clang.transpose_matrices(x)


mT = _own_inverse("mT", _matrices_transposed, getter("mT"), torch.ops.aten.mT, attribute=True)


def _adjoint(x: TensorProxy) -> TensorProxy:
    return clang.conj(_matrices_transposed(x))


H = _own_inverse("H", _adjoint, getter("H"), torch.ops.aten.matrix_H, attribute=True)
mH = _own_inverse("mH", _adjoint, getter("mH"), torch.ops.aten.mH, attribute=True)
adjoint = _own_inverse("adjoint", _adjoint, torch.adjoint, Tensor.adjoint)


# parts


@torchsymbol(torch.select, Tensor.select, view=View.ALWAYS)
def select(input: TensorProxy, dim: int, index: Dim) -> TensorProxy:
    """Return input[index] along `dim`, without that dim."""
    return clang.select(input, dim, index)


def _narrow(op: str, x: TensorProxy, dim: int, start: Any, length: Dim) -> tuple[int, Dim, Dim]:
    """Return the dim, start and length of a narrow, counted from the front."""
    torch_check(x.ndim > 0, lambda: f"{op}() cannot be applied to a 0-dim tensor.")
    dim = check_dim(op, dim, x.ndim)
    torch_check(not statically_true(length < 0), lambda: f"{op}(): length must be non-negative, but is {length}")
    check(
        not statically_true(start > x.shape[dim]) and not statically_true(start < -x.shape[dim]),
        lambda: (
            f"{op}: Dimension out of range (expected to be in range of [{-x.shape[dim]}, {x.shape[dim]}], "
            f"but start is {start})"
        ),
        IndexError,
    )
    if not statically_true(start >= 0):
        start = (
            start + x.shape[dim]
            if statically_true(start < 0)
            else torch.sym_ite(start < 0, start + x.shape[dim], start)
        )
    torch_check(
        not statically_true(start + length > x.shape[dim]),
        lambda: f"{op}: start ({start}) + length ({length}) exceeds dimension size ({x.shape[dim]}) of {x}",
    )
    return dim, start, length


def _narrow_view(args: tuple, kwargs: dict) -> View:
    start = kwargs["start"] if "start" in kwargs else args[2]
    return View.NEVER if isinstance(start, TensorProxy) else View.ALWAYS  # Dynamo's fake tensors know the offset


def _narrow_back(x: TensorProxy, new: TensorProxy, dim: int, start: Dim, length: Dim) -> TensorProxy:
    dim, start, length = _narrow("narrow", x, dim, start, length)
    return prims.slice_scatter(x, new, dim, start, start + length)


@torchsymbol(torch.narrow, Tensor.narrow, view=_narrow_view, invert=_narrow_back, tags=[Tag.MAY_BE_VIEW])
def narrow(input: TensorProxy, dim: int, start: Dim | TensorProxy, length: Dim) -> TensorProxy:
    """Return `length` elements from `start` along `dim`."""
    if isinstance(start, TensorProxy):
        return _narrow_at(input, dim, start, length)
    return clang.narrow_in_dim(input, *_narrow("narrow", input, dim, start, length))


def _narrow_at(x: TensorProxy, dim: int, start: TensorProxy, length: Dim) -> TensorProxy:
    """Return a narrow that starts at a 0-d tensor's value; the strides determine which memory it views."""
    torch_check(
        start.ndim == 0 and clang.category(start.dtype) == 1,
        lambda: f"narrow: start must be an 0-dim integral Tensor, but is {start}",
    )
    dim, first, length = _narrow("narrow", x, dim, 0, length)
    start = clang.where(start < first, start + x.shape[dim], start)
    return clang.index_select(x, dim, prims.iota(length, 0, 1, start.dtype, x.device) + start)


def _slice_back(
    x: TensorProxy, new: TensorProxy, dim: int = 0, start: Dim | None = None, end: Dim | None = None, step: int = 1
) -> TensorProxy:
    dim = check_dim("slice", dim, x.ndim)
    return prims.slice_scatter(x, new, dim, *clang.slice_bounds(x.shape[dim], start, end, step))


@torchsymbol(
    torch.ops.aten.slice, torch.ops.aten.slice.Tensor, id="torch.ops.aten.slice", view=View.ALWAYS, invert=_slice_back
)
def aten_slice(
    self: TensorProxy, dim: int = 0, start: Dim | None = None, end: Dim | None = None, step: int = 1
) -> TensorProxy:
    """Return self[start:end:step] along `dim`."""
    return clang.slice_in_dim(self, check_dim("slice", dim, self.ndim), start, end, step)


@torchsymbol(torch.diagonal, Tensor.diagonal, view=View.ALWAYS)
def diagonal(input: TensorProxy, offset: Dim = 0, dim1: int = 0, dim2: int = 1) -> TensorProxy:
    """Return the elements whose index along dim2 is the one along dim1 plus `offset`, as the last dim."""
    return clang.diagonal(input, offset, dim1, dim2)


@torchsymbol(Tensor.unfold, view=View.ALWAYS)
def tensor_unfold(self: TensorProxy, dimension: int, size: Dim, step: Dim) -> TensorProxy:
    """Return every window of `size` elements along `dimension`, in steps of `step`, as a last dim; a 0-d tensor has one
    window."""
    is_number = self.ndim == 0
    self = clang.reshape(self, (1,)) if is_number else self
    dim = check_dim("unfold", dimension, self.ndim)
    torch_check(
        not statically_true(size > self.shape[dim]),
        lambda: f"unfold: maximum size for tensor at dimension {dim} is {self.shape[dim]} but size is {size}",
    )
    torch_check(not statically_true(step <= 0), lambda: f"unfold: step is {step} but must be > 0")
    return prims.slice(self, 0, 0, size, 1) if is_number else prims.windows(self, dim, size, step)


# copies in other orders


def _flip(x: TensorProxy, args: tuple, dims: Sequence[int] | int | None, op: str = "flip") -> TensorProxy:
    axes = varargs(args[0], args[1:]) if args else clang.as_tuple(dims)
    return clang.flip(x, axes)


@torchsymbol(Tensor.flip)
def tensor_flip(self: TensorProxy, *args: Lengths, dims: Sequence[int] | int | None = None) -> TensorProxy:
    """Reverse the order of the elements along `dims`."""
    return _flip(self, args, dims)


@torchsymbol(torch.flip)
def flip(input: TensorProxy, dims: Sequence[int]) -> TensorProxy:
    """Reverse the order of the elements along `dims`."""
    return clang.flip(input, dims)


def _flip_one(name: str, dim: int) -> Symbol:
    def body(input: TensorProxy) -> TensorProxy:
        torch_check(input.ndim > dim, lambda: f"{name}: Input must be >= {dim + 1}-d, but it is {input}")
        return clang.flip(input, (dim,))

    body.__name__, body.__doc__ = name, f"The order of the elements along dim {dim} reversed."
    return torchsymbol(getattr(torch, name), getattr(Tensor, name))(body)


fliplr, flipud = _flip_one("fliplr", 1), _flip_one("flipud", 0)


@torchsymbol(torch.roll, Tensor.roll)
def roll(input: TensorProxy, shifts: Dim | Sequence[Dim], dims: int | Sequence[int] = ()) -> TensorProxy:
    """Shift the elements along `dims`; those shifted past the end reappear at the front. Without dims, the input is
    flattened."""
    shifts, dims = clang.as_tuple(shifts), clang.as_tuple(dims)
    if not dims:
        torch_check(len(shifts) == 1, lambda: f"roll: shifts and dimensions must align: {shifts} and {dims}")
        return clang.reshape(clang.roll(clang.reshape(input, (-1,)), shifts[0], 0), input.shape)
    torch_check(
        len(shifts) == len(dims),
        lambda: f"roll: shifts and dimensions must align. shifts: {len(shifts)}, dims: {len(dims)}",
    )
    for shift, dim in zip(shifts, dims, strict=True):
        input = clang.roll(input, shift, dim)
    return input


@torchsymbol(torch.rot90, Tensor.rot90)
def rot90(input: TensorProxy, k: int = 1, dims: Sequence[int] = (0, 1)) -> TensorProxy:
    """Rotate by k * 90 degrees in the plane of two dims, from the first to the second."""
    torch_check(len(dims) == 2, lambda: f"rot90: expected total rotation dims == 2, but got dims = {len(dims)}")
    torch_check(input.ndim >= 2, lambda: f"rot90: expected total dims >= 2, but got total dims = {input.ndim}")
    first, second = check_dims("rot90", dims, input.ndim)
    if k % 4 == 0:
        return prims.clone(input)
    if k % 4 == 2:
        return clang.flip(input, (first, second))
    if k % 4 == 1:
        return clang.transpose(clang.flip(input, (second,)), first, second)
    return clang.flip(clang.transpose(input, first, second), (second,))


@torchsymbol(torch.tril, Tensor.tril, inplace=Tensor.tril_)
def tril(input: TensorProxy, diagonal: Dim = 0) -> TensorProxy:
    """Return the part on and below a diagonal of the last two dims, zeros above it."""
    return clang.tril(input, diagonal)


@torchsymbol(torch.triu, Tensor.triu, inplace=Tensor.triu_)
def triu(input: TensorProxy, diagonal: Dim = 0) -> TensorProxy:
    """Return the part on and above a diagonal of the last two dims, zeros below it."""
    return clang.triu(input, diagonal)


@torchsymbol(torch.diag_embed, Tensor.diag_embed)
def diag_embed(input: TensorProxy, offset: int = 0, dim1: int = -2, dim2: int = -1) -> TensorProxy:
    """Return the last dim as the diagonal along dim1 and dim2 of a larger tensor, zeros elsewhere."""
    ndim = input.ndim + 1
    first, second = check_dim("diag_embed", dim1, ndim), check_dim("diag_embed", dim2, ndim)
    torch_check(first != second, lambda: f"diag_embed: diagonal dimensions cannot be identical {dim1}, {dim2}")
    side = input.shape[-1] + abs(offset)
    shape = list(input.shape[:-1])
    for dim in sorted((first, second)):
        shape.insert(dim, side)
    return prims.diagonal_backward(input, tuple(shape), offset, first, second)


@torchsymbol(torch.diag, Tensor.diag)
def diag(input: TensorProxy, diagonal: int = 0) -> TensorProxy:
    """Return a matrix's diagonal, or a matrix with a vector as its diagonal."""
    torch_check(input.ndim in (1, 2), lambda: f"diag(): Supports 1D or 2D tensors, but input is {input}")
    return prims.clone(prims.diagonal(input, diagonal, 0, 1)) if input.ndim == 2 else diag_embed(input, diagonal, 0, 1)


# the same elements


@torchsymbol(Tensor.contiguous, view=View.MAYBE)
def contiguous(self: TensorProxy, memory_format: Format = torch.contiguous_format) -> TensorProxy:
    """Return the tensor laid out in `memory_format`; self if it has that layout."""
    return prims.contiguous(self, memory_format)


@torchsymbol(torch.clone, Tensor.clone)
def clone(input: TensorProxy, *, memory_format: Format = torch.preserve_format) -> TensorProxy:
    """Return a copy in new memory."""
    return prims.clone(input, memory_format)


@torchsymbol(
    torch.detach,
    Tensor.detach,
    getter("data"),
    get_data_attr,
    methods=("data",),
    view=View.ALWAYS,
    invert=lambda x, new: prims.with_data(x, new),
    tags=[Tag.NOT_DIFFERENTIABLE],
)
def detach(input: TensorProxy) -> TensorProxy:
    """Return the same values, through which no gradient flows."""
    return prims.detach(input)


def _detach_in_place(symbol: Symbol, args: tuple, kwargs: dict, memory: Memory) -> TensorProxy:
    """Make the handle view its memory through `detach` from now on; other views of the memory keep their history."""
    (target,) = args
    if any(target is each for each in current_trace().inputs) and not target.requires_grad:
        return target
    if memory.ref(target).chain or any(target is each for each in current_trace().inputs):
        raise Ambiguous(f"detach_ of {target}, which the program was given or which is a view: use detach()")
    step = ViewStep(detach, (), {}, None, prims.with_data, hides_history=True)
    memory.become(target, symbol(memory.read(target)), step, "detach_")
    return target


@torchsymbol(torch.detach_, Tensor.detach_, handler=_detach_in_place, tags=[Tag.NOT_DIFFERENTIABLE])
def detach_(input: TensorProxy) -> TensorProxy:
    """Return the tensor itself, from now on without its history."""
    return prims.detach(input)
