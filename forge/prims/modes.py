"""Prims that change torch's modes: a program leaves them as eager does."""

import torch

from forge.ir import Dim, Tag, TensorProxy
from forge.prims.core import like, primitive


@primitive(tags=[Tag.EFFECT])
def set_grad_enabled(mode: bool) -> None:
    """Have autograd record from here on, or not. Source: torch.set_grad_enabled."""


@primitive(tags=[Tag.NOT_DIFFERENTIABLE])
def as_inference(x: TensorProxy, mode: bool) -> TensorProxy:
    """Return a copy of x that is an inference tensor, or is none. Source: torch.inference_mode."""
    return like(x)


@primitive(tags=[Tag.RANDOM, Tag.NOT_DIFFERENTIABLE])
def begin_partial_draw(device: torch.device, offset: Dim) -> None:
    """Have the device's generator draw from an offset on: where this process's part of a DTensor begins."""


@primitive(tags=[Tag.RANDOM, Tag.NOT_DIFFERENTIABLE])
def end_partial_draw(device: torch.device, offset: Dim) -> None:
    """Move the device's generator to an offset from where the partial draw began: where the whole DTensor ends."""
