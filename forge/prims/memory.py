"""Prims about memory: writes, and values that cross between tensors and Python."""

from forge.ir import NumberProxy, Tag, TensorProxy, get_grad, put_grad, register_grad
from forge.prims.core import check_tensor, like, make_prim


def _copy_meta(x: TensorProxy, y: TensorProxy) -> None:
    """Writes y into x's memory. Source: torch.Tensor.copy_."""
    check_tensor("prims.copy_", x=x, y=y)


copy_ = make_prim("copy_", "copy_", meta=_copy_meta, tags=[Tag.EFFECT])


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


def _item_meta(x: TensorProxy) -> NumberProxy:
    """The number in a tensor of one element. Source: torch.Tensor.item.

    Its symbol is Dynamo's: the front end records the call with it (forge/frontend/dynamo.py).
    """
    raise NotImplementedError("item: the value of a tensor has no symbol while tracing; use forge.jit")


item = make_prim("item", "item", meta=_item_meta, tags=[Tag.SYNCHRONIZING])
