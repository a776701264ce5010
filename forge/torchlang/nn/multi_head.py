"""The function F.multi_head_attention_forward: projections, attention over heads, and the output projection."""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from forge import clang, prims
from forge.ir import Dim, TensorProxy, check
from forge.prims.core import same, torch_check
from forge.torchlang import random
from forge.torchlang.core import torchsymbol
from forge.torchlang.linalg import baddbmm, bmm, linear
from forge.torchlang.nn.attention import scaled_dot_product_attention
from forge.torchlang.nn.softmax import softmax

OP = "multi_head_attention_forward"
Optional = TensorProxy | None
Three = tuple[TensorProxy, TensorProxy, TensorProxy]


@torchsymbol(F.multi_head_attention_forward)
def multi_head_attention_forward(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Optional,
    in_proj_bias: Optional,
    bias_k: Optional,
    bias_v: Optional,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: TensorProxy,
    out_proj_bias: Optional,
    training: bool = True,
    key_padding_mask: Optional = None,
    need_weights: bool = True,
    attn_mask: Optional = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Optional = None,
    k_proj_weight: Optional = None,
    v_proj_weight: Optional = None,
    static_k: Optional = None,
    static_v: Optional = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[TensorProxy, TensorProxy | None]:
    """Return (output, attention weights or None) of nn.MultiheadAttention.

    Shapes: query (L, N, E), key and value (S, N, …), all of them with or all without N; weights (N, L, S), with
    num_heads after N unless averaged.
    """
    check(
        static_k is None and static_v is None,
        lambda: f"{OP}: static_k and static_v are given, which forge/torchlang/nn/multi_head.py lacks",
        NotImplementedError,
    )
    _check_shapes(query, key, value, embed_dim_to_check, num_heads)
    same_kv, same_qk = key is value, query is key
    batched = query.ndim == 3
    if not batched:
        query, key, value = [clang.unsqueeze(each, 1) for each in (query, key, value)]
        key_padding_mask = None if key_padding_mask is None else clang.unsqueeze(key_padding_mask, 0)
    key_padding_mask = _as_additive(key_padding_mask, query.dtype)
    attn_mask, is_causal = _choose_mask(attn_mask, key_padding_mask, is_causal, need_weights, query.dtype)
    if use_separate_proj_weight:
        separate = (q_proj_weight, k_proj_weight, v_proj_weight)
        projected = _project(query, key, value, separate, _split(in_proj_bias, 3))
    else:
        assert in_proj_weight is not None, "use_separate_proj_weight is False but in_proj_weight is None"
        projected = _project_packed(query, key, value, in_proj_weight, in_proj_bias, same_qk, same_kv)
    q, k, v = _as_heads(projected, num_heads, (bias_k, bias_v), add_zero_attn)
    extra = int(bias_k is not None) + int(add_zero_attn)
    mask = _merge_masks(attn_mask, key_padding_mask, q, k, num_heads, extra)
    attend: Callable[..., tuple[TensorProxy, Optional]] = _attend_with_weights if need_weights else _attend
    dropout_p = dropout_p if training else 0.0
    context, weights = attend(q, k, v, mask, dropout_p, is_causal, num_heads)
    out = clang.reshape(linear(context, out_proj_weight, out_proj_bias), (*query.shape[:2], out_proj_weight.shape[0]))
    if weights is not None and average_attn_weights:
        weights = clang.mean(weights, 1)
    if not batched:
        out = prims.squeeze(out, (1,))
        weights = None if weights is None else prims.squeeze(weights, (0,))
    return out, weights


def _check_shapes(query: TensorProxy, key: TensorProxy, value: TensorProxy, width: int, num_heads: int) -> None:
    check(
        query.ndim in (2, 3) and key.ndim == query.ndim and value.ndim == query.ndim,
        lambda: (
            f"{OP}: query should be unbatched 2D or batched 3D tensor, and key and value as it, but they are "
            f"{query}, {key} and {value}"
        ),
        AssertionError,
    )
    check(
        same(query.shape[-1], width),
        lambda: f"{OP}: was expecting embedding dimension of {width}, but got {query}",
        AssertionError,
    )
    check(
        same(query.shape[-1] % num_heads, 0),
        lambda: f"{OP}: embed_dim {query.shape[-1]} not divisible by num_heads {num_heads}",
        AssertionError,
    )


# masks


def _as_additive(mask: Optional, dtype: torch.dtype) -> Optional:
    """Return an additive mask: -inf where a bool mask is True."""
    if mask is None or mask.is_floating_point():
        return mask
    check(
        mask.dtype == torch.bool,
        lambda: f"{OP}: only bool and floating types of masks are supported, but got {mask}",
        AssertionError,
    )
    return clang.where(mask, -math.inf, prims.full((), 0.0, dtype, mask.device))


def _choose_mask(
    attn_mask: Optional, key_padding_mask: Optional, is_causal: bool, need_weights: bool, dtype: torch.dtype
) -> tuple[Optional, bool]:
    torch_check(
        not is_causal or attn_mask is not None, lambda: f"{OP}: Need attn_mask if specifying the is_causal hint."
    )
    if is_causal and key_padding_mask is None and not need_weights:
        return None, True
    return _as_additive(attn_mask, dtype), is_causal and key_padding_mask is None


def _merge_masks(
    attn_mask: Optional, key_padding_mask: Optional, q: TensorProxy, k: TensorProxy, num_heads: int, extra: int
) -> Optional:
    """Return one mask of (1 or N * heads, L or 1, S), with 0 for the `extra` keys at the end."""
    rows, columns = q.shape[1], k.shape[1]
    if attn_mask is not None:
        expected = (rows, columns - extra) if attn_mask.ndim == 2 else (q.shape[0], rows, columns - extra)
        torch_check(
            attn_mask.ndim in (2, 3) and all(map(same, attn_mask.shape, expected)),
            lambda: f"{OP}: The shape of the attn_mask is {attn_mask}, but should be {expected}.",
        )
        attn_mask = clang.unsqueeze(attn_mask, 0) if attn_mask.ndim == 2 else attn_mask
        attn_mask = _pad_mask(attn_mask, extra)
    if key_padding_mask is None:
        return attn_mask
    padding = _pad_mask(key_padding_mask, extra)
    batch = padding.shape[0]
    padding = clang.expand(clang.reshape(padding, (batch, 1, 1, columns)), (batch, num_heads, 1, columns))
    padding = clang.reshape(padding, (batch * num_heads, 1, columns))
    return padding if attn_mask is None else clang.add(attn_mask, padding)


def _pad_mask(mask: TensorProxy, extra: int) -> TensorProxy:
    return prims.pad(mask, ((0, 0),) * (mask.ndim - 1) + ((0, extra),), 0) if extra else mask


# projections


def _split(x: Optional, count: int) -> Sequence[Optional]:
    """Return `count` equal parts of dim 0."""
    if x is None:
        return (None,) * count
    size = x.shape[0] // count
    return [clang.slice_in_dim(x, 0, i * size, (i + 1) * size) for i in range(count)]


def _project(
    query: TensorProxy, key: TensorProxy, value: TensorProxy, weights: Sequence, biases: Sequence[Optional]
) -> Three:
    inputs = (query, key, value)
    q, k, v = [linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]
    return q, k, v


def _project_packed(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    weight: TensorProxy,
    bias: Optional,
    same_qk: bool,
    same_kv: bool,
) -> Three:
    """Project the inputs, with a single product for inputs that are the same tensor, as torch does."""
    if same_kv and same_qk:
        q, k, v = _project_together(query, weight, bias, 3)
        return q, k, v
    weights, biases = _split(weight, 3), _split(bias, 3)
    if not same_kv:
        return _project(query, key, value, weights, biases)
    width = weight.shape[0] // 3
    rest = clang.slice_in_dim(weight, 0, width, 3 * width)
    k, v = _project_together(key, rest, None if bias is None else clang.slice_in_dim(bias, 0, width, 3 * width), 2)
    return linear(query, weights[0], biases[0]), k, v


def _project_together(x: TensorProxy, weight: TensorProxy, bias: Optional, count: int) -> list[TensorProxy]:
    out = linear(x, weight, bias)
    apart = clang.reshape(out, (*out.shape[:-1], count, out.shape[-1] // count))
    front = prims.contiguous(clang.permute(apart, (2, 0, 1, 3)))
    return [clang.reshape(clang.slice_in_dim(front, 0, i, i + 1), front.shape[1:]) for i in range(count)]


def _as_heads(projected: Three, num_heads: int, biases: tuple[Optional, Optional], add_zero: bool) -> Three:
    """Return (L, N, E) as (N * heads, L, E / heads), with the bias and the zeros appended to keys and values."""
    result: list[TensorProxy] = []
    for x, bias in zip(projected, (None, *biases), strict=True):
        if bias is not None:
            x = prims.cat([x, clang.expand(bias, (1, x.shape[1], x.shape[2]))], 0)
        length, batch, width = x.shape
        x = clang.reshape(x, (length, batch * num_heads, width // num_heads))
        x = clang.transpose(x, 0, 1)
        if add_zero and result:
            zeros = prims.full((x.shape[0], 1, x.shape[2]), 0, x.dtype, x.device)
            x = prims.cat([x, zeros], 1)
        result.append(x)
    return result[0], result[1], result[2]


# attention


def _attend_with_weights(
    q: TensorProxy, k: TensorProxy, v: TensorProxy, mask: Optional, dropout_p: float, is_causal: bool, num_heads: int
) -> tuple[TensorProxy, TensorProxy]:
    scaled = q * _root(q.shape[2])
    turned = clang.transpose(k, -2, -1)
    scores = bmm(scaled, turned) if mask is None else baddbmm(mask, scaled, turned)
    weights = softmax(scores, -1)
    if dropout_p > 0:
        weights = random.dropout(weights, dropout_p, True)
    heads, rows, columns = weights.shape
    context = clang.transpose(bmm(weights, v), 0, 1)
    return _flatten(context, num_heads), clang.reshape(weights, (heads // num_heads, num_heads, rows, columns))


def _root(width: Dim) -> float:
    return math.sqrt(1.0 / width) if isinstance(width, int) else 1.0 / torch.sym_sqrt(width)


def _flatten(context: TensorProxy, num_heads: int) -> TensorProxy:
    """Reshape (L, N * heads, E / heads) to (L * N, E)."""
    length, heads, width = context.shape
    return clang.reshape(context, (length * (heads // num_heads), num_heads * width))


def _attend(
    q: TensorProxy, k: TensorProxy, v: TensorProxy, mask: Optional, dropout_p: float, is_causal: bool, num_heads: int
) -> tuple[TensorProxy, None]:
    batch = q.shape[0] // num_heads
    if mask is not None:
        mask = (
            clang.unsqueeze(mask, 0)
            if prims.statically_true(mask.shape[0] == 1)
            else clang.reshape(mask, (batch, num_heads, *mask.shape[1:]))
        )
    q, k, v = [clang.reshape(x, (batch, num_heads, *x.shape[1:])) for x in (q, k, v)]
    context = scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal)
    context = clang.permute(context, (2, 0, 1, 3))
    length, _, _, width = context.shape
    return clang.reshape(context, (length * batch, num_heads * width)), None
