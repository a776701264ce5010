"""CUDA's libraries and memory. A build for the CPU lacks these functions."""

from collections.abc import Callable
from typing import Any

import torch


def _function(name: str) -> Callable[..., Any]:
    def missing(*args: Any) -> Any:
        raise NotImplementedError(f"torch {torch.__version__} has no torch._C.{name}")

    return getattr(torch._C, name, missing)


clear_cublas_workspaces = _function("_cuda_clearCublasWorkspaces")
end_allocate_to_pool = _function("_cuda_endAllocateToPool")
release_pool = _function("_cuda_releasePool")
