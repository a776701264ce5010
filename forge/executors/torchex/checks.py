"""How torch runs prims that look at values."""

import builtins

import torch

from forge import prims
from forge.executors.torchex.core import run_prim


@run_prim(prims.require)
def require(condition: torch.Tensor, message: str, error: str) -> None:
    """A GPU is waited for, as in eager."""
    if not condition:
        raise getattr(builtins, error)(message)
