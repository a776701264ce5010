"""Triton kernels of linear layers with quantized weights, for one row and for a few. This module imports Triton."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

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


# of one row: outputs and words of a program, and its warps. The first is for so many outputs that these programs fill a
# GPU; on an H100 each was the fastest of ten for weights of 1 to 250 MB, or nearly so.
_MANY_OUTPUTS, _OF_MANY = 8192, (16, 128, 4)
_OF_FEW = {4: (8, 256, 4), 8: (4, 512, 8)}


@triton.jit
def _row(
    out,
    x,
    words,
    scale,
    zero_point,
    bias,
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
):
    """Compute OUTPUTS elements of the result of one row, from words of 32 bits that hold 32 / BITS elements each.

    Elements become floats without a conversion, which GPUs do at a quarter of the speed of sums: the bits of an
    unsigned element e at the top of a mantissa make the float 1 + e / LEVELS. GROUP: words of a group.
    """
    ELEMENTS: tl.constexpr = 32 // BITS
    LEVELS: tl.constexpr = 1 << BITS
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    has_output = n < outputs
    n_wide = n.to(tl.int64)
    total = tl.zeros([OUTPUTS, WORDS], tl.float32)
    for start in range(0, width, WORDS):
        j = start + tl.arange(0, WORDS)
        inside = j < width
        mask = has_output[:, None] & inside[None, :]
        at = words + n_wide[:, None] * width + j[None, :]
        bits = tl.load(at, mask=mask, other=0, eviction_policy="evict_first")
        if BITS == 8:
            bits = bits ^ -2139062144  # 0x80 in each byte: e is the signed element and 128
        sums = tl.zeros([OUTPUTS, WORDS], tl.float32)
        of_row = tl.zeros([WORDS], tl.float32)
        for i in tl.static_range(ELEMENTS):
            element = tl.load(x + ELEMENTS * j + i, mask=inside, other=0.0).to(tl.float32)
            mantissa = (((bits >> (BITS * i)) & (LEVELS - 1)) << (23 - BITS)) | 0x3F800000
            sums += mantissa.to(tl.float32, bitcast=True) * element[None, :]
            of_row += element
        shift = tl.full([OUTPUTS, WORDS], LEVELS + LEVELS // 2, tl.float32)
        if IS_GROUPED:
            of_group = n_wide[:, None] * groups + (j // GROUP)[None, :]
            s = tl.load(scale + of_group, mask=mask, other=0.0).to(tl.float32)
            if HAS_ZERO:
                shift = LEVELS + tl.load(zero_point + of_group, mask=mask, other=0.0).to(tl.float32)
            total += s * (LEVELS * sums - shift * of_row[None, :])
        else:
            if HAS_ZERO:
                z = tl.load(zero_point + n, mask=has_output, other=0.0).to(tl.float32)
                shift = tl.zeros([OUTPUTS, WORDS], tl.float32) + (LEVELS + z)[:, None]
            total += LEVELS * sums - shift * of_row[None, :]
    result = tl.sum(total, 1)
    if not IS_GROUPED:
        result = result * tl.load(scale + n, mask=has_output, other=0.0).to(tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + n, mask=has_output, other=0.0).to(tl.float32)
    tl.store(out + n, result.to(out.dtype.element_ty), mask=has_output)


class _Operands(NamedTuple):
    """The operands of both kernels beside the row and the weight: scale, zero point and bias, another tensor in the
    place of one that is not there; groups of a row of the weight."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    groups: int
    has_zero: bool
    has_bias: bool


def _start_row(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, operands: _Operands) -> None:
    """Write the product of a row."""
    bits = 4 if weight.dtype == torch.uint8 else 8
    words = weight.view(torch.int32)
    outputs, width = words.shape
    tile, step, warps = _OF_MANY if outputs >= _MANY_OUTPUTS else _OF_FEW[bits]
    _row[(triton.cdiv(outputs, tile),)](
        out,
        x,
        words,
        *operands.tensors,
        outputs,
        width,
        operands.groups,
        BITS=bits,
        GROUP=max(width // operands.groups, 1),
        IS_GROUPED=operands.groups > 1,
        HAS_ZERO=operands.has_zero,
        HAS_BIAS=operands.has_bias,
        OUTPUTS=tile,
        WORDS=step,
        num_warps=warps,
    )


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
    weight, groups = weight.contiguous(), 1 if scale.ndim == 1 else scale.shape[1]
    tensors = (
        scale.contiguous(),
        scale if zero_point is None else zero_point.contiguous(),
        x if bias is None else bias.contiguous(),
    )
    operands = _Operands(tensors, groups, zero_point is not None, bias is not None)
    if rows == 1 and is_of_words(weight):
        _start_row(out, x, weight, operands)
    else:
        out = _product_of_rows(out, x, weight, operands)
    return out.view(*input.shape[:-1], outputs)


def _product_of_rows(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, operands: _Operands) -> torch.Tensor:
    """Return the product of a few rows, written to `out` or summed from parts."""
    (rows, columns), outputs, groups = x.shape, weight.shape[0], operands.groups
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
        weight,
        *operands.tensors,
        rows,
        outputs,
        columns,
        groups,
        span,
        IS_PACKED=weight.dtype == torch.uint8,
        HAS_ZERO=operands.has_zero,
        HAS_BIAS=operands.has_bias and parts == 1,
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
    return (total + operands.tensors[2] if operands.has_bias else total).to(x.dtype)
