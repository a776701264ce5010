"""Prims of statistics: counts of what lies between edges."""

import torch

from forge.ir import Tag
from forge.prims.library import make_library_prim

histogram = make_library_prim(
    torch.histogram,
    "(how many elements, or how much of their weights, lie in each bin, the bins' edges).",
    tags=[Tag.NOT_DIFFERENTIABLE],
)
histogramdd = make_library_prim(
    torch.histogramdd,
    "(how many points, or how much of their weights, lie in each bin of a grid, the edges along each dim).",
    tags=[Tag.NOT_DIFFERENTIABLE],
)
