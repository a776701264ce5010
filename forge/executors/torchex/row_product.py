"""A linear layer of one row as an operator: torch's kernel, or loops in a region.

torch's products read the weight in tiles that are made for many rows. A loop that sums along each row of the weight
reads it once at the memory's rate, and computes what follows (a bias, an activation, a residual) on the way.
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
    """Return the product as a sum in float32 along each row of the weight."""
    row = input.reshape(-1).float()
    if row.dtype != input.dtype:
        row = row.as_strided(row.shape, (1,))  # Inductor writes it to memory, once for all rows of the weight
    sums = (weight.float() * row).sum(-1)
    if bias is not None:
        sums = sums + bias.float()
    return sums.to(input.dtype).reshape(*input.shape[:-1], -1)
