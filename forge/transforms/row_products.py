"""Linear layers of one row or a few, as in decoding, become sums in the region of neighbouring ops.

    linear(row, weight, bias) = (weight * row).sum(-1) + bias

They are bound by reading the weight. forge/executors/torchex/row_product.py explains how it is computed.
"""

import math
from collections.abc import Callable

import torch

from forge import torchlang
from forge.ir import BoundSymbol, TensorProxy, Trace, current_trace
from forge.transforms.replacement import rewrite

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_DEVICES = ("cpu", "cuda")
_MOST_ROWS = {("cpu", torch.float32): 4}  # for which torch's kernel measured slower; of others, one


def row_products(
    trace: Trace,
    is_fused: Callable[[BoundSymbol], bool],
    in_torch: Callable[[BoundSymbol], bool] = lambda bound: True,
) -> Trace:
    """Return a program without gradients whose linear layers of few rows may be in regions.

    is_fused: whether a call may be in a region. in_torch: whether a call runs as torch runs it.
    """

    def as_row_product(bound: BoundSymbol) -> TensorProxy | None:
        if not _is_of_few_rows(bound) or not in_torch(bound):
            return None
        output = torchlang.row_product(*bound.args, **bound.kwargs)
        call = current_trace().last_call
        return output if call is not None and is_fused(call) else None

    return rewrite(trace, "row_products", as_row_product)


def _is_of_few_rows(bound: BoundSymbol) -> bool:
    if bound.symbol is not torchlang.linear:
        return False
    arguments = torchlang.linear.bind(bound.args, bound.kwargs)
    input, weight = arguments["input"], arguments["weight"]
    rows = math.prod(input.shape[:-1])
    device = input.device.type
    if not isinstance(rows, int) or weight.ndim != 2 or device not in _DEVICES:
        return False
    if arguments["bias"] is not None and arguments["bias"].ndim != 1:  # torch accepts any that broadcasts to the result
        return False
    if not 0 < rows <= _MOST_ROWS.get((device, input.dtype), 1):
        return False
    return input.dtype in _DTYPES and all(x is None or x.dtype == input.dtype for x in (weight, arguments["bias"]))
