"""The torch executor's implementations of the creation family."""

from typing import Any

import torch

from forge import prims
from forge.executors.torchex.core import run_prim


@run_prim(prims.full)
def full(shape: tuple, value: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Call torch.full, whose dtype and device are keywords."""
    return torch.full(shape, value, dtype=dtype, device=device)


@run_prim(prims.empty)
def empty(shape: tuple, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Call torch.empty, whose dtype and device are keywords."""
    return torch.empty(shape, dtype=dtype, device=device)


@run_prim(prims.iota)
def iota(length: int, start: Any, step: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return start + step * i, exact for integers and in double for floats."""
    indices = torch.arange(length, device=device, dtype=torch.float64 if dtype.is_floating_point else torch.int64)
    return (indices * step + start).to(dtype)


@run_prim(prims.tensor)
def tensor(data: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Call torch.tensor, whose dtype and device are keywords."""
    return torch.tensor(data, dtype=dtype, device=device)


@run_prim(prims.triangle_indices)
def triangle_indices(
    upper: bool, rows: int, columns: int, offset: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Call torch's function for the triangle."""
    function = torch.triu_indices if upper else torch.tril_indices
    return function(rows, columns, offset, dtype=dtype, device=device)
