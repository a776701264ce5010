"""How torch runs the memory family."""

import torch

from forge import prims
from forge.executors.torchex.core import run_prim, run_prims


@run_prim(prims.with_data)
def with_data(x: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The value; its history is the gradient rule's."""
    return new


run_prims({prims.copy_: torch.Tensor.copy_, prims.item: torch.Tensor.item})
