"""The prims of connectionist temporal classification (CTC)."""

from collections.abc import Sequence

import torch

from forge.ir import Dim, TensorProxy, check
from forge.prims.core import like, primitive, register_vjp, torch_check
from forge.prims.elementwise import refuse_gradient

SequenceLengths = TensorProxy | Sequence[Dim]


@primitive()
def ctc_loss(
    log_probs: TensorProxy,
    targets: TensorProxy,
    input_lengths: SequenceLengths,
    target_lengths: SequenceLengths,
    blank: int,
    zero_infinity: bool,
) -> TensorProxy:
    """Return -log of the probability of each target, over all alignments with the steps.

    Shapes: log_probs (steps, N, C) or (steps, C), targets (N, length), (length,) or concatenated; out (N,) or ().
    Source: torch.ctc_loss, Graves et al., 2006.
    """
    op = "prims.ctc_loss"
    torch_check(log_probs.ndim in (2, 3), lambda: f"{op}: log_probs is {log_probs}, but must have 2 or 3 dims")
    check(
        log_probs.dtype in (torch.float32, torch.float64),
        lambda: f'{op}: "ctc_loss" not implemented for {log_probs}',
        NotImplementedError,
    )
    torch_check(
        not isinstance(log_probs.shape[-1], int) or 0 <= blank < log_probs.shape[-1],
        lambda: f"{op}: blank must be in label range, but is {blank} for {log_probs}",
    )
    return like(log_probs, shape=log_probs.shape[1:-1])


@primitive()
def ctc_loss_backward(g: TensorProxy, log_probs: TensorProxy, *how: object) -> TensorProxy:
    """Return the gradient of ctc_loss's log_probs. torch has no second derivative. Source:
    aten._ctc_loss_backward."""
    return like(log_probs)


register_vjp(ctc_loss, log_probs=lambda g, log_probs, *how: ctc_loss_backward(g, log_probs, *how))


refuse_gradient(ctc_loss_backward)
