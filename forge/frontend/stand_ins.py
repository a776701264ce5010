"""Functions of torch that look at values: what Dynamo captures in their place.

Dynamo runs what it captures on tensors without values, which these functions cannot be. A stand-in gives results of
the same shape and dtype without looking; torchlang has it as the function that it stands for, which is what runs.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from forge.ir import Dim
from forge.torchlang import stands_for

Lengths = torch.Tensor | Sequence[Dim]


def gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """F.gaussian_nll_loss, which refuses a negative var."""
    if isinstance(var, torch.Tensor) and var.ndim == input.ndim - 1:
        var = var.unsqueeze(-1)
    loss = (input - target) ** 2 / var
    return loss if reduction == "none" else loss.sum()


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """F.ctc_loss, which keeps as much as the longest target needs."""
    losses = log_probs.sum((0, -1))
    return losses if reduction == "none" else losses.sum()


def torch_ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    reduction: int = 0,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """torch.ctc_loss, which keeps as much as the longest target needs."""
    return ctc_loss(log_probs, targets, input_lengths, target_lengths, reduction="mean" if reduction else "none")


STAND_INS = {
    F.gaussian_nll_loss: gaussian_nll_loss,
    F.ctc_loss: ctc_loss,
    torch.ctc_loss: torch_ctc_loss,
}

for _function, _stand_in in STAND_INS.items():
    stands_for(_stand_in, _function)
