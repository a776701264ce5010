"""The linear layers with quantized weights: torch's product of the dequantized weight, or loops in a region for few
rows.

A product of few rows is bound by the reads of its weight. The loops read the weight once, in its storage format.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from forge import torchlang
from forge.executors.executor import Decision, decline
from forge.executors.fingerprint.walk import register_operators
from forge.executors.torchex.core import run_torchlang
from forge.executors.torchex.row_product import finish_rows, float_rows, in_memory
from forge.ir import TensorProxy
from forge.torchlang.nn.quantized import OPERATORS


def most_rows(input: TensorProxy, weight: TensorProxy | torch.Tensor) -> int:
    """Return the largest number of input rows for which loops were measured to be faster than torch's product. On a GPU
    a row and a weight of words have a kernel (forge/executors/cudaex/quantized.py)."""
    if input.device.type == "cuda":
        return 0 if input.dtype in (torch.bfloat16, torch.float16) and is_of_words(weight) else 1
    return 4 if input.device.type == "cpu" else 0


def is_of_words(weight: TensorProxy | torch.Tensor) -> bool:
    """Return whether a weight has integers, in rows of whole 32-bit words."""
    return weight.dtype in (torch.int8, torch.uint8) and weight.shape[1] % 4 == 0


def _has_few_rows(input: TensorProxy, weight: TensorProxy, *rest: Any, **kwargs: Any) -> Decision:
    rows, most = math.prod(input.shape[:-1]), most_rows(input, weight)
    if input.dtype == torch.float64 or not isinstance(rows, int) or not 0 < rows <= most:
        return decline(f"the weight of {rows} rows is dequantized for torch's product")
    return True


for _symbol in (torchlang.linear_int8, torchlang.linear_fp8, torchlang.linear_int4):
    run_torchlang(_symbol, checker=_has_few_rows)


def _parts_of(operator: str) -> tuple[()] | None:
    """Return an empty key for an operator of this package, whose code is in the key of every program on disk."""
    return () if operator.removeprefix("forge::") in OPERATORS else None


register_operators(_parts_of)


# the loops


def linear_in_loops(
    input: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the product as float32 sums along the rows of the weight, each of which is read once."""
    rows = in_memory(float_rows(input))
    if scale.ndim == 1 or scale.shape[1] == 1:
        scale = scale.reshape(-1)
        return finish_rows((_floats(weight)[:, None] * rows).sum(-1) * scale.float()[:, None], input, bias)
    shape = (-1, scale.shape[1], weight.shape[1] // scale.shape[1])
    scales = _floats_of(scale)[:, None, :, None]
    products = _floats(weight).reshape(shape)[:, None] * rows.reshape(shape)
    return finish_rows((products * scales).sum((-2, -1)), input, bias)


def linear_int4_in_loops(
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the product as sums over the bytes of the weight, each of which is read once."""
    groups = 1 if scale.ndim == 1 else scale.shape[1]
    shape = (-1, groups, weight.shape[1] // groups)
    rows, scales, packed = (
        float_rows(input),
        _floats_of(scale).reshape(-1, groups),
        weight.reshape(shape)[:, None],
    )
    zeros = None if zero_point is None else zero_point.float().reshape(-1, groups)
    if input.device.type != "cpu":
        halves = input.reshape(-1, input.shape[-1])  # fewer loads than in float32: as many as for the weight
        x, y = (each.reshape(shape).float() for each in in_memory(torch.stack([halves[:, ::2], halves[:, 1::2]])))
        least = 8.0 if zeros is None else zeros[:, None, :, None]
        products = ((packed & 15).float() - least) * x + ((packed >> 4).float() - least) * y
        return finish_rows((products * scales[:, None, :, None]).sum((-2, -1)), input, bias)
    products, center = _products_of_bytes(packed.float(), rows, is_exact=input.dtype == torch.float32)
    sums = (products * scales[:, None, :, None]).sum((-2, -1))
    if zeros is not None or not center:
        shifts = scales * ((8.0 if zeros is None else zeros) - center)
        of_groups = rows.reshape(-1, groups, 2 * shape[-1]).sum(-1)  # the sums for the zero points
        sums = sums - (shifts[:, None] * of_groups).sum(-1)
    return finish_rows(sums, input, bias)


def _products_of_bytes(b: torch.Tensor, rows: torch.Tensor, *, is_exact: bool) -> tuple[torch.Tensor, float]:
    """Return (low * x + high * y of bytes b minus the share of the zero point `center`, `center`).

    All arithmetic is in floats, since Inductor's C++ does not vectorize shifts of bytes. The fewest steps are

        b * x + high * (y - 16 * x), high = floor(b / 16)

    Their terms are up to 30 times larger than the result's, an error below half precision's. For float32
    (`is_exact`), with c = b - 136 = low - 8 + 16 * (high - 8):

        (low - 8) * x + (high - 8) * y, high - 8 = floor(c / 16 + 1 / 2), low - 8 = c - 16 * (high - 8)
    """
    x, y = rows[:, ::2], rows[:, 1::2]
    shape = (-1, *b.shape[-2:])
    if is_exact:
        x, y = (each.reshape(shape) for each in in_memory(torch.stack([x, y])))
        c = b - 136
        high = (c * 0.0625 + 0.5).floor()
        return (c - 16 * high) * x + high * y, 8.0
    x, z = (each.reshape(shape) for each in in_memory(torch.stack([x, y - 16 * x])))
    return b * x + (b * 0.0625).floor() * z, 0.0


def _floats_of(scale: torch.Tensor) -> torch.Tensor:
    """Return scales as float32. On a CPU they are converted before the loop: a loop that reads half precision has
    vectors of 32 elements, for which torch's loads of bytes are slow."""
    wide = scale.float()
    return in_memory(wide) if wide is not scale and scale.device.type == "cpu" else wide


# float8 to float32: the shift of the bits, the mask of the sign's copies, and the exponent bias
_BITS = {torch.float8_e4m3fn: (20, ~(15 << 27), 120), torch.float8_e5m2: (21, ~(7 << 28), 112)}


def _floats(elements: torch.Tensor) -> torch.Tensor:
    """Return elements as float32. Inductor's C++ converts float8 one element at a time; it vectorizes these steps."""
    if elements.dtype not in _BITS or elements.device.type != "cpu":
        return elements.float()
    shift, mask, bias = _BITS[elements.dtype]
    bits = (elements.view(torch.int8).int() << shift) & mask
    return bits.view(torch.float32) * 2.0**bias


IN_LOOPS: dict[Any, Callable] = {
    OPERATORS["linear_int8"]: linear_in_loops,
    OPERATORS["linear_fp8"]: linear_in_loops,
    OPERATORS["linear_int4"]: linear_int4_in_loops,
}
