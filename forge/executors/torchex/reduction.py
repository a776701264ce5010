"""How torch runs the reduction family."""

import torch

from forge import prims
from forge.executors.torchex.core import run_prim, run_prims

run_prims({prims.argmax: torch.argmax, prims.argmin: torch.argmin, prims.cumsum: torch.cumsum, prims.cumprod: torch.cumprod})


@run_prim(prims.sum)
def sum(x: torch.Tensor, dims: tuple) -> torch.Tensor:
    """No dims mean none, where torch.sum means all; the dtype stays."""
    return torch.sum(x, dims, dtype=x.dtype) if dims else x


@run_prim(prims.prod)
def prod(x: torch.Tensor, dims: tuple) -> torch.Tensor:
    """torch.prod takes one dim at a time."""
    for dim in sorted(dims, reverse=True):
        x = torch.prod(x, dim, dtype=x.dtype)
    return x


def _over_dims(function: object) -> object:
    def run(x: torch.Tensor, dims: tuple) -> torch.Tensor:
        return function(x, dims) if dims else x

    run.__name__ = function.__name__
    return run


run_prim(prims.amax)(_over_dims(torch.amax))
run_prim(prims.amin)(_over_dims(torch.amin))


@run_prim(prims.any)
def any(x: torch.Tensor, dims: tuple) -> torch.Tensor:
    """Always bool, where torch.any of uint8 is uint8."""
    return torch.any(x != 0 if x.dtype != torch.bool else x, dims) if dims else x != 0


@run_prim(prims.all)
def all(x: torch.Tensor, dims: tuple) -> torch.Tensor:
    """Always bool, where torch.all of uint8 is uint8."""
    return torch.all(x != 0 if x.dtype != torch.bool else x, dims) if dims else x != 0
