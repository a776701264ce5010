"""The shape prims, which move elements and compute none. Dims are counted from the front, lengths may be symbolic."""

from collections.abc import Sequence
from typing import Any

import torch

from forge.ir import Dim, Symbol, Tag, TensorProxy, check, get_grad, needs_grad, put_grad, register_grad
from forge.prims.core import (
    check_dim,
    check_dims,
    check_same_device,
    like,
    primitive,
    register_vjp,
    same,
    statically_true,
    torch_check,
)
from forge.prims.creation import full


@primitive()
def reshape(x: TensorProxy, shape: tuple[Dim, ...]) -> TensorProxy:
    """Return x's elements in row-major order with another shape.

    Shapes: as many elements as x. Source: torch.reshape, without -1.
    """
    out = like(x, shape=shape)
    torch_check(
        same(x.numel(), out.numel()),
        lambda: f"prims.reshape: shape '{list(shape)}' is invalid for input of size {x.numel()} ({x})",
    )
    return out


@primitive(tags=[Tag.VIEW])
def permute(x: TensorProxy, dims: tuple[int, ...]) -> TensorProxy:
    """Permute x's dims: out's dim i is x's dim dims[i].

    Shapes: dims is a permutation of x's dims. Source: torch.permute.
    """
    torch_check(
        sorted(dims) == list(range(x.ndim)),
        lambda: f"prims.permute: dims {tuple(dims)} are not a permutation of the {x.ndim} dims of {x}",
    )
    return like(x, shape=[x.shape[dim] for dim in dims])


@primitive(tags=[Tag.VIEW])
def broadcast_in_dim(x: TensorProxy, shape: tuple[Dim, ...], dims: tuple[int, ...]) -> TensorProxy:
    """Return x repeated to `shape`: x's dim i becomes out's dim dims[i], with shape's length or 1.

    Source: jax.lax.broadcast_in_dim.
    """
    check(
        len(dims) == x.ndim and list(dims) == sorted(set(dims)) and all(0 <= dim < len(shape) for dim in dims),
        lambda: f"prims.broadcast_in_dim: dims {tuple(dims)} do not place the {x.ndim} dims of {x} in {tuple(shape)}",
    )
    for i, dim in enumerate(dims):
        check(
            statically_true(x.shape[i] == 1) or same(x.shape[i], shape[dim]),
            lambda i=i, dim=dim: (
                f"prims.broadcast_in_dim: dim {i} of {x} has length {x.shape[i]}, "
                f"which does not expand to {shape[dim]} of {tuple(shape)}"
            ),
        )
    return like(x, shape=shape)


@primitive(tags=[Tag.VIEW])
def slice(x: TensorProxy, dim: int, start: Dim, stop: Dim, step: int = 1) -> TensorProxy:
    """Return x[start:stop:step] along one dim, 0 <= start <= stop <= its length.

    Source: jax.lax.slice_in_dim.
    """
    check_dim("prims.slice", dim, x.ndim)
    check(step > 0, lambda: f"prims.slice: step is {step}, but must be positive", ValueError)
    return like(x, shape=_slice_shape(x.shape, dim, start, stop, step))


def _slice_shape(shape: Sequence[Dim], dim: int, start: Dim, stop: Dim, step: int) -> list[Dim]:
    size = stop - start if step == 1 else (stop - start + step - 1) // step
    return [*shape[:dim], size, *shape[dim + 1 :]]


@primitive(tags=[Tag.VIEW])
def squeeze(x: TensorProxy, dims: tuple[int, ...]) -> TensorProxy:
    """Return x without `dims`, whose length is 1."""
    check_dims("prims.squeeze", dims, x.ndim)
    for dim in dims:
        check(same(x.shape[dim], 1), lambda dim=dim: f"prims.squeeze: dim {dim} of {x} is not of length 1")
    return like(x, shape=[size for dim, size in enumerate(x.shape) if dim not in dims])


@primitive()
def cat(tensors: Sequence[TensorProxy], dim: int) -> TensorProxy:
    """Return the concatenation of the tensors along `dim`.

    Shapes: one rank and equal lengths except along `dim`. Dtypes: the same for all.
    """
    torch_check(len(tensors) > 0, lambda: "prims.cat: expected a non-empty list of tensors")
    first = tensors[0]
    check_dim("prims.cat", dim, first.ndim)
    for tensor in tensors[1:]:
        torch_check(
            tensor.ndim == first.ndim
            and all(same(a, b) for i, (a, b) in enumerate(zip(tensor.shape, first.shape, strict=True)) if i != dim),
            lambda tensor=tensor: (
                f"prims.cat: Sizes of tensors must match except in dimension {dim}: {tensor} does not go with {first}"
            ),
        )
        check(
            tensor.dtype == first.dtype,
            lambda tensor=tensor: f"prims.cat: {tensor} and {first} must have one dtype",
            TypeError,
        )
    check_same_device("prims.cat", *tensors)
    shape = list(first.shape)
    for tensor in tensors[1:]:
        shape[dim] = shape[dim] + tensor.shape[dim]
    return like(first, shape=shape)


