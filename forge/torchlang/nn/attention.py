"""The scaled dot-product attention of torch.nn.functional."""

import math
import operator

import torch
import torch.nn.functional as F

from forge import clang, prims
from forge.ir import TensorProxy
from forge.prims.core import check_same_device, same, statically_true, torch_check
from forge.torchlang import random
from forge.torchlang.core import torchsymbol
from forge.torchlang.nn.softmax import safe_softmax, softmax


@torchsymbol(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    attn_mask: TensorProxy | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> TensorProxy:
    """Return softmax(query @ key.T * scale + mask) @ value, with dropout before the last product.

    Shapes: query (..., L, E), key (..., S, E), value (..., S, Ev); attn_mask broadcasts to (..., L, S); with enable_gqa
    key and value have a divisor of query's heads (dim -3). is_causal lets row i see columns up to i.
    Dtypes: attn_mask is bool (True takes part) or floating point (added); half precision is computed in float32.
    The result is 0 for a row that is fully masked.
    """
    _check_attention(query, key, value, attn_mask, dropout_p)
    key, value = _repeat_heads(query, key, value, enable_gqa)
    root = math.sqrt(abs(scale)) if scale is not None else None
    if root is None:
        width = query.shape[-1]
        is_static = isinstance(width, int)
        root = 1.0 / math.sqrt(math.sqrt(width or 1)) if is_static else (1.0 / torch.sym_sqrt(width)) ** 0.5
    left = clang.widen(query) * (-root if scale is not None and scale < 0 else root)
    scores = clang.matmul(left, clang.transpose(clang.widen(key) * root, -2, -1))
    weights = _weights(scores, attn_mask, is_causal)
    if dropout_p > 0:
        weights = random.dropout(weights, dropout_p, True)
    return clang.convert(clang.matmul(weights, clang.widen(value)), query.dtype)


def _check_attention(
    query: TensorProxy, key: TensorProxy, value: TensorProxy, attn_mask: TensorProxy | None, dropout_p: float
) -> None:
    op = "scaled_dot_product_attention"
    check_same_device(op, query, key, value)
    text = f"{query}, {key} and {value}"
    torch_check(
        query.dtype == key.dtype == value.dtype,
        lambda: f"{op}: Expected query, key, and value to have the same dtype, but got {text}",
    )
    torch_check(
        min(query.ndim, key.ndim, value.ndim) >= 2,
        lambda: f"{op}: Expected query, key, and value to all be at least 2 dimensional, but got {text}",
    )
    torch_check(
        same(query.shape[-1], key.shape[-1]) and same(key.shape[-2], value.shape[-2]),
        lambda: f"{op}: query and key must have one width, key and value one length, but got {text}",
    )
    torch_check(
        0 <= dropout_p <= 1, lambda: f"{op}: dropout probability has to be between 0 and 1, but got {dropout_p}"
    )
    torch_check(
        attn_mask is None or attn_mask.dtype in (torch.bool, torch.float32, query.dtype),
        lambda: (
            f"{op}: Expected attn_mask dtype to be bool or float or to match query dtype, but got {attn_mask} and "
            f"query {query}"
        ),
    )


def _repeat_heads(
    query: TensorProxy, key: TensorProxy, value: TensorProxy, enable_gqa: bool
) -> tuple[TensorProxy, TensorProxy]:
    """Return key and value with as many heads as query, each head repeated consecutively."""
    if not enable_gqa:
        return key, value
    result = []
    for tensor in (key, value):
        heads = tensor.shape[-3]
        torch_check(
            same(operator.mod(query.shape[-3], heads), 0),
            lambda tensor=tensor: (
                f"scaled_dot_product_attention: Number of heads in key and value must divide the "
                f"number of heads in query, but got {query} and {tensor}"
            ),
        )
        times = query.shape[-3] // heads
        if not statically_true(times == 1):
            apart = clang.expand(clang.unsqueeze(tensor, -3), (*tensor.shape[:-2], times, *tensor.shape[-2:]))
            tensor = clang.reshape(apart, (*tensor.shape[:-3], heads * times, *tensor.shape[-2:]))
        result.append(tensor)
    return result[0], result[1]


def _weights(scores: TensorProxy, attn_mask: TensorProxy | None, is_causal: bool) -> TensorProxy:
    """Return the softmax of the unmasked scores; 0 in fully masked rows."""
    if is_causal:
        rows = prims.iota(scores.shape[-2], 0, 1, torch.int64, scores.device)
        columns = prims.iota(scores.shape[-1], 0, 1, torch.int64, scores.device)
        scores = clang.where(clang.unsqueeze(rows, 1) >= columns, scores, -math.inf)
    if attn_mask is None:
        return softmax(scores, -1)
    if attn_mask.dtype == torch.bool:  # added, as torch does, so that the sum has the scores' layout
        attn_mask = clang.where(attn_mask, prims.full((), 0.0, scores.dtype, scores.device), -math.inf)
    masked = clang.add(scores, clang.convert(attn_mask, scores.dtype))
    torch_check(
        masked.ndim == scores.ndim and all(map(same, masked.shape, scores.shape)),
        lambda: f"scaled_dot_product_attention: attn_mask {attn_mask} does not broadcast to the scores {scores}",
    )
    return safe_softmax(masked, -1)
