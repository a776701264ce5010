"""Linear layers with quantized weights: torch's product of the dequantized weight, or loops in a region for few rows.

A product of few rows takes as long as its weight is read. The loops read it once, as it is stored.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from forge import torchlang
from forge.executors.executor import Decision, decline
from forge.executors.torchex.core import run_torchlang
from forge.ir import TensorProxy
from forge.torchlang.nn.quantized import OPERATORS

MOST_ROWS = {"cpu": 4, "cuda": 1}  # for which loops were seen to be faster than torch's product


def _has_few_rows(input: TensorProxy, *rest: Any, **named: Any) -> Decision:
    rows = math.prod(input.shape[:-1])
    most = MOST_ROWS.get(input.device.type, 0)
    if input.dtype == torch.float64 or not isinstance(rows, int) or not 0 < rows <= most:
        return decline(f"the weight of {rows} rows is dequantized for torch's product")
    return True


for _symbol in (torchlang.linear_int8, torchlang.linear_fp8, torchlang.linear_int4):
    run_torchlang(_symbol, checker=_has_few_rows)


# the loops


def linear_in_loops(
    input: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the product as sums in float32 along the rows of the weight, each of which is read once."""
    rows = _in_memory(_rows_of(input))
    groups = _Groups(weight, scale, input.device)
    x, elements = groups.cut(rows), groups.cut(weight, dim=1)
    return groups.finish(input, bias, lambda part: _floats(elements[:, :, part]) * x[:, part])


def linear_int4_in_loops(
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the product as sums along the bytes of the weight, each of which is read once.

    Of a byte b of the elements low and high = floor(b / 16), low = b - 16 * high:

        (low - z) * x + (high - z) * y = b * x + high * (y - 16 * x) - z * (x + y)

    in which all is arithmetic of floats: Inductor's C++ does not vectorize shifts of bytes.
    """
    x, y = (_rows_of(input)[:, start::2] for start in (0, 1))
    terms = _in_memory(torch.stack([x, y - 16 * x, x + y]))
    groups = _Groups(weight, scale, input.device)
    first, second, both = (groups.cut(each) for each in terms)
    bytes = groups.cut(weight, dim=1)
    zeros = None if zero_point is None else groups.per_group(zero_point)

    def product(part: slice) -> torch.Tensor:
        b = bytes[:, :, part].float()
        zero = 8.0 if zeros is None else zeros[:, :, part]
        return b * first[:, part] + (b * 0.0625).floor() * second[:, part] - zero * both[:, part]

    return groups.finish(input, bias, product)


def _rows_of(input: torch.Tensor) -> torch.Tensor:
    return input.reshape(-1, input.shape[-1]).to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _in_memory(x: torch.Tensor) -> torch.Tensor:
    """Return x, which Inductor writes to memory, once for all sums."""
    return x.as_strided(x.shape, x.stride())


class _Groups:
    """The groups of a weight's rows that have scales; for a scale per row, as many as Inductor's C++ should add.

    It adds to one vector, each sum after the one before: on a CPU each sum is one of several parts first.
    """

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, device: torch.device) -> None:
        self.columns = weight.shape[1]
        self.scale = scale.float()
        several = (4, 2) if device.type == "cpu" else ()
        size = self.columns if scale.ndim == 1 else scale.shape[1]
        self.parts = next((each for each in several if size % each == 0), 1)
        self.count = self.parts if scale.ndim == 1 else scale.shape[1]

    def cut(self, x: torch.Tensor, dim: int | None = None) -> torch.Tensor:
        """Return the rows of x in groups, with a new dim."""
        cut = x.reshape(x.shape[0], self.count, self.columns // self.count)
        return cut if dim is None else cut.unsqueeze(dim)

    def per_group(self, x: torch.Tensor) -> torch.Tensor:
        """Return numbers of each group, or of each row, by (out, rows, group, element)."""
        return x.float().reshape(x.shape[0], 1, -1, 1).expand(-1, -1, self.count, -1)

    def finish(
        self, input: torch.Tensor, bias: torch.Tensor | None, product: Callable[[slice], torch.Tensor]
    ) -> torch.Tensor:
        """Return the sums of the products of each element, of which `product` gives those of some groups."""
        is_grouped = self.scale.ndim == 2
        scale = self.per_group(self.scale)
        total = None
        for start in range(self.parts):
            part = slice(start, None, self.parts)
            found = product(part) * scale[:, :, part] if is_grouped else product(part)
            total = found if total is None else total + found
        assert total is not None
        sums = total.sum((-2, -1))
        sums = sums if is_grouped else sums * self.scale[:, None]
        sums = sums if bias is None else sums + bias.float()[:, None]
        return sums.t().to(input.dtype).reshape(*input.shape[:-1], sums.shape[0])


# floats of 8 bits as those of 32: how far to shift their bits, which are the sign's copies, and the bias of exponents
_BITS = {torch.float8_e4m3fn: (20, ~(15 << 27), 120), torch.float8_e5m2: (21, ~(7 << 28), 112)}


def _floats(elements: torch.Tensor) -> torch.Tensor:
    """Return elements as float32. Inductor's C++ converts floats of 8 bits one by one; it vectorizes these steps."""
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
