"""How torch runs the memory family."""

import torch

from forge import prims
from forge.executors.torchex.core import run_prim


@run_prim(prims.copy_)
def copy_(x: torch.Tensor, y: torch.Tensor, silently: bool) -> None:
    """x.copy_(y), under no_grad where the program's own write was."""
    if silently:
        with torch.no_grad():
            x.copy_(y)
    else:
        x.copy_(y)


@run_prim(prims.with_data)
def with_data(x: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The value; its history is the gradient rule's."""
    return new


run_prim(prims.item)(torch.Tensor.item)
