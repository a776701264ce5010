"""Prims about memory: writes, and values that cross between tensors and Python."""

from forge.ir import Dim, NumberProxy, Proxy, Tag, TensorProxy, current_trace, get_grad, put_grad, register_grad
from forge.prims.core import check_tensor, like, make_prim


def _copy_meta(x: TensorProxy, y: TensorProxy) -> None:
    """Writes y into x's memory. Source: torch.Tensor.copy_."""
    check_tensor("prims.copy_", x=x, y=y)


copy_ = make_prim("copy_", "copy_", meta=_copy_meta, tags=[Tag.EFFECT])


def _copy_data_meta(x: TensorProxy, y: TensorProxy) -> None:
    """Writes y into x's memory, unseen by autograd: x's version stays. Source: x.data.copy_(y)."""
    check_tensor("prims.copy_data_", x=x, y=y)


copy_data_ = make_prim("copy_data_", "copy_data_", meta=_copy_data_meta, tags=[Tag.EFFECT])


def _with_data_meta(x: TensorProxy, new: TensorProxy) -> TensorProxy:
    """`new`, through which gradients flow to x: a tensor that was changed under torch.no_grad keeps its history."""
    check_tensor("prims.with_data", x=x, new=new)
    return like(x)


with_data = make_prim("with_data", "with_data", meta=_with_data_meta)


@register_grad(with_data)
def _with_data_grad(x: TensorProxy, new: TensorProxy) -> TensorProxy:
    out = with_data(x, new)
    put_grad(x, get_grad(out))
    return out


def _alias_meta(x: TensorProxy) -> TensorProxy:
    """Another tensor with x's memory. Source: aten.alias."""
    check_tensor("prims.alias", x=x)
    return like(x)


alias = make_prim("alias", "alias", meta=_alias_meta, tags=[Tag.VIEW])


@register_grad(alias)
def _alias_grad(x: TensorProxy) -> TensorProxy:
    out = alias(x)
    put_grad(x, get_grad(out))
    return out


def _place_meta(x: TensorProxy) -> Proxy:
    """How many bytes lie before x's first element in its memory: no metadata tells, and they differ from run to run."""
    check_tensor("prims.place", x=x)
    return Proxy(current_trace().fresh_name("place"))


place = make_prim("place", "place", meta=_place_meta, tags=[Tag.NOT_DIFFERENTIABLE, Tag.SYNCHRONIZING])

Origin = TensorProxy | Proxy | None


def _as_strided_meta(
    x: TensorProxy,
    size: tuple[Dim, ...],
    stride: tuple[Dim, ...],
    offset: Dim,
    strides: tuple[Dim, ...],
    origin: Origin = None,
) -> TensorProxy:
    """What memory in which x has these `strides` shows, from `offset` elements after x's first.

    origin: the input whose memory x shows, or its place; `offset` then counts from the memory's start.
    Shapes: out has `size`. Source: torch.as_strided, relative to x.
    """
    check_tensor("prims.as_strided", x=x)
    return current_trace().tensor(size, x.dtype, x.device, strides=tuple(stride))


as_strided = make_prim("as_strided", "as_strided", meta=_as_strided_meta, tags=[Tag.VIEW])


def _as_strided_backward_meta(
    g: TensorProxy,
    shape: tuple[Dim, ...],
    stride: tuple[Dim, ...],
    offset: Dim,
    strides: tuple[Dim, ...],
    origin: Origin = None,
) -> TensorProxy:
    """The gradient of x, which has `shape` and `strides`, from that of what as_strided shows of it."""
    check_tensor("prims.as_strided_backward", g=g)
    return like(g, shape=shape)


as_strided_backward = make_prim("as_strided_backward", "as_strided_backward", meta=_as_strided_backward_meta)


@register_grad(as_strided)
def _as_strided_grad(x: TensorProxy, size: tuple[Dim, ...], *how: object) -> TensorProxy:
    out = as_strided(x, size, *how)
    put_grad(x, as_strided_backward(get_grad(out), x.shape, *how))
    return out


@register_grad(as_strided_backward)
def _as_strided_backward_grad(g: TensorProxy, shape: tuple[Dim, ...], *how: object) -> TensorProxy:
    out = as_strided_backward(g, shape, *how)
    strides = how[2]
    mean = as_strided_backward(get_grad(out), shape, strides, 0, strides)  # over the elements that are one in memory
    put_grad(g, as_strided(mean, g.shape, *how))
    return out


def _item_meta(x: TensorProxy) -> NumberProxy:
    """The number in a tensor of one element. Source: torch.Tensor.item.

    Its symbol is Dynamo's: the front end records the call with it (forge/capture/dynamo.py).
    """
    raise NotImplementedError("item: the value of a tensor has no symbol while tracing; use forge.jit")


item = make_prim("item", "item", meta=_item_meta, tags=[Tag.SYNCHRONIZING])


def _length_meta(x: TensorProxy, dim: int) -> NumberProxy:
    """How long a tensor is along a dim, where values decided that. Source: torch.Tensor.size.

    Its symbol is Dynamo's, as item's.
    """
    raise NotImplementedError("length: a length that values decide has no symbol while tracing; use forge.jit")


length = make_prim("length", "length", meta=_length_meta, tags=[Tag.SYNCHRONIZING])
