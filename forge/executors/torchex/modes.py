"""The torch executor's implementations of the modes family."""

import torch

from forge import prims
from forge.executors.torchex.core import run_prim, run_prims
from forge.torch_internals.autograd import set_grad_enabled

run_prims({prims.set_grad_enabled: set_grad_enabled})


@run_prim(prims.as_inference)
def as_inference(x: torch.Tensor, mode: bool) -> torch.Tensor:
    """Return a copy of x that is, or is not, an inference tensor."""
    with torch.inference_mode(mode):
        return x.clone()
