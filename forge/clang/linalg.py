"""The matrix products with torch's broadcasting, sums of products, and norms."""

import math

import torch

from forge import prims
from forge.clang.core import broadcast_shapes, clangop, convert, expand_to
from forge.clang.elementwise import abs, conj, isnan, sgn, sqrt, squared_size, where
from forge.clang.reduction import keep_dims
from forge.clang.shape import reshape, unsqueeze
from forge.ir import TensorProxy, end_grad, get_grad, needs_grad, outside_regions, put_grad, register_grad
from forge.prims.core import torch_check


@clangop()
def matmul(a: TensorProxy, b: TensorProxy) -> TensorProxy:
    """Return torch.matmul: vectors get a dim of length 1, batch dims broadcast."""
    torch_check(
        a.ndim > 0 and b.ndim > 0,
        lambda: f"matmul: both arguments to matmul need to be at least 1D, but they are {a} and {b}",
    )
    left = unsqueeze(a, 0) if a.ndim == 1 else a
    right = unsqueeze(b, 1) if b.ndim == 1 else b
    if right.ndim == 2 and left.ndim > 2:  # one matrix product instead of a batch of them
        flat = prims.matmul(as_rows(left), right)
        out = reshape(flat, (*left.shape[:-1], right.shape[-1]))
    else:
        if left.ndim > 2 or right.ndim > 2:
            batch = broadcast_shapes("matmul", left.shape[:-2], right.shape[:-2])
            left, right = expand_to(left, (*batch, *left.shape[-2:])), expand_to(right, (*batch, *right.shape[-2:]))
        out = prims.matmul(left, right)
    if a.ndim == 1:
        out = reshape(out, (*out.shape[:-2], out.shape[-1]))
    return reshape(out, out.shape[:-1]) if b.ndim == 1 else out


def as_rows(x: TensorProxy) -> TensorProxy:
    """Return x as a matrix, its last dim the columns."""
    return reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


@register_grad(matmul)
def _matmul_grad(a: TensorProxy, b: TensorProxy) -> TensorProxy:
    out = matmul(a, b)
    g = get_grad(out)
    if a.ndim == 1 and b.ndim == 1:
        put_grad(a, g * conj(b))
        put_grad(b, g * conj(a))
        return out
    left, right = a, b
    if a.ndim == 1:
        left, g = unsqueeze(a, 0), unsqueeze(g, -2)
    if b.ndim == 1:
        right, g = unsqueeze(b, 1), unsqueeze(g, -1)
    if g.ndim > 3 and needs_grad(a) and needs_grad(b):  # both products would copy it
        g = prims.contiguous(g)
    if needs_grad(a):
        put_grad(a, _drop(matmul(g, conj(right).transpose(-2, -1)), a, 0))
    if needs_grad(b):
        if right.ndim == 2 and left.ndim > 2:
            put_grad(b, _drop(matmul(as_rows(conj(left)).transpose(0, 1), as_rows(g)), b, 1))
        else:
            put_grad(b, _drop(matmul(conj(left).transpose(-2, -1), g), b, 1))
    return out


def _drop(gradient: TensorProxy, vector: TensorProxy, matrix_dim: int) -> TensorProxy:
    """Return the gradient of a vector that was expanded to a matrix: batch dims are summed, the dim of length 1 is
    dropped."""
    if vector.ndim > 1:
        return gradient
    dims = tuple(range(gradient.ndim - 2))
    gradient = gradient.sum(dims) if dims else gradient
    return reshape(gradient, vector.shape)


@clangop()
def vector_norm(x: TensorProxy, ord: float, dims: tuple[int, ...], keepdim: bool = False) -> TensorProxy:
    """Return (sum of |x|^ord)^(1 / ord) over `dims`; the largest (smallest) |x| for ord inf (-inf), the count of x != 0
    for 0.

    Dtypes: x is floating point or complex, out real; half precision is summed in float32.
    Source: torch.linalg.vector_norm.
    """
    dtype = prims.real_dtype(x.dtype)
    if not dims:  # a 0-d tensor is a vector of one element
        return (x != 0).to(dtype) if ord == 0 else abs(x)
    wide = x.to(wider(x.dtype)) if math.isfinite(ord) else x
    return convert(_norm_of(wide, ord, dims, keepdim), dtype)


def wider(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums of `dtype` are accumulated."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _norm_of(x: TensorProxy, ord: float, dims: tuple[int, ...], keepdim: bool) -> TensorProxy:
    if ord == 0:
        return (x != 0).to(prims.real_dtype(x.dtype)).sum(dims, keepdim)
    if ord == 2:
        return sqrt(squared_size(x).sum(dims, keepdim))
    size = abs(x)
    if ord == 1:
        return size.sum(dims, keepdim)
    if math.isinf(ord):
        return size.amax(dims, keepdim) if ord > 0 else size.amin(dims, keepdim)
    return (size**ord).sum(dims, keepdim) ** (1 / ord)


@register_grad(vector_norm)
def _vector_norm_grad(x: TensorProxy, ord: float, dims: tuple[int, ...], keepdim: bool = False) -> TensorProxy:
    with outside_regions(math.isinf(ord)):
        out = vector_norm(x, ord, dims, keepdim)
    g, norm = get_grad(out), out
    if ord == 0:  # as in torch
        end_grad(x)
        return out
    if not keepdim and dims:
        g, norm = keep_dims(g, x, dims), keep_dims(norm, x, dims)
    put_grad(x, norm_backward(x, ord, dims, norm, g))
    return out


def norm_backward(x: TensorProxy, ord: float, dims: tuple[int, ...], norm: TensorProxy, g: TensorProxy) -> TensorProxy:
    """Return torch's gradient of x from the gradient g of a norm that keeps its dims: 0 where the norm is 0 and has no
    slope. Source: norm_backward of torch."""
    if prims.statically_true(x.numel() == 0):
        return x * 0
    if ord == 1:
        return sgn(x) * g
    if ord == 2:
        return g * where(norm == 0, 0, x / norm)
    if math.isinf(ord):
        with outside_regions():
            winners = (abs(x) == norm) | isnan(x)
        winners = winners.to(norm.dtype)
        return sgn(x) * (winners * (g / (winners.sum(dims, True) if dims else winners)))
    if ord < 1:
        return where(x == 0, 0, sgn(x) * abs(x) ** (ord - 1)) * g * norm ** (1 - ord)
    scaled = sgn(x) * abs(x) ** (ord - 1) if ord < 2 else x * abs(x) ** (ord - 2)
    return scaled * where(norm == 0, 0, g / norm ** (ord - 1))
