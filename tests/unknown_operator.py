"""An operator that torchlang will never have, whatever operators of torch are added to it."""

from typing import Any

import torch


@torch.library.custom_op("forge_test::rounded", mutates_args=())
def rounded(x: torch.Tensor) -> torch.Tensor:
    """Return each element as the nearest multiple of 1/8, between -16 and 15.875."""
    return x.mul(8).round().clamp(-128, 127).div(8)


@rounded.register_fake
def _fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    steps = x.mul(8).round()
    return g * ((steps >= -128) & (steps <= 127))


rounded.register_autograd(_backward, setup_context=_save)
