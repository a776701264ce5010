"""The torch executor's ctc_loss. Its autograd graph is kept because shapes in it depend on the target lengths."""

from typing import Any

import torch

from forge import prims
from forge.executors.torchex.core import run_prim, torch_prims, torchex
from forge.ir import TensorProxy, current_trace
from forge.torchlang.opaque import keep_graph


def ctc_loss(log_probs: torch.Tensor, *how: Any) -> torch.Tensor:
    """Return the loss of each target."""
    targets, input_lengths, target_lengths, blank, zero_infinity = how
    return torch.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, 0, zero_infinity)


@run_prim(prims.ctc_loss_backward)
def ctc_loss_backward(g: torch.Tensor, log_probs: torch.Tensor, *how: Any) -> torch.Tensor:
    """Compute the gradient by torch's autograd; the forward runs again."""
    with torch.enable_grad():
        leaf = log_probs.detach().requires_grad_()
        return torch.autograd.grad(ctc_loss(leaf, *how), leaf, g)[0]


def _ctc_loss_grad(log_probs: TensorProxy, *how: Any) -> TensorProxy:
    with current_trace().collecting():
        output = prims.ctc_loss(log_probs, *how)
    keep_graph(ctc_loss, (log_probs, *how), {}, output)
    return output


torchex.register_implementation(prims.ctc_loss, ctc_loss, grad_transform=_ctc_loss_grad)
torch_prims.register_implementation(prims.ctc_loss, ctc_loss)
