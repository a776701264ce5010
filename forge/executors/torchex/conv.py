"""The torch executor's implementations of the conv family."""

import torch

from forge import prims
from forge.executors.torchex.core import run_prims

run_prims(
    {
        prims.convolution: torch.ops.aten.convolution.default,
        prims.convolution_backward: torch.ops.aten.convolution_backward.default,
    }
)
