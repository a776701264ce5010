"""The prims of statistics: counts of elements between edges."""

import torch

from forge.prims.elementwise import refuse_gradient
from forge.prims.library import make_library_prim

histogram = make_library_prim(
    torch.histogram, "(how many elements, or how much of their weights, lie in each bin, the bins' edges)."
)
histogramdd = make_library_prim(
    torch.histogramdd,
    "(how many points, or how much of their weights, lie in each bin of a grid, the edges along each dim).",
)
for _counts in (histogram, histogramdd):
    refuse_gradient(_counts)
