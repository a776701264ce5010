"""Triton kernels of linear layers with quantized weights, for one row and for a few. This module imports Triton.

One file, though long: kernels of one row and of a few share how they read and scale weights.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from forge.executors.cudaex.quantized import MOST_WEIGHTS
from forge.executors.torchex.quantized import is_of_words
from forge.torch_internals.fake_tensors import FakeTensor

COLUMNS = 128  # elements of a row of the weight in a step
_OUTPUTS, _WARPS, _STAGES = 16, 4, 4
_PROGRAMS, _STEPS = 1024, 4  # so many keep a GPU's memory busy; the fewest steps of one


@triton.jit
def _linear(
    out,
    x,
    weight,
    scale,
    zero_point,
    bias,
    rows,
    outputs,
    columns,
    groups,
    span,
    IS_PACKED: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute OUTPUTS columns of the result, for all rows: the part of their sums over `span` elements. A step
    multiplies elements of one group, and scales the product."""
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    m = tl.arange(0, ROWS)
    has_output, has_row = n < outputs, m < rows
    n_wide = n.to(tl.int64)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    first = tl.program_id(1) * span
    for start in range(first, min(first + span, columns), COLUMNS):
        group = start // GROUP
        s = tl.load(scale + n_wide * groups + group, mask=has_output, other=0.0).to(tl.float32)
        if IS_PACKED:
            z = tl.full([OUTPUTS], 8.0, tl.float32)
            if HAS_ZERO:
                z = tl.load(zero_point + n_wide * groups + group, mask=has_output, other=0.0).to(tl.float32)
            j = start // 2 + tl.arange(0, COLUMNS // 2)
            inside = j < columns // 2
            at = weight + n_wide[:, None] * (columns // 2) + j[None, :]
            bytes = tl.load(at, mask=has_output[:, None] & inside[None, :], other=0).to(tl.int32)
            low = ((bytes & 15).to(tl.float32) - z[:, None]).to(x.dtype.element_ty)
            high = ((bytes >> 4).to(tl.float32) - z[:, None]).to(x.dtype.element_ty)
            of_x = x + m[:, None] * columns + 2 * j[None, :]
            mask = has_row[:, None] & inside[None, :]
            even = tl.load(of_x, mask=mask, other=0.0)
            odd = tl.load(of_x + 1, mask=mask, other=0.0)
            product = tl.dot(even, tl.trans(low))
            product = tl.dot(odd, tl.trans(high), product)
        else:
            j = start + tl.arange(0, COLUMNS)
            inside = j < columns
            at = weight + n_wide[:, None] * columns + j[None, :]
            values = tl.load(at, mask=has_output[:, None] & inside[None, :], other=0.0).to(tl.float32)
            row = tl.load(x + m[:, None] * columns + j[None, :], mask=has_row[:, None] & inside[None, :], other=0.0)
            product = tl.dot(row, tl.trans(values.to(x.dtype.element_ty)))
        total += product * s[None, :]
    if HAS_BIAS:
        total += tl.load(bias + n, mask=has_output, other=0.0).to(tl.float32)[None, :]
    at = out + (tl.program_id(1) * rows + m[:, None]) * outputs + n[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=has_row[:, None] & has_output[None, :])


class _Tile(NamedTuple):
    """The outputs and words of a step of one program, its warps, and how many words are summed before they are
    scaled."""

    outputs: int
    words: int
    warps: int
    shared: int


# Of one row, by the bits of an element: for so many outputs or more, and for rows of more words than these. Each was
# the fastest of 22 on an H200, or nearly so, for weights of 1 to 250 MB.
_BY_OUTPUTS = {
    4: ((12288, _Tile(32, 128, 4, 16)), (6144, _Tile(16, 256, 4, 16))),
    8: ((12288, _Tile(16, 128, 4, 4)), (6144, _Tile(16, 256, 4, 16))),
}
_OF_WIDE_ROWS = {4: (512, _Tile(8, 512, 4, 4)), 8: (1024, _Tile(4, 1024, 4, 4))}
_OF_THE_REST = {4: _Tile(8, 256, 4, 16), 8: _Tile(8, 512, 4, 4)}
# Of 16 rows, likewise, among 14.
_STAGES_OF_ROWS, _LEAST_WORDS = 3, 16
_OF_FEW_ROWS = {
    4: ((6144, _Tile(64, 32, 4, 16)), (0, _Tile(32, 128, 4, 16))),
    8: ((6144, _Tile(64, 64, 4, 16)), (0, _Tile(32, 128, 4, 16))),
}


@triton.jit
def _part_of_row(
    out,
    x,
    words,
    scale,
    zero_point,
    bias,
    program,
    outputs,
    width,
    groups,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WORDS: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Compute OUTPUTS elements of the product of one row and a weight, from words of 32 bits that hold 32 / BITS
    elements each.

    Elements become floats without a conversion or a shift, since GPUs do few of these in a cycle: the bits of an
    unsigned element e, p bits above the lowest, are the denormal float e * 2^(p - 149), which is multiplied by
    x * 2^(85 - p), and the sum by 2^64. All is exact but the sum for 2^-62 < abs(x) < 2^42. GROUP: words of a group.
    SHARED: how many words, side by side and of one group, are added before they are scaled.
    """
    ELEMENTS: tl.constexpr = 32 // BITS
    LEVELS: tl.constexpr = 1 << BITS
    n = program * OUTPUTS + tl.arange(0, OUTPUTS)
    has_output = n < outputs
    n_wide = n.to(tl.int64)
    total = tl.zeros([OUTPUTS, WORDS // SHARED], tl.float32)
    for start in range(0, width, WORDS):
        j = start + tl.arange(0, WORDS)
        inside = j < width
        mask = has_output[:, None] & inside[None, :]
        at = words + n_wide[:, None] * width + j[None, :]
        bits = tl.load(at, mask=mask, other=0, eviction_policy="evict_first")
        if BITS == 8:
            bits = bits ^ -2139062144  # 0x80 in each byte: e is the signed element and 128
        upper = bits >> 16
        sums = tl.zeros([OUTPUTS, WORDS], tl.float32)
        of_row = tl.zeros([WORDS], tl.float32)
        for i in tl.static_range(ELEMENTS):
            element = tl.load(x + ELEMENTS * j + i, mask=inside, other=0.0).to(tl.float32)
            if BITS * (i + 1) <= 23:  # bits of the mantissa
                denormal = bits & ((LEVELS - 1) << (BITS * i))
                factor = element * 2.0 ** (85 - BITS * i)
            else:
                denormal = upper & ((LEVELS - 1) << (BITS * i - 16))
                factor = element * 2.0 ** (85 + 16 - BITS * i)
            sums += denormal.to(tl.float32, bitcast=True) * factor[None, :]
            of_row += element
        sums = tl.sum(tl.reshape(sums, [OUTPUTS, WORDS // SHARED, SHARED]), 2) * 2.0**64
        of_row = tl.sum(tl.reshape(of_row, [WORDS // SHARED, SHARED]), 1)
        if IS_GROUPED:
            j = start + SHARED * tl.arange(0, WORDS // SHARED)
            mask = has_output[:, None] & (j < width)[None, :]
            of_group = n_wide[:, None] * groups + (j // GROUP)[None, :]
            s = tl.load(scale + of_group, mask=mask, other=0.0).to(tl.float32)
            if HAS_ZERO:
                zero = tl.load(zero_point + of_group, mask=mask, other=0.0).to(tl.float32)
                total += s * (sums - zero * of_row[None, :])
            else:
                total += s * (sums - (LEVELS // 2 * of_row)[None, :])
        elif HAS_ZERO:
            zero = tl.load(zero_point + n, mask=has_output, other=0.0).to(tl.float32)
            total += sums - zero[:, None] * of_row[None, :]
        else:
            total += sums - (LEVELS // 2 * of_row)[None, :]
    result = tl.sum(total, 1)
    if not IS_GROUPED:
        result = result * tl.load(scale + n, mask=has_output, other=0.0).to(tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + n, mask=has_output, other=0.0).to(tl.float32)
    tl.store(out + n, result.to(out.dtype.element_ty), mask=has_output)


@triton.jit
def _element(bits, upper, scale, shift, i: tl.constexpr, BITS: tl.constexpr):
    """Return element i of words, as it lies there and unsigned, times a scale, plus a shift, in float32."""
    MASK: tl.constexpr = (1 << BITS) - 1
    if BITS * (i + 1) <= 23:  # as in _part_of_row
        denormal = bits & (MASK << (BITS * i))
        factor = scale * 2.0 ** (23 - BITS * i)
    else:
        denormal = upper & (MASK << (BITS * i - 16))
        factor = scale * 2.0 ** (23 + 16 - BITS * i)
    return denormal.to(tl.float32, bitcast=True) * 2.0**126 * factor + shift


@triton.jit
def _per_word(values, OUTPUTS: tl.constexpr, WORDS: tl.constexpr, SHARED: tl.constexpr):
    """Return values of (OUTPUTS, WORDS / SHARED) for each word."""
    repeated = tl.broadcast_to(values[:, :, None], [OUTPUTS, WORDS // SHARED, SHARED])
    return tl.reshape(repeated, [OUTPUTS, WORDS])


@triton.jit
def _part_of_rows(
    out,
    x,
    words,
    scale,
    zero_point,
    bias,
    program,
    rows,
    outputs,
    width,
    groups,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WORDS: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Compute OUTPUTS columns of the product of a few rows and a weight: the values of WORDS words, rounded as in
    eager, are multiplied by tensor cores. The arguments are those of _part_of_row."""
    ELEMENTS: tl.constexpr = 32 // BITS
    LEVELS: tl.constexpr = 1 << BITS
    dtype = x.dtype.element_ty
    n = program * OUTPUTS + tl.arange(0, OUTPUTS)
    m = tl.arange(0, ROWS)
    has_output, has_row = n < outputs, m < rows
    n_wide = n.to(tl.int64)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, width, WORDS):
        j = start + tl.arange(0, WORDS)
        mask = has_output[:, None] & (j < width)[None, :]
        bits = tl.load(words + n_wide[:, None] * width + j[None, :], mask=mask, other=0, eviction_policy="evict_first")
        if BITS == 8:
            bits = bits ^ -2139062144  # 0x80 in each byte: e is the signed element and 128
        upper = bits >> 16
        if IS_GROUPED:
            j = start + SHARED * tl.arange(0, WORDS // SHARED)
            mask = has_output[:, None] & (j < width)[None, :]
            of_group = n_wide[:, None] * groups + (j // GROUP)[None, :]
            of_groups = tl.load(scale + of_group, mask=mask, other=0.0).to(tl.float32)
            s = _per_word(of_groups, OUTPUTS, WORDS, SHARED)
            if HAS_ZERO:
                zero = tl.load(zero_point + of_group, mask=mask, other=0.0).to(tl.float32)
                shift = _per_word(-zero * of_groups, OUTPUTS, WORDS, SHARED)
            else:
                shift = s * -(LEVELS // 2)
        else:  # the sum is scaled
            s = tl.full([OUTPUTS, 1], 1.0, tl.float32)
            shift = s * -(LEVELS // 2)
            if HAS_ZERO:
                shift = -tl.load(zero_point + n, mask=has_output, other=0.0).to(tl.float32)[:, None]
        e0 = _element(bits, upper, s, shift, 0, BITS).to(dtype)
        e1 = _element(bits, upper, s, shift, 1, BITS).to(dtype)
        e2 = _element(bits, upper, s, shift, 2, BITS).to(dtype)
        e3 = _element(bits, upper, s, shift, 3, BITS).to(dtype)
        if BITS == 8:
            values = tl.join(tl.join(e0, e2), tl.join(e1, e3))
        else:
            e4 = _element(bits, upper, s, shift, 4, BITS).to(dtype)
            e5 = _element(bits, upper, s, shift, 5, BITS).to(dtype)
            e6 = _element(bits, upper, s, shift, 6, BITS).to(dtype)
            e7 = _element(bits, upper, s, shift, 7, BITS).to(dtype)
            even = tl.join(tl.join(e0, e4), tl.join(e2, e6))
            values = tl.join(even, tl.join(tl.join(e1, e5), tl.join(e3, e7)))
        k = start * ELEMENTS + tl.arange(0, WORDS * ELEMENTS)
        of_x = x + m[:, None] * (width * ELEMENTS) + k[None, :]
        row = tl.load(of_x, mask=has_row[:, None] & (k < width * ELEMENTS)[None, :], other=0.0)
        total = tl.dot(row, tl.trans(tl.reshape(values, [OUTPUTS, WORDS * ELEMENTS])), total)
    if not IS_GROUPED:
        total = total * tl.load(scale + n, mask=has_output, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + n, mask=has_output, other=0.0).to(tl.float32)[None, :]
    at = out + m[:, None] * outputs + n[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=has_row[:, None] & has_output[None, :])


@triton.jit
def _part(
    out,
    x,
    words,
    scale,
    zero_point,
    bias,
    program,
    rows,
    outputs,
    width,
    groups,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WORDS: tl.constexpr,
    SHARED: tl.constexpr,
):
    if ROWS == 1:
        _part_of_row(out, x, words, scale, zero_point, bias, program, outputs, width, groups,
                     BITS, GROUP, IS_GROUPED, HAS_ZERO, HAS_BIAS, OUTPUTS, WORDS, SHARED)  # fmt: skip
    else:
        _part_of_rows(out, x, words, scale, zero_point, bias, program, rows, outputs, width, groups,
                      BITS, GROUP, IS_GROUPED, HAS_ZERO, HAS_BIAS, ROWS, OUTPUTS, WORDS, SHARED)  # fmt: skip


@triton.jit
def _rows(
    x,
    rows,
    width,
    groups,
    out,
    words,
    scale,
    zero_point,
    bias,
    outputs,
    out_1,
    words_1,
    scale_1,
    zero_point_1,
    bias_1,
    outputs_1,
    out_2,
    words_2,
    scale_2,
    zero_point_2,
    bias_2,
    outputs_2,
    WEIGHTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_BIAS_1: tl.constexpr,
    HAS_BIAS_2: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WORDS: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Compute OUTPUTS columns of the product of the rows and one of WEIGHTS weights of one form."""
    program = tl.program_id(0)
    first = tl.cdiv(outputs, OUTPUTS)
    second = first + tl.cdiv(outputs_1, OUTPUTS) if WEIGHTS > 1 else first
    if WEIGHTS == 1 or program < first:
        _part(out, x, words, scale, zero_point, bias, program, rows, outputs, width, groups,
              BITS, GROUP, IS_GROUPED, HAS_ZERO, HAS_BIAS, ROWS, OUTPUTS, WORDS, SHARED)  # fmt: skip
    elif WEIGHTS == 2 or program < second:
        _part(out_1, x, words_1, scale_1, zero_point_1, bias_1, program - first, rows, outputs_1, width, groups,
              BITS, GROUP, IS_GROUPED, HAS_ZERO, HAS_BIAS_1, ROWS, OUTPUTS, WORDS, SHARED)  # fmt: skip
    else:
        _part(out_2, x, words_2, scale_2, zero_point_2, bias_2, program - second, rows, outputs_2, width, groups,
              BITS, GROUP, IS_GROUPED, HAS_ZERO, HAS_BIAS_2, ROWS, OUTPUTS, WORDS, SHARED)  # fmt: skip


class _Weight(NamedTuple):
    """A quantized weight as the kernels read it: another tensor in the place of a zero point or bias that is not there,
    and the number of groups of a row."""

    stored: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor
    bias: torch.Tensor
    groups: int
    has_zero: bool
    has_bias: bool


def _weight(
    stored: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, bias: torch.Tensor | None
) -> _Weight:
    scale = scale.contiguous()
    return _Weight(
        stored.contiguous(),
        scale,
        scale if zero_point is None else zero_point.contiguous(),
        scale if bias is None else bias.contiguous(),
        1 if scale.ndim == 1 else scale.shape[1],
        zero_point is not None,
        bias is not None,
    )


def _tile(rows: int, bits: int, outputs: int, width: int, group: int | None, memory: int) -> _Tile:
    """Return the tile for weights with rows of `width` words, whose groups have `group` each. memory: the bytes of
    shared memory that a program may have."""
    if rows > 1:
        tile = next(each for least, each in _OF_FEW_ROWS[bits] if outputs >= least)
        while _shared_bytes(tile, rows, bits) > memory and tile.words > _LEAST_WORDS:
            tile = tile._replace(words=tile.words // 2)
    else:
        wide, of_wide_rows = _OF_WIDE_ROWS[bits]
        rest = of_wide_rows if width > wide else _OF_THE_REST[bits]
        tile = next((each for least, each in _BY_OUTPUTS[bits] if outputs >= least), rest)
    return tile if group is None else tile._replace(shared=min(tile.shared, group))


def _shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have; without a limit where Triton's interpreter runs it."""
    properties: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return sys.maxsize if properties is None else properties.shared_memory_per_block_optin


def _shared_bytes(tile: _Tile, rows: int, bits: int) -> int:
    """Return an upper bound of the shared memory of _part_of_rows: rows and words of each stage, and values."""
    values = tile.words * 32 // bits
    return _STAGES_OF_ROWS * (2 * rows * values + 4 * tile.outputs * tile.words) + 2 * tile.outputs * values


def _start(outs: Sequence[torch.Tensor], x: torch.Tensor, weights: Sequence[_Weight]) -> None:
    """Write the products of x, (rows, in), and up to MOST_WEIGHTS weights of integers, of one form."""
    first = weights[0]
    bits = 4 if first.stored.dtype == torch.uint8 else 8
    words = [each.stored.view(torch.int32) for each in weights]
    sizes, width = [len(each) for each in words], words[0].shape[1]
    group = width // first.groups if first.groups > 1 else None
    rows = 1 if len(x) == 1 else max(16, triton.next_power_of_2(len(x)))
    tile = _tile(rows, bits, sum(sizes), width, group, _shared_memory(x.device))
    per_weight = [
        (out, stored, each.scale, each.zero_point, each.bias, size)
        for out, stored, each, size in zip(outs, words, weights, sizes, strict=True)
    ]
    absent = MOST_WEIGHTS - len(weights)
    per_weight += [per_weight[0]] * absent
    has_bias = [each.has_bias for each in weights] + [False] * absent
    _rows[(sum(triton.cdiv(size, tile.outputs) for size in sizes),)](
        x,
        len(x),
        width,
        first.groups,
        *(operand for operands in per_weight for operand in operands),
        len(weights),
        *has_bias,
        BITS=bits,
        GROUP=1 if group is None else group,
        IS_GROUPED=group is not None,
        HAS_ZERO=first.has_zero,
        ROWS=rows,
        OUTPUTS=tile.outputs,
        WORDS=tile.words,
        SHARED=tile.shared,
        num_warps=tile.warps,
        num_stages=_STAGES_OF_ROWS,
    )


def linears(
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    zero_points: Sequence[torch.Tensor | None],
    biases: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor, ...]:
    """Return the products of a few rows with several quantized weights of one form, which one kernel computes.

    Args:
        input: (..., in), of bfloat16 or float16.
        weights: Up to MOST_WEIGHTS, each as linear's; integers in rows of whole words.
        scales: One each, as linear's, with the groups of the first.
        zero_points: One each, or None for all.
        biases: One or None each.

    Returns:
        (..., out) of input's dtype, for each weight.
    """
    outs = tuple(input.new_empty((*input.shape[:-1], each.shape[0])) for each in weights)
    if not isinstance(outs[0], FakeTensor):
        x = input.reshape(-1, input.shape[-1]).contiguous()
        _start(outs, x, [*map(_weight, weights, scales, zero_points, biases)])
    return outs


def linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return the product of a few rows with a quantized weight, which is read once, as it is stored.

    Args:
        input: (..., in), of bfloat16 or float16.
        weight: (out, in) of 8 bits an element, or (out, in / 2) of uint8, which holds two.
        scale: (out,) or (out, groups). A group has as many elements as COLUMNS, or as divide them or it divides.
        zero_point: As scale, of a weight of 4 bits; None: 8.
        bias: (out,), or None.

    Returns:
        (..., out), of input's dtype.
    """
    x = input.reshape(-1, input.shape[-1]).contiguous()
    rows, outputs = len(x), weight.shape[0]
    out = x.new_empty((rows, outputs))
    if isinstance(out, FakeTensor):
        return out.view(*input.shape[:-1], outputs)
    quantized = _weight(weight, scale, zero_point, bias)
    if is_of_words(weight):
        _start([out], x, [quantized])
    else:
        out = _product_of_rows(out, x, quantized)
    return out.view(*input.shape[:-1], outputs)


def _product_of_rows(out: torch.Tensor, x: torch.Tensor, weight: _Weight) -> torch.Tensor:
    """Return the product of a few rows, written to `out` or summed from parts."""
    (rows, columns), outputs, groups = x.shape, len(weight.stored), weight.groups
    group = max(columns // groups, 1)
    step = COLUMNS if groups == 1 else min(COLUMNS, group)
    programs, steps = triton.cdiv(outputs, _OUTPUTS), triton.cdiv(columns, step)
    parts = max(1, min(_PROGRAMS // programs, steps // _STEPS))
    span = triton.cdiv(steps, parts) * step
    parts = triton.cdiv(columns, span)
    sums = out if parts == 1 else x.new_empty((parts, rows, outputs), dtype=torch.float32)
    _linear[(programs, parts)](
        sums,
        x,
        *weight[:4],
        rows,
        outputs,
        columns,
        groups,
        span,
        IS_PACKED=weight.stored.dtype == torch.uint8,
        HAS_ZERO=weight.has_zero,
        HAS_BIAS=weight.has_bias and parts == 1,
        ROWS=max(16, triton.next_power_of_2(rows)),
        OUTPUTS=_OUTPUTS,
        COLUMNS=step,
        GROUP=group if groups > 1 else triton.next_power_of_2(columns),
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    if parts == 1:
        return out
    total = sums.sum(0)
    return (total + weight.bias if weight.has_bias else total).to(x.dtype)
