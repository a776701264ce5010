"""Functions of the Hub's packages for serving, in torch, under their names and with their arguments."""

import torch
import torch.nn.functional as F

# rmsnorm


def apply_rms_norm(input, weight, eps):
    return F.rms_norm(input, weight.shape, weight, eps)


# activation: out first


def silu_and_mul(out, x):
    gate, up = x.chunk(2, -1)
    torch.mul(F.silu(gate), up, out=out)


# liger-kernels


def swiglu(gate, up):
    return F.silu(gate).mul_(up)


# flash-attn2: queries (B, L, H, D), keys and values (B, S, G, D)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    hidden = None
    if causal:  # bottom-right, where torch's is_causal is top-left
        hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    return _attention(q, k, v, hidden, softmax_scale)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
):
    if block_table is not None:  # of pages (P, page, G, D): row b's keys are in the pages block_table[b], in order
        k_cache, v_cache = (pages[block_table.long()].flatten(1, 2) for pages in (k_cache, v_cache))
    seen = _seen(cache_seqlens, cache_leftpad, q.shape[1] if causal else 1, k_cache.shape[1])
    return _attention(q, k_cache, v_cache, seen, softmax_scale)


def _attention(q, k, v, mask, scale):
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True).transpose(1, 2)


def _seen(ends, starts, queries, keys):
    """Return which keys of a cache each query sees, (B, 1, queries, keys): the last query those from start to end, and
    each query before one fewer."""
    position = torch.arange(keys, device=ends.device)
    ends = ends[:, None, None, None] - torch.arange(queries - 1, -1, -1, device=ends.device)[:, None]
    return (position >= starts[:, None, None, None]) & (position < ends)


# A program has a mask where flash-attn has lengths: of a static cache, whose rows are padded on the left.


def attend_to_cache(q, k_cache, v_cache, mask, softmax_scale):
    starts, ends = _lengths(mask)
    lengths = {"cache_seqlens": ends, "cache_leftpad": starts}
    return flash_attn_with_kvcache(q, k_cache, v_cache, **lengths, softmax_scale=softmax_scale, causal=True)


def _lengths(mask):
    """Return the first key that the last query of each row sees, and the key behind the last one."""
    last = _visible(mask)[:, 0, -1].int()
    starts = last.argmax(-1)
    return starts, starts + last.sum(-1)


def _visible(mask):
    return mask if mask.dtype == torch.bool else mask == 0


def is_of_lengths(attn_mask):
    """Each row's last query sees neighbouring keys, and each query before one fewer."""
    seen = _seen(_lengths(attn_mask)[1], _lengths(attn_mask)[0], attn_mask.shape[2], attn_mask.shape[3])
    if attn_mask.dtype != torch.bool and not torch.isneginf(attn_mask[~seen]).all():
        return False
    return torch.equal(_visible(attn_mask), seen)


def masks_of_lengths(B, H, L, G, S, D, dtype, device):
    starts = torch.arange(B, device=device) % 2
    seen = _seen(torch.clamp(starts + L + 1, max=S), starts, L, S)
    query = torch.randn(B, H, L, D, dtype=dtype, device=device)
    key, value = torch.randn(2, B, G, S, D, dtype=dtype, device=device)
    return {"query": query, "key": key, "value": value, "attn_mask": seen}


# Attention to pages: an operator for models that have block tables. Queries (B, L, H, D), pages (P, page, G, D).


def paged_attention(query, key_pages, value_pages, block_table, lengths):
    key, value = (pages[block_table.long()].flatten(1, 2) for pages in (key_pages, value_pages))
    seen = _seen(lengths, torch.zeros_like(lengths), query.shape[1], key.shape[1])
    return _attention(query, key, value, seen, None)


def attend_to_pages(query, key_pages, value_pages, block_table, lengths):
    starts = torch.zeros_like(lengths)
    tables = {"cache_seqlens": lengths, "cache_leftpad": starts, "block_table": block_table}
    return flash_attn_with_kvcache(query, key_pages, value_pages, **tables, causal=True)


def pages(B, L, H, P, page, G, D, N, dtype, device):
    keys, values = torch.randn(2, P, page, G, D, dtype=dtype, device=device)
    table = torch.randint(max(P, 1), (B, N), device=device, dtype=torch.int32)
    lengths = torch.full((B,), max(N * page - 1, 0), device=device, dtype=torch.int32)
    query = torch.randn(B, L, H, D, dtype=dtype, device=device)
    return {"query": query, "key_pages": keys, "value_pages": values, "block_table": table, "lengths": lengths}


# quantized products


def w8_a16_gemm(input, weight, scale):
    return F.linear(input, weight.to(input.dtype)) * scale


def w4_a16_gemm(input, weight, scale, zero_point):
    elements = torch.stack((weight & 15, weight >> 4), -1).view(weight.shape[0], scale.shape[1], -1)
    values = (elements - zero_point[..., None]) * scale[..., None]
    return F.linear(input, values.flatten(1))
