"""The torch executor's implementations of the factorizations that are not library prims."""

import torch

from forge import prims
from forge.executors.torchex.core import run_prims

run_prims(
    {
        prims.cholesky_solve: torch.cholesky_solve,
        prims.geqrf: torch.geqrf,
        prims.linalg_solve_triangular: torch.linalg.solve_triangular,
    }
)
