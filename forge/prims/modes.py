"""The prims that change torch's modes: a program leaves them in the same state as eager."""

import torch

from forge.ir import Dim, Tag, TensorProxy
from forge.prims.core import like, primitive


@primitive(tags=[Tag.EFFECT])
def set_grad_enabled(mode: bool) -> None:
    """Enable or disable autograd from here on. Source: torch.set_grad_enabled."""


@primitive(tags=[Tag.NOT_DIFFERENTIABLE])
def as_inference(x: TensorProxy, mode: bool) -> TensorProxy:
    """Return a copy of x that is, or is not, an inference tensor. Source: torch.inference_mode."""
    return like(x)


@primitive(tags=[Tag.RANDOM, Tag.NOT_DIFFERENTIABLE])
def begin_partial_draw(device: torch.device, offset: Dim) -> None:
    """Move the device's generator to an offset, the beginning of this process's part of a DTensor."""


@primitive(tags=[Tag.RANDOM, Tag.NOT_DIFFERENTIABLE])
def end_partial_draw(device: torch.device, offset: Dim) -> None:
    """Move the device's generator to an offset, the end of the whole DTensor, relative to the beginning of the partial
    draw."""
