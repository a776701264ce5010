"""How torch runs the linear algebra family."""

import torch

from forge import clang, prims
from forge.executors.torchex.core import run_clang, run_prims

run_prims({prims.matmul: torch.matmul})
run_clang({clang.matmul: torch.matmul, clang.vector_norm: torch.linalg.vector_norm})
