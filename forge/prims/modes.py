"""Prims that change torch's modes: a program leaves them as eager does."""

from forge.ir import Tag, TensorProxy
from forge.prims.core import check_tensor, like, make_prim


def _set_grad_enabled_meta(mode: bool) -> None:
    """From here on autograd records, or does not. Source: torch.set_grad_enabled."""


set_grad_enabled = make_prim("set_grad_enabled", "set_grad_enabled", meta=_set_grad_enabled_meta, tags=[Tag.EFFECT])


def _as_inference_meta(x: TensorProxy, mode: bool) -> TensorProxy:
    """A copy of x that is an inference tensor, or is none. Source: torch.inference_mode."""
    check_tensor("prims.as_inference", x=x)
    return like(x)


as_inference = make_prim("as_inference", "as_inference", meta=_as_inference_meta, tags=[Tag.NOT_DIFFERENTIABLE])
