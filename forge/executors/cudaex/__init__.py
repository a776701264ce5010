"""Calls that torch runs in more passes over memory, or by slower kernels, than a CUDA GPU needs."""

import torch

from forge.executors.cudaex import attention, decoding, head, products, quantized, windows
from forge.executors.executor import Decision, OperatorExecutor, decline
from forge.executors.registry import register_executor


class CudaExecutor(OperatorExecutor):
    """Single calls on CUDA GPUs: by torch's kernels on memory that suits them, or by Triton kernels of forge's own."""

    def is_available(self) -> Decision:
        return True if torch.cuda.is_available() else decline("there is no CUDA GPU")

    def identity(self) -> str:
        """Return a key of all that its programs depend on, beside forge's version: Triton compiles at run time."""
        return ""

    def with_eager_numerics(self) -> "CudaExecutor":
        """Return the executor without the head of a language model, attention and quantized weights, of which torch
        rounds each step."""
        return _with_eager_numerics


cudaex = register_executor(CudaExecutor("cuda"))
_with_eager_numerics = CudaExecutor("cuda")
head.register(cudaex)
attention.register(cudaex)
decoding.register(cudaex)
windows.register(cudaex)
quantized.register(cudaex)
for _executor in (cudaex, _with_eager_numerics):
    products.register(_executor)
