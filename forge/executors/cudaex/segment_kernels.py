"""A Triton kernel of sums of segments. This module imports Triton.

A segment's sum is a product with a matrix of zeros and ones, which a program makes of the indices in registers, for all
rows that share them: a GPU's atomics add one element at a time, and round each sum.
"""

import torch
import triton
import triton.language as tl

_ROWS, _SEGMENTS, _TILE = 64, 128, 64  # of a program, and the elements that it reads at once


@triton.jit
def _sum_segments(
    out,  # (rows, vectors, segments), contiguous
    g,  # (rows, vectors, length)
    index,  # (vectors, length), contiguous
    rows,
    vectors,
    length,
    segments,
    s_row,
    s_vector,
    ROWS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TILE: tl.constexpr,
):
    vector = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    segment = tl.program_id(2) * SEGMENTS + tl.arange(0, SEGMENTS)
    sums = tl.zeros((ROWS, SEGMENTS), tl.float32)
    special = tl.zeros((ROWS, SEGMENTS), tl.float32)
    for start in range(0, length, TILE):
        element = start + tl.arange(0, TILE)
        place = tl.load(index + vector * length + element, mask=element < length, other=-1)
        is_in = place[:, None] == segment[None, :]
        if tl.sum(tl.sum(is_in.to(tl.int32), 1), 0) > 0:
            at = row.to(tl.int64)[:, None] * s_row + vector * s_vector + element[None, :]
            x = tl.load(g + at, mask=(row < rows)[:, None] & (element < length)[None, :], other=0.0)
            ones = is_in.to(x.dtype)
            is_special = (x - x) != 0  # of infinities and NaN, whose products with 0 are NaN
            if tl.sum(tl.sum(is_special.to(tl.int32), 1), 0) > 0:
                nan = tl.dot((x != x).to(x.dtype), ones)
                above = tl.dot((x == float("inf")).to(x.dtype), ones)
                below = tl.dot((x == float("-inf")).to(x.dtype), ones)
                special += tl.where(above > 0, float("inf"), 0.0) + tl.where(below > 0, float("-inf"), 0.0)
                special += tl.where(nan > 0, float("nan"), 0.0)
                x = tl.where(is_special, 0.0, x).to(x.dtype)
            sums = tl.dot(x, ones, sums)
    at = (row.to(tl.int64)[:, None] * vectors + vector) * segments + segment[None, :]
    tl.store(out + at, sums + special, mask=(row < rows)[:, None] & (segment < segments)[None, :])


def sum_segments(g: torch.Tensor, index: torch.Tensor, segments: int) -> torch.Tensor:
    """Return the sums of the elements of g's vectors, the last dim, that have one index, for each of `segments`.

    Shapes: index has the last dims of g, for whose others it is the same; out is g's with `segments` as the last one.
    Dtypes: g is bfloat16 or float16, and out has its dtype; sums are of float32.
    """
    length = index.shape[-1]
    vectors = index.numel() // max(length, 1)
    rows = g.numel() // max(index.numel(), 1)
    out = g.new_empty((*g.shape[:-1], segments))
    if out.numel() == 0 or g.numel() == 0:
        return out.zero_()
    flat = g.reshape(rows, vectors, length)
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    grid = vectors, triton.cdiv(rows, _ROWS), triton.cdiv(segments, _SEGMENTS)
    _sum_segments[grid](
        out,
        flat,
        index.contiguous(),
        rows,
        vectors,
        length,
        segments,
        flat.stride(0),
        flat.stride(1),
        ROWS=_ROWS,
        SEGMENTS=_SEGMENTS,
        TILE=_TILE,
    )
    return out