@primitive()
def pad(x: TensorProxy, padding: tuple[tuple[Dim, Dim], ...], value: Any) -> TensorProxy:
    """Return x with `value` before and after each dim: padding[i] is (before, after) for dim i; a negative one crops.

    Source: torch.nn.functional.pad in constant mode.
    """
    check(len(padding) == x.ndim, lambda: f"prims.pad: padding {padding} has not one pair for each dim of {x}")
    shape = [size + before + after for size, (before, after) in zip(x.shape, padding, strict=True)]
    for dim, size in enumerate(shape):
        torch_check(
            not statically_true(size < 0),
            lambda dim=dim: f"prims.pad: padding {padding} leaves dim {dim} of {x} a negative length",
        )
    return like(x, shape=shape)


@primitive()
def flip(x: TensorProxy, dims: tuple[int, ...]) -> TensorProxy:
    """Return x with the order of the elements along `dims` reversed."""
    check_dims("prims.flip", dims, x.ndim)
    return like(x)


@primitive()
def clone(x: TensorProxy, memory_format: torch.memory_format = torch.preserve_format) -> TensorProxy:
    """Return a copy of x in new memory."""
    return like(x)


@primitive()
def contiguous(x: TensorProxy, memory_format: torch.memory_format = torch.contiguous_format) -> TensorProxy:
    """Return x, or a copy of it, laid out in `memory_format`. Source: torch.Tensor.contiguous."""
    check(
        isinstance(memory_format, torch.memory_format),
        lambda: f"prims.contiguous: memory_format is {memory_format!r}, but must be a torch.memory_format",
        TypeError,
    )
    return like(x)


@primitive(tags=[Tag.VIEW, Tag.NOT_DIFFERENTIABLE])
def detach(x: TensorProxy) -> TensorProxy:
    """Return x, through which no gradient flows. Source: torch.Tensor.detach."""
    return like(x)


@primitive()
def view_scatter(
    x: TensorProxy,
    y: TensorProxy,
    view: Symbol,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    index: int | None = None,
) -> TensorProxy:
    """Return x with the elements in view(x, *args, **kwargs) replaced by y's.

    Shapes: y has the shape of that view, or of its output `index`; out has x's.
    Dtypes: y has the view's, out has x's. Source: torch.slice_scatter, for any view.
    """
    return like(x)


@primitive()
def slice_scatter(x: TensorProxy, y: TensorProxy, dim: int, start: Dim, stop: Dim, step: int = 1) -> TensorProxy:
    """Return x with x[start:stop:step] along dim replaced by y.

    Shapes: y has that slice's; out has x's. Dtypes: the same for both. Source: torch.slice_scatter.
    """
    check(x.dtype == y.dtype, lambda: f"prims.slice_scatter: y is {y}, but must have the dtype of {x}", TypeError)
    check(x.ndim == y.ndim, lambda: f"prims.slice_scatter: y is {y}, but must have the rank of {x}")
    for i, (size, expected) in enumerate(zip(y.shape, _slice_shape(x.shape, dim, start, stop, step), strict=True)):
        check(
            same(size, expected),
            lambda i=i, expected=expected: f"prims.slice_scatter: dim {i} of y, {y}, must have length {expected}",
        )
    return like(x)


@primitive(tags=[Tag.VIEW])
def diagonal(x: TensorProxy, offset: Dim, dim1: int, dim2: int) -> TensorProxy:
    """Return the elements of x whose index along dim2 is the one along dim1 plus `offset`.

    Shapes: out has x's other dims, then the diagonal. Source: torch.diagonal.
    """
    check_dims("prims.diagonal", (dim1, dim2), x.ndim)
    rows, columns = x.shape[dim1], x.shape[dim2]
    size = torch.sym_min(rows, columns - offset) if offset >= 0 else torch.sym_min(rows + offset, columns)
    rest = [size for dim, size in enumerate(x.shape) if dim not in (dim1, dim2)]
    return like(x, shape=[*rest, torch.sym_max(size, 0)])


@primitive()
def diagonal_backward(g: TensorProxy, shape: tuple[Dim, ...], offset: Dim, dim1: int, dim2: int) -> TensorProxy:
    """Return zeros of `shape` with g on the diagonal. Source: aten.diagonal_backward."""
    return like(g, shape=shape)


