"""Linear layers with quantized weights of one row and of a few, as a language model decodes by: a Triton kernel reads
the weight as it is stored. A row and a weight of 8-bit floats are a sum in a region
(forge/executors/torchex/quantized.py)."""

import math
from typing import Any

import torch

from forge import torchlang
from forge.executors.cudaex.availability import runs_triton
from forge.executors.executor import Decision, OperatorExecutor, decline
from forge.executors.torchex.quantized import is_of_words, most_rows
from forge.ir import TensorProxy

MOST_ROWS = 64
MOST_WEIGHTS = 3  # of one launch: queries, keys and values
_LEAST_GROUP = 32  # elements: a product of tensor cores adds 16 at least, and a byte holds two


def _linear(
    input: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return _linear_int4(input, weight, scale, None, bias)


def _linear_int4(
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    from forge.executors.cudaex.quantized_kernels import linear  # Triton is imported where a program runs it

    return linear(input, weight, scale, zero_point, bias)


def _checker(
    input: TensorProxy, weight: TensorProxy, scale: TensorProxy, *rest: TensorProxy | None, **kwargs: TensorProxy | None
) -> Decision:
    decision = runs_triton("input", input)
    if not decision:
        return decision
    if input.dtype not in (torch.bfloat16, torch.float16):
        return decline(f"input is {input.dtype}, but must be bfloat16 or float16")
    if weight.dtype == torch.float8_e5m2 and input.dtype == torch.bfloat16:
        return decline("Triton has no conversion of float8_e5m2 to bfloat16 on all GPUs")
    rows, least = math.prod(input.shape[:-1]), most_rows(input, weight)
    if not isinstance(rows, int) or not least < rows <= MOST_ROWS:
        return decline(f"the input has {rows} rows, and the kernel is for {least + 1} to {MOST_ROWS}")
    size = input.shape[-1] // scale.shape[1] if scale.ndim == 2 and scale.shape[1] > 1 else _LEAST_GROUP
    if size < _LEAST_GROUP or size & (size - 1):
        return decline(f"groups have {size} elements, but must have a power of two, {_LEAST_GROUP} or more")
    return True


def _linears(
    input: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    scales: tuple[torch.Tensor, ...],
    zero_points: tuple[torch.Tensor | None, ...],
    biases: tuple[torch.Tensor | None, ...],
) -> tuple[torch.Tensor, ...]:
    from forge.executors.cudaex.quantized_kernels import linears

    return linears(input, weights, scales, zero_points, biases)


def _checker_of_several(
    input: TensorProxy, weights: tuple[TensorProxy, ...], scales: tuple[TensorProxy, ...], *rest: Any
) -> Decision:
    if len(weights) > MOST_WEIGHTS:
        return decline(f"there are {len(weights)} weights, and the kernel is for {MOST_WEIGHTS}")
    if not all(map(is_of_words, weights)):
        return decline("the weights are not integers in rows of whole words of 32 bits")
    decisions = (_checker(input, weight, scale) for weight, scale in zip(weights, scales, strict=True))
    return next((each for each in decisions if not each), True)


def register(executor: OperatorExecutor) -> None:
    """Register the kernel with an executor."""
    for symbol in (torchlang.linear_int8, torchlang.linear_fp8):
        executor.register_implementation(symbol, _linear, checker=_checker)
    executor.register_implementation(torchlang.linear_int4, _linear_int4, checker=_checker)
    executor.register_implementation(torchlang.quantized_linears, _linears, checker=_checker_of_several, grad="none")
