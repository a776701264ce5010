"""Triton kernels of attention for few queries. This module imports Triton.

Keys and values are split among programs, as in Flash-Decoding (Dao et al., 2023): one for all queries of a key's head
would leave most of the GPU idle. All heads of queries that share a head of keys are rows of one tile, so keys are read
once. Tiles that a mask hides whole are not read: a static cache is mostly empty.
"""

import math

import torch
import triton
import triton.language as tl

from forge.torch_internals.fake_tensors import FakeTensor

TILE = 64  # keys that a program reads at once
_ALONE = 256  # keys up to which one program has all
_CHUNK, _LONGEST_CHUNK = 128, 512  # keys of a program otherwise, at least, and at most up to 65,536
_LOOKED_AT = 4096  # elements of a mask at most that a program looks at before it reads keys
_PROGRAMS = 528  # four for each multiprocessor of an H100
_SPLITS = 128  # at most
_ASSERTING = {"debug": True, "sanitize_overflow": False}  # positions alone, not whether integers overflow
_LOG2_E = 1 / math.log(2)


@triton.jit
def _write(cache, new, position, start, end, count, length, s_cache, s_new, WIDTH: tl.constexpr, COUNT: tl.constexpr):
    """Write the rows of `new` whose positions are between start and end to the cache, whose programs each do so for
    their keys. cache, new: of one head."""
    i = tl.arange(0, COUNT)
    d = tl.arange(0, WIDTH)
    place = tl.load(position + i, mask=i < count, other=0).to(tl.int64)
    tl.device_assert((place >= 0) & (place < length), "index_copy_: index out of bounds")
    is_here = (i < count) & (place >= start) & (place < end)
    rows = tl.load(new + i[:, None] * s_new + d[None, :], mask=is_here[:, None])
    tl.store(cache + place[:, None] * s_cache + d[None, :], rows, mask=is_here[:, None])


