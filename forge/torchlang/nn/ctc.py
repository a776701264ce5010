"""The connectionist temporal classification (CTC) loss."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from forge import clang, prims
from forge.ir import Dim, TensorProxy, check
from forge.torchlang.core import torchsymbol
from forge.torchlang.limits import clamp_min
from forge.torchlang.nn.loss import reduce_loss

SequenceLengths = TensorProxy | Sequence[Dim]

_REDUCTIONS = ("none", "mean", "sum")


def _target_lengths(lengths: SequenceLengths, losses: TensorProxy) -> TensorProxy:
    """Return lengths in the losses' dtype, at least 1."""
    if not isinstance(lengths, TensorProxy):
        lengths = prims.tensor(list(lengths), torch.int64, losses.device)
    lengths = clang.convert(prims.device_put(lengths, losses.device), losses.dtype)
    return clamp_min(clang.reshape(lengths, losses.shape), 1)


@torchsymbol(F.ctc_loss)
def ctc_loss(
    log_probs: TensorProxy,
    targets: TensorProxy,
    input_lengths: SequenceLengths,
    target_lengths: SequenceLengths,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> TensorProxy:
    """Return -log of each target's probability, over all alignments with the steps; the mean is of the losses divided
    by the targets' lengths.

    Shapes: log_probs (steps, N, C) or (steps, C), targets (N, length), (length,) or concatenated, lengths (N,) or ().
    """
    check(reduction in _REDUCTIONS, lambda: f"{reduction} is not a valid value for reduction")
    losses = prims.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    return reduce_loss(losses / _target_lengths(target_lengths, losses) if reduction == "mean" else losses, reduction)


@torchsymbol(torch.ctc_loss)
def torch_ctc_loss(
    log_probs: TensorProxy,
    targets: TensorProxy,
    input_lengths: SequenceLengths,
    target_lengths: SequenceLengths,
    blank: int = 0,
    reduction: int = 0,
    zero_infinity: bool = False,
) -> TensorProxy:
    """Return F.ctc_loss with the reduction as a number, and without any by default, unlike the default of torch's
    operator."""
    how = _REDUCTIONS[reduction]
    return ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, how, zero_infinity)
