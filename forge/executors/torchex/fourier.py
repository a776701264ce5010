"""The torch executor's implementations of the Fourier transforms."""

import torch

from forge import prims
from forge.executors.torchex.core import run_prims

run_prims(
    {
        prims.fft_c2c: torch.ops.aten._fft_c2c.default,
        prims.fft_r2c: torch.ops.aten._fft_r2c.default,
        prims.fft_c2r: torch.ops.aten._fft_c2r.default,
    }
)