@triton.jit
def _attend(
    out,  # (batch, heads, queries, value width), or where there are splits, one of each, of float32
    sums,  # (batch * heads * queries, splits, 2): of each split the maximum and the sum of exponentials
    query,
    key,
    value,
    mask,
    position,
    new_key,
    new_value,
    scale,  # times log2(e)
    queries,
    length,
    key_heads,
    group,  # heads of queries that share one of keys
    sq_b, sq_h, sq_l,
    sk_b, sk_h, sk_s,
    sv_b, sv_h, sv_s,
    sm_b, sm_h, sm_l, sm_s,
    so_b, so_h, so_l,
    snk_b, snk_h, snk_l,
    snv_b, snv_h, snv_l,
    MASK: tl.constexpr,  # 0: none, 1: of bools, 2: added
    SKIPS: tl.constexpr,
    WRITES: tl.constexpr,
    NEW: tl.constexpr,  # queries, to the next power of two
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,  # keys of a split
):  # fmt: skip
    program = tl.program_id(0)
    split = tl.program_id(1)
    batch = (program // key_heads).to(tl.int64)
    key_head = (program % key_heads).to(tl.int64)
    start = split * CHUNK
    end = tl.minimum(start + CHUNK, length)
    key += batch * sk_b + key_head * sk_h
    value += batch * sv_b + key_head * sv_h
    if WRITES:
        new_key += batch * snk_b + key_head * snk_h
        new_value += batch * snv_b + key_head * snv_h
        _write(key, new_key, position, start, end, queries, length, sk_s, snk_l, WIDTH, NEW)
        _write(value, new_value, position, start, end, queries, length, sv_s, snv_l, WIDTH, NEW)
        tl.debug_barrier()  # this program alone reads the rows that it wrote
    r = tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    s = tl.arange(0, TILE)
    head = key_head * group + r // queries
    i = r % queries
    is_row = r < group * queries
    q = tl.load(query + batch * sq_b + (head * sq_h + i * sq_l)[:, None] + d[None, :], mask=is_row[:, None], other=0.0)
    masks = mask + batch * sm_b + (head * sm_h + i * sm_l)[:, None]
    if SKIPS:  # the mask is the same for all heads
        of_queries = tl.arange(0, NEW)
        of_chunk = start + tl.arange(0, CHUNK)
        is_key = (of_queries < queries)[:, None] & (of_chunk < end)[None, :]
        mask_pointers = mask + batch * sm_b + (of_queries * sm_l)[:, None] + of_chunk[None, :] * sm_s
        if MASK == 1:
            is_shown = tl.load(mask_pointers, mask=is_key, other=0) != 0
        else:
            is_shown = tl.load(mask_pointers, mask=is_key, other=-float("inf")) > -float("inf")
        is_shown = is_shown & is_key
        start = tl.min(tl.min(tl.where(is_shown, of_chunk[None, :], end), 1), 0) // TILE * TILE
        end = tl.max(tl.max(tl.where(is_shown, of_chunk[None, :] + 1, 0), 1), 0)
    high = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in tl.range(start, end, TILE):
        at = first + s
        inside = at < end
        is_visible = is_row[:, None] & inside[None, :]
        k = tl.load(key + at.to(tl.int64)[None, :] * sk_s + d[:, None], mask=inside[None, :], other=0.0)
        scores = tl.dot(q, k) * scale
        if MASK == 1:
            is_visible = is_visible & (tl.load(masks + at[None, :] * sm_s, mask=is_visible, other=0) != 0)
        if MASK == 2:
            added = tl.load(masks + at[None, :] * sm_s, mask=is_visible, other=-float("inf")).to(tl.float32)
            scores += added * 1.4426950408889634  # log2(e)
        scores = tl.where(is_visible, scores, -float("inf"))
        new = tl.maximum(high, tl.max(scores, 1))
        shift = tl.where(new == -float("inf"), 0.0, new)
        weights = tl.exp2(scores - shift[:, None])
        before = tl.exp2(high - shift)
        v = tl.load(value + at.to(tl.int64)[:, None] * sv_s + d[None, :], mask=inside[:, None], other=0.0)
        total = total * before + tl.sum(weights, 1)
        acc = acc * before[:, None] + tl.dot(weights.to(v.dtype), v)
        high = new
    if SPLITS:
        row = (batch * key_heads * group + head) * queries + i
        place = row * tl.num_programs(1) + split
        tl.store(out + place[:, None] * WIDTH + d[None, :], acc, mask=is_row[:, None])
        tl.store(sums + place * 2, high, mask=is_row)
        tl.store(sums + place * 2 + 1, total, mask=is_row)
    else:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        place = batch * so_b + head * so_h + i * so_l
        tl.store(out + place[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=is_row[:, None])


@triton.jit
def _join(out, parts, sums, heads, queries, splits, so_b, so_h, so_l, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    """Join one row: sum its splits, each weighted by its share of the exponentials."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, SPLITS)
    d = tl.arange(0, WIDTH)
    is_split = j < splits
    place = row * splits + j
    high = tl.load(sums + place * 2, mask=is_split, other=-float("inf"))
    total = tl.load(sums + place * 2 + 1, mask=is_split, other=0.0)
    top = tl.max(high, 0)
    share = tl.exp2(high - tl.where(top == -float("inf"), 0.0, top))
    acc = tl.load(parts + place[:, None] * WIDTH + d[None, :], mask=is_split[:, None], other=0.0)
    total = tl.sum(total * share, 0)
    joined = tl.sum(acc * share[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    i = row % queries
    head = row // queries % heads
    batch = row // (queries * heads)
    tl.store(out + batch * so_b + head * so_h + i * so_l + d, joined.to(out.dtype.element_ty))


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    update: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return softmax(query @ key.T * scale + mask) @ value; a row that the mask hides whole is 0.

    Args:
        query: (batch, heads, queries, width), of bfloat16 or float16; the width is a power of two.
        key: (batch, a divisor of the heads, length, width); its last dim is contiguous, as that of value and query.
        value: Like key.
        mask: None, or bools (True takes part) or numbers (added), which broadcast to (batch, heads, queries, length).
        scale: The factor of the products.
        update: (position, new key, new value): written to key and value at these positions before. The position
            has the shape (queries,), and the others (batch, heads of key, queries, width).

    Returns:
        (batch, heads, queries, width), in memory in the order (batch, queries, heads, width).
    """
    batch, heads, queries, width = query.shape
    key_heads, length = key.shape[1], key.shape[2]
    out = query.new_empty((batch, queries, heads, width)).transpose(1, 2)
    if isinstance(query, FakeTensor):
        return out
    group = heads // key_heads
    chunk = triton.next_power_of_2(max(TILE, length))
    if length > _ALONE:
        of_programs = min(length * batch * key_heads // _PROGRAMS, _LONGEST_CHUNK)
        chunk = triton.next_power_of_2(max(of_programs, length // _SPLITS, _CHUNK))
    splits = max(1, triton.cdiv(length, chunk))
    parts, sums = out, out
    if splits > 1:
        parts = query.new_empty((batch * heads * queries, splits, width), dtype=torch.float32)
        sums = query.new_empty((batch * heads * queries, splits, 2), dtype=torch.float32)
    masks, mask_strides = query, [0, 0, 0, 0]
    if mask is not None:
        expanded = mask.expand(batch, heads, queries, length)
        masks, mask_strides = expanded, [*expanded.stride()]
        if mask.dtype == torch.bool:
            masks = expanded.view(torch.uint8)
    of_queries = triton.next_power_of_2(queries)
    position, new_key, new_value = (query, query, query) if update is None else update
    position = position if update is None else position.contiguous()
    with torch.cuda.device_of(query):
        _attend[(batch * key_heads, splits)](
            *(parts, sums, query, key, value, masks, position, new_key, new_value),
            *(scale * _LOG2_E, queries, length, key_heads, group),
            *(*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *mask_strides, *out.stride()[:3]),
            *(*new_key.stride()[:3], *new_value.stride()[:3]),
            MASK=0 if mask is None else 1 if mask.dtype == torch.bool else 2,
            SKIPS=length > _ALONE and mask_strides[1] == 0 and mask is not None and of_queries * chunk <= _LOOKED_AT,
            WRITES=update is not None,
            NEW=of_queries,
            SPLITS=splits > 1,
            ROWS=max(16, triton.next_power_of_2(group * queries)),
            WIDTH=width,
            TILE=TILE,
            CHUNK=chunk,
            num_warps=4,
            **_ASSERTING,
        )
        if splits > 1:
            _join[(batch * heads * queries,)](
                *(out, parts, sums, heads, queries, splits, *out.stride()[:3]),
                WIDTH=width,
                SPLITS=triton.next_power_of_2(splits),
                num_warps=4,
            )
    return out
