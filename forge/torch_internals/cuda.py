"""CUDA's libraries."""

from collections.abc import Callable

import torch

# a build for the CPU lacks it
clear_cublas_workspaces: Callable[[], None] = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
