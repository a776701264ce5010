"""Sums of segments, as the gradients of attention scores that are gathered by distance: a Triton kernel multiplies."""

import importlib.util

import torch

from forge import clang
from forge.executors.executor import Decision, OperatorExecutor, decline
from forge.ir import TensorProxy
from forge.ir.proxies import Dim, hint_of

_DTYPES = (torch.bfloat16, torch.float16)
_FEWEST_ROWS = 16  # that share an index: of a tile of a product
_MOST_SEGMENTS = 2048  # up to which the product takes less time than an H100's atomics


def _sum(g: torch.Tensor, index: torch.Tensor, segments: int) -> torch.Tensor:
    from forge.executors.cudaex.segment_kernels import sum_segments  # Triton is imported where a program runs it

    return sum_segments(g, index, segments)


def _checker(g: TensorProxy, index: TensorProxy, segments: Dim) -> Decision:
    if g.device.type != "cuda":
        return decline(f"g is on {g.device.type}, and its kernel runs on CUDA GPUs")
    if torch.version.hip is not None or not importlib.util.find_spec("triton"):
        return decline("the kernel needs an NVIDIA GPU and Triton")
    if g.dtype not in _DTYPES:
        return decline(f"the kernel takes bfloat16 and float16, and g is {g.dtype}")
    if hint_of(g.numel()) < _FEWEST_ROWS * hint_of(index.numel()):
        return decline(f"fewer than {_FEWEST_ROWS} rows share an index")
    if hint_of(segments) > _MOST_SEGMENTS:
        return decline(f"there are more than {_MOST_SEGMENTS} segments")
    return True


def register(executor: OperatorExecutor) -> None:
    """Register sums of segments with an executor."""
    executor.register_implementation(clang.segment_sums, _sum, checker=_checker)
