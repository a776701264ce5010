"""The attention within a window of positions; forge/transforms/attention_masks.py matches it in constant masks."""

import torch

from forge import clang, prims
from forge.ir import Symbol, TensorProxy
from forge.torchlang.nn.attention import scaled_dot_product_attention


def _window_attention(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    left: int | None,
    right: int | None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> TensorProxy:
    """Return scaled_dot_product_attention where query i sees the keys from i - left to i + right. None means all on
    that side.

    Shapes: those of scaled_dot_product_attention; query and key have the same length.
    """
    columns = prims.iota(key.shape[-2], 0, 1, torch.int64, query.device)
    rows = clang.unsqueeze(prims.iota(query.shape[-2], 0, 1, torch.int64, query.device), 1)
    mask = None
    if left is not None:
        mask = clang.ge(columns, clang.sub(rows, left))
    if right is not None:
        before = clang.le(columns, clang.add(rows, right))
        mask = before if mask is None else clang.bitwise_and(mask, before)
    return scaled_dot_product_attention(query, key, value, mask, 0.0, False, scale, enable_gqa)


window_attention = Symbol("window_attention", "forge.window_attention", body=_window_attention)
