"""The torch executor's implementations of the spectral family."""

import torch

from forge import prims
from forge.executors.torchex.core import run_prim

PHASE = 1e-2  # torch treats smaller phases as 0


@run_prim(prims.check_phase)
def check_phase(gradient: torch.Tensor, phase: torch.Tensor, op: str) -> torch.Tensor:
    """Return the gradient, or raise torch's error."""
    if not bool((phase.abs() <= PHASE).all()):
        raise RuntimeError(
            f"{op}: complex vectors are specified up to multiplication by e^{{i phi}}. The specified loss function "
            "depends on this quantity, so it is ill-defined."
        )
    return gradient
