"""RMSNorm and layer norm, alone or of a sum with a residual: a program keeps whole rows in registers, several where
they are short."""

import torch
import triton
import triton.language as tl
from torch.autograd.function import FunctionCtx, once_differentiable

from .launch import as_rows, check, check_like, check_tensor, contiguous_like, launch, needs_grad, processors

MAX_HIDDEN = 65536
FORWARD_TILE = 2048  # elements of a program, where a row has no more
BACKWARD_TILE = 16384  # bytes of them

Tensor = torch.Tensor


@triton.jit
def _centered(value, inside, hidden, CENTERED: tl.constexpr):
    """(the rows, less their means for a layer norm)."""
    if CENTERED:
        mean = tl.sum(value, 1) / hidden
        value = tl.where(inside, value - mean[:, None], 0.0)
    return value


@triton.jit(do_not_specialize=["rows"])
def _forward(
    out,
    total,
    x,
    residual,
    weight,
    bias,
    x_stride,
    residual_stride,
    hidden,
    rows,
    eps,
    CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < hidden)
    scale = tl.load(weight + column, mask=column < hidden, other=0.0).to(tl.float32)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * hidden + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    value = _centered(value, inside, hidden, CENTERED)
    rstd = tl.rsqrt(tl.sum(value * value, 1) / hidden + eps)[:, None]
    result = value * rstd * scale
    if bias is not None:
        result += tl.load(bias + column, mask=column < hidden, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    grad_x,
    sums,
    bias_sums,
    grad_output,
    grad_total,
    x,
    weight,
    grad_stride,
    grad_total_stride,
    x_stride,
    hidden,
    rows,
    eps,
    CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program takes many tiles, of which the next STAGES - 1 are loaded while it works on one."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    scale = tl.load(weight + column, mask=column < hidden, other=0.0).to(tl.float32)
    of_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    of_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(program * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS))[:, None]
        inside = (row < rows) & (column < hidden)
        g = tl.load(grad_output + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        value = _centered(value, inside, hidden, CENTERED)
        rstd = tl.rsqrt(tl.sum(value * value, 1) / hidden + eps)
        normal = value * rstd[:, None]
        scaled = g * scale
        grad = scaled - normal * (tl.sum(scaled * normal, 1) / hidden)[:, None]
        if CENTERED:
            grad -= (tl.sum(scaled, 1) / hidden)[:, None]
        grad *= rstd[:, None]
        if grad_total is not None:
            grad += tl.load(grad_total + row * grad_total_stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + row * hidden + column, grad.to(grad_x.dtype.element_ty), mask=inside)
        of_weight += g * normal
        if bias_sums is not None:
            of_bias += g
    tl.store(sums + program * hidden + column, tl.sum(of_weight, 0)[None, :], mask=column < hidden)
    if bias_sums is not None:
        tl.store(bias_sums + program * hidden + column, tl.sum(of_bias, 0)[None, :], mask=column < hidden)


class _Norm(torch.autograd.Function):
    """(total, out) of a norm of x + residual; (out,) of x alone."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float,
        centered: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        total, out = _run_forward(x, residual, weight, bias, eps, centered)
        ctx.save_for_backward(x if total is None else total, weight, bias)
        ctx.options = eps, centered
        return (out,) if total is None else (total, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        grad_total = grads[0] if len(grads) > 1 else None
        grad_x, *others = _run_backward(grads[-1], grad_total, x, weight, bias, *ctx.options)
        return grad_x, None if grad_total is None else grad_x, *others, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, rounded once.

    Shapes: x is [..., H], weight is [H], H <= 65536.
    Raises: RuntimeError when a shape, dtype or device does not fit.
    """
    return _run("rms_norm", x, None, weight, None, eps, centered=False)[0]


def rms_norm_backward(grad_output: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(grad_x, grad_weight) of rms_norm."""
    _check("rms_norm_backward", x, weight=weight)
    check_like("rms_norm_backward", "grad_output", grad_output, "x", x)
    return _run_backward(grad_output, None, x, weight, None, eps, centered=False)[:2]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + residual, rms_norm of it).

    Shapes: x and residual are [..., H], weight is [H], H <= 65536.
    Raises: RuntimeError when a shape, dtype or device does not fit.
    """
    return _run("add_rms_norm", x, residual, weight, None, eps, centered=False)


def add_rms_norm_backward(
    grad_total: Tensor, grad_output: Tensor, total: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(grad_x, grad_residual, grad_weight) of add_rms_norm, from its first result; the first two are one tensor."""
    _check_gradients("add_rms_norm_backward", grad_total, grad_output, total, weight=weight)
    grad_x, of_weight, _ = _run_backward(grad_output, grad_total, total, weight, None, eps, centered=False)
    return grad_x, grad_x, of_weight


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dim, rounded once.

    Shapes: x is [..., H], weight and bias are [H], H <= 65536.
    Raises: RuntimeError when a shape, dtype or device does not fit.
    """
    return _run("layer_norm", x, None, weight, bias, eps, centered=True)[0]


def layer_norm_backward(
    grad_output: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(grad_x, grad_weight, grad_bias) of layer_norm."""
    _check("layer_norm_backward", x, weight=weight, bias=bias)
    check_like("layer_norm_backward", "grad_output", grad_output, "x", x)
    return _run_backward(grad_output, None, x, weight, bias, eps, centered=True)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + residual, layer_norm of it).

    Shapes: x and residual are [..., H], weight and bias are [H], H <= 65536.
    Raises: RuntimeError when a shape, dtype or device does not fit.
    """
    return _run("add_layer_norm", x, residual, weight, bias, eps, centered=True)


def add_layer_norm_backward(
    grad_total: Tensor, grad_output: Tensor, total: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(grad_x, grad_residual, grad_weight, grad_bias) of add_layer_norm; the first two are one tensor."""
    _check_gradients("add_layer_norm_backward", grad_total, grad_output, total, weight=weight, bias=bias)
    grad_x, *others = _run_backward(grad_output, grad_total, total, weight, bias, eps, centered=True)
    return grad_x, grad_x, *others


def _check(op: str, x: Tensor, **vectors: Tensor) -> None:
    check_tensor(op, "x", x)
    check(x.ndim > 0, lambda: f"{op}: x must have at least 1 dim")
    for name, vector in vectors.items():
        check(
            vector.device == x.device and vector.dtype == x.dtype,
            lambda name=name: f"{op}: {name} must have the dtype and the device of x",
        )
        check(
            vector.shape == x.shape[-1:],
            lambda name=name, vector=vector: (
                f"{op}: {name} is {list(vector.shape)}, but must be {list(x.shape[-1:])}, the last dim of x"
            ),
        )
    check(
        x.shape[-1] <= MAX_HIDDEN,
        lambda: f"{op}: the last dim of x is {x.shape[-1]}, but at most {MAX_HIDDEN} is possible",
    )


def _check_gradients(op: str, grad_total: Tensor, grad_output: Tensor, total: Tensor, **vectors: Tensor) -> None:
    _check(op, total, **vectors)
    check_like(op, "grad_total", grad_total, "total", total)
    check_like(op, "grad_output", grad_output, "total", total)


def _run(
    op: str, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, *, centered: bool
) -> tuple[Tensor, ...]:
    _check(op, x, weight=weight, **({} if bias is None else {"bias": bias}))
    inputs = [each for each in (x, residual, weight, bias) if each is not None]
    if residual is not None:
        check_like(op, "residual", residual, "x", x)
    if needs_grad(*inputs):
        return _Norm.apply(x, residual, weight, bias, eps, centered)
    total, out = _run_forward(x, residual, weight, bias, eps, centered)
    return (out,) if total is None else (total, out)


def _run_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor | None, Tensor]:
    out = contiguous_like(x)
    total = None if residual is None else contiguous_like(x)
    if x.numel() == 0:
        return total, out
    x, weight = as_rows(x), weight.contiguous()
    residual = None if residual is None else as_rows(residual)
    rows, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    tile_rows = max(FORWARD_TILE // block, 1)
    launch(
        _forward,
        triton.cdiv(rows, tile_rows),
        out,
        total,
        x,
        residual,
        weight,
        None if bias is None else bias.contiguous(),
        x.stride(0),
        0 if residual is None else residual.stride(0),
        hidden,
        rows,
        eps,
        CENTERED=centered,
        ROWS=tile_rows,
        BLOCK=block,
        warps=min(tile_rows * block // 512, 16) or 1,
    )
    return total, out


def _run_backward(
    grad_output: Tensor,
    grad_total: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centered: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of x, weight and bias."""
    grad_x = contiguous_like(x)
    if x.numel() == 0:
        return grad_x, torch.zeros_like(weight), None if bias is None else torch.zeros_like(bias)
    x, grad_output = as_rows(x), as_rows(grad_output)
    grad_total = None if grad_total is None else as_rows(grad_total)
    rows, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    short = block * x.element_size() <= BACKWARD_TILE
    tile_rows = BACKWARD_TILE // (block * x.element_size()) if short else 1
    programs = min(triton.cdiv(rows, tile_rows), processors(x.device))
    sums = torch.empty((1 if bias is None else 2, programs, hidden), dtype=torch.float32, device=x.device)
    launch(
        _backward,
        programs,
        grad_x,
        sums[0],
        None if bias is None else sums[1],
        grad_output,
        grad_total,
        x,
        weight.contiguous(),
        grad_output.stride(0),
        0 if grad_total is None else grad_total.stride(0),
        x.stride(0),
        hidden,
        rows,
        eps,
        CENTERED=centered,
        ROWS=tile_rows,
        BLOCK=block,
        STAGES=3 if short else 1,
        warps=8 if block <= 8192 else 16,
    )
    of_weight, *of_bias = sums.sum(1).to(weight.dtype)
    return grad_x, of_weight, of_bias[0] if of_bias else None
