"""A linear layer of one row or a few as an operator: torch's kernel, or loops in a region.

torch's products read the weight in tiles that suit many rows. A loop that sums along each row of the weight reads it
once at memory bandwidth, and fuses the epilogue (a bias, an activation, a residual).
"""

import torch
from torch.nn import functional as F

from forge import torchlang
from forge.executors.torchex.core import run_torchlang

_library = torch.library.Library("forge", "FRAGMENT")
_library.define("row_product(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor")
_library.impl("row_product", F.linear, "CompositeExplicitAutograd")

row_product = torch.ops.forge.row_product.default
run_torchlang(torchlang.row_product, row_product)


def in_loops(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return the product as float32 sums along the rows of the weight, each of which is read once."""
    rows = in_memory(float_rows(input))
    return finish_rows((weight.float()[:, None] * rows).sum(-1), input, bias)


def float_rows(input: torch.Tensor) -> torch.Tensor:
    """Return the rows of an input in float32, as a copy."""
    return input.reshape(-1, input.shape[-1]).to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def in_memory(x: torch.Tensor) -> torch.Tensor:
    """Return x, which Inductor materializes once for all sums."""
    return x.as_strided(x.shape, x.stride())


def finish_rows(sums: torch.Tensor, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return float32 sums of shape (out, rows) as the product, with the shape and dtype that follow from `input`."""
    sums = sums if bias is None else sums + bias.float()[:, None]
    return sums.t().to(input.dtype).reshape(*input.shape[:-1], sums.shape[0])
