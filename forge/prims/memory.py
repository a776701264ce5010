"""The prims of memory: writes, and values that cross between tensors and Python."""

from forge.ir import Dim, NumberProxy, Proxy, Tag, TensorProxy, current_trace
from forge.prims.core import like, primitive, register_vjp


@primitive(tags=[Tag.EFFECT])
def copy_(x: TensorProxy, y: TensorProxy) -> None:
    """Write y into x's memory. Source: torch.Tensor.copy_."""


@primitive(tags=[Tag.EFFECT])
def copy_data_(x: TensorProxy, y: TensorProxy) -> None:
    """Write y into x's memory, without autograd's knowledge: x's version does not change. Source: x.data.copy_(y)."""


@primitive()
def with_data(x: TensorProxy, new: TensorProxy) -> TensorProxy:
    """Return `new` with x's history: gradients flow to x, like those of a tensor changed under torch.no_grad, which
    keeps its history."""
    return like(x)


register_vjp(with_data, x=lambda g: g, new=None)


@primitive(tags=[Tag.VIEW])
def alias(x: TensorProxy) -> TensorProxy:
    """Return another tensor with x's memory. Source: aten.alias."""
    return like(x)


register_vjp(alias, x=lambda g: g)


@primitive(tags=[Tag.NOT_DIFFERENTIABLE, Tag.SYNCHRONIZING])
def byte_offset(x: TensorProxy) -> Proxy:
    """Return the number of bytes before x's first element in its memory, which is not part of the metadata and differs
    between runs."""
    return Proxy(current_trace().fresh_name("byte_offset"))


Origin = TensorProxy | Proxy | None


@primitive(tags=[Tag.VIEW])
def as_strided(
    x: TensorProxy,
    size: tuple[Dim, ...],
    stride: tuple[Dim, ...],
    offset: Dim,
    strides: tuple[Dim, ...],
    origin: Origin = None,
) -> TensorProxy:
    """Return a view of x's memory, where x has these `strides`, from `offset` elements after x's first.

    origin: the input whose memory x views, or its position; `offset` then counts from the memory's start.
    Shapes: out has `size`. Source: torch.as_strided, relative to x.
    """
    return current_trace().tensor(size, x.dtype, x.device, strides=tuple(stride))


@primitive()
def as_strided_backward(
    g: TensorProxy,
    shape: tuple[Dim, ...],
    stride: tuple[Dim, ...],
    offset: Dim,
    strides: tuple[Dim, ...],
    origin: Origin = None,
) -> TensorProxy:
    """Return the gradient of x, which has `shape` and `strides`, from that of the view by as_strided."""
    return like(g, shape=shape)


register_vjp(as_strided, x=lambda g, x, size, *how: as_strided_backward(g, x.shape, *how), origin=None)


register_vjp(
    as_strided_backward,
    g=lambda grad, g, shape, stride, offset, strides, origin: as_strided(
        as_strided_backward(grad, shape, strides, 0, strides),  # the mean over elements that share memory
        g.shape,
        stride,
        offset,
        strides,
        origin,
    ),
    origin=None,
)


@primitive(tags=[Tag.SYNCHRONIZING])
def item(x: TensorProxy) -> NumberProxy:
    """Return the number in a tensor of one element. Source: torch.Tensor.item.

    Its symbol is Dynamo's: the front end records the call with it (forge/capture/dynamo.py).
    """
    raise NotImplementedError("item: the value of a tensor has no symbol while tracing; use forge.jit")


@primitive(tags=[Tag.SYNCHRONIZING])
def length(x: TensorProxy, dim: int) -> NumberProxy:
    """Return the size of a tensor along a dim that values determine. Source: torch.Tensor.size.

    Its symbol is Dynamo's, like item's.
    """
    raise NotImplementedError("length: a length that values decide has no symbol while tracing; use forge.jit")
