"""Prims that change torch's modes: a program leaves them as eager does."""

from forge.ir import Tag, TensorProxy
from forge.prims.core import like, primitive


@primitive(tags=[Tag.EFFECT])
def set_grad_enabled(mode: bool) -> None:
    """Have autograd record from here on, or not. Source: torch.set_grad_enabled."""


@primitive(tags=[Tag.NOT_DIFFERENTIABLE])
def as_inference(x: TensorProxy, mode: bool) -> TensorProxy:
    """Return a copy of x that is an inference tensor, or is none. Source: torch.inference_mode."""
    return like(x)
