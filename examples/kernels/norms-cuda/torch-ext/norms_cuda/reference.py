"""References of the kernels in plain torch, where forge ships no pattern of that name."""

import torch
import torch.nn.functional as F


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """SwiGLU of one fused projection: the first half of the last dim is the gate."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up
