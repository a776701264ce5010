"""Calls that neither torch nor a fuser runs in one pass over memory, by Triton kernels of forge's own, on CUDA GPUs."""

import importlib.util

import torch

from forge.executors.executor import Decision, OperatorExecutor, decline
from forge.executors.registry import register_executor
from forge.executors.tritonex import head


class TritonExecutor(OperatorExecutor):
    """Single calls by Triton kernels, which are compiled when they first run."""

    def is_available(self) -> Decision:
        if not torch.cuda.is_available():
            return decline("there is no CUDA GPU")
        return True if importlib.util.find_spec("triton") else decline("triton is not installed")

    def identity(self) -> str:
        """Return a key of all that its programs depend on: Triton compiles when they run."""
        return ""


tritonex = register_executor(TritonExecutor("triton"), default=True, first=True)
head.register(tritonex)