@primitive(tags=[Tag.VIEW])
def windows(x: TensorProxy, dim: int, size: Dim, step: Dim) -> TensorProxy:
    """Return every window of `size` elements along `dim`, in steps of `step`.

    Shapes: dim counts the windows, a new last dim counts the elements inside them. Source: torch.Tensor.unfold.
    """
    check_dim("prims.windows", dim, x.ndim)
    shape = list(x.shape)
    shape[dim] = (shape[dim] - size) // step + 1
    return like(x, shape=[*shape, size])


@primitive()
def windows_backward(g: TensorProxy, shape: tuple[Dim, ...], dim: int, size: Dim, step: Dim) -> TensorProxy:
    """Return zeros of `shape` to which every window of g is added. Source: aten.unfold_backward."""
    return like(g, shape=shape)


# gradient rules


register_vjp(reshape, x=lambda g, x: reshape(g, x.shape))
register_vjp(permute, x=lambda g, dims: permute(g, tuple(sorted(range(len(dims)), key=dims.__getitem__))))


@register_grad(broadcast_in_dim)
def _broadcast_in_dim_grad(x: TensorProxy, shape: tuple[Dim, ...], dims: tuple[int, ...]) -> TensorProxy:
    out = broadcast_in_dim(x, shape, dims)
    g = get_grad(out)
    new = [dim for dim in range(len(shape)) if dim not in dims]
    repeated = tuple(dim for dim in new if not statically_true(shape[dim] == 1))
    g = g.sum(repeated) if repeated else g
    if len(new) > len(repeated):  # dims of length 1 need no sum
        g = reshape(g, tuple(shape[dim] for dim in dims))
    put_grad(x, g)  # put_grad sums x's dims of length 1
    return out


@primitive()
def slice_backward(
    g: TensorProxy, shape: tuple[Dim, ...], dim: int, start: Dim, stop: Dim, step: int = 1
) -> TensorProxy:
    """Return zeros of `shape` with g at [start:stop:step] along dim. Source: aten.slice_backward."""
    return like(g, shape=shape)


register_vjp(slice, x=lambda g, x, dim, start, stop, step: slice_backward(g, x.shape, dim, start, stop, step))
register_vjp(slice_backward, g=lambda grad, dim, start, stop, step: slice(grad, dim, start, stop, step))
register_vjp(squeeze, x=lambda g, x: reshape(g, x.shape))


@register_grad(cat)
def _cat_grad(tensors: Sequence[TensorProxy], dim: int) -> TensorProxy:
    out = cat(tensors, dim)
    g = get_grad(out)
    start: Dim = 0
    for tensor in tensors:
        stop = start + tensor.shape[dim]
        put_grad(tensor, slice(g, dim, start, stop))
        start = stop
    return out


register_vjp(pad, x=lambda g, padding: pad(g, tuple((-before, -after) for before, after in padding), 0))
register_vjp(flip, x=lambda g, dims: flip(g, dims))
register_vjp(clone, x=lambda g: g)
register_vjp(contiguous, x=lambda g: g)


@register_grad(view_scatter)
def _view_scatter_grad(
    x: TensorProxy,
    y: TensorProxy,
    view: Symbol,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    index: int | None = None,
) -> TensorProxy:
    out = view_scatter(x, y, view, args, kwargs, index)
    g = get_grad(out)
    part = view(g, *args, **kwargs)
    put_grad(y, part if index is None else part[index])
    if needs_grad(x):
        put_grad(x, view_scatter(g, full(y.shape, 0, y.dtype, y.device), view, args, kwargs, index))
    return out


def _zeros(shape: Sequence[Dim], g: TensorProxy) -> TensorProxy:
    return full(tuple(shape), 0, g.dtype, g.device)


register_vjp(
    slice_scatter,
    y=lambda g, dim, start, stop, step: slice(g, dim, start, stop, step),
    x=lambda g, y, dim, start, stop, step: slice_scatter(g, _zeros(y.shape, g), dim, start, stop, step),
)
register_vjp(diagonal, x=lambda g, x, offset, dim1, dim2: diagonal_backward(g, x.shape, offset, dim1, dim2))
register_vjp(diagonal_backward, g=lambda grad, offset, dim1, dim2: diagonal(grad, offset, dim1, dim2))
register_vjp(windows, x=lambda g, x, dim, size, step: windows_backward(g, x.shape, dim, size, step))
register_vjp(windows_backward, g=lambda grad, dim, size, step: windows(grad, dim, size, step))
