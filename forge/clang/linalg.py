"""Matrix products with torch's broadcasting."""

from forge import prims
from forge.clang.core import broadcast_shapes, clangop, expand_to
from forge.clang.shape import reshape, unsqueeze
from forge.ir import TensorProxy, check, get_grad, needs_grad, put_grad, register_grad


@clangop()
def matmul(a: TensorProxy, b: TensorProxy) -> TensorProxy:
    """torch.matmul: vectors get a dim of length 1, batch dims broadcast."""
    check(
        a.ndim > 0 and b.ndim > 0,
        lambda: f"matmul: both arguments to matmul need to be at least 1D, but they are {a} and {b}",
        RuntimeError,
    )
    left = unsqueeze(a, 0) if a.ndim == 1 else a
    right = unsqueeze(b, 1) if b.ndim == 1 else b
    if right.ndim == 2 and left.ndim > 2:  # one product of matrices instead of a batch of them
        flat = prims.matmul(reshape(left, (-1, left.shape[-1])), right)
        out = reshape(flat, (*left.shape[:-1], right.shape[-1]))
    else:
        if left.ndim > 2 or right.ndim > 2:
            batch = broadcast_shapes("matmul", left.shape[:-2], right.shape[:-2])
            left, right = expand_to(left, (*batch, *left.shape[-2:])), expand_to(right, (*batch, *right.shape[-2:]))
        out = prims.matmul(left, right)
    if a.ndim == 1:
        out = reshape(out, (*out.shape[:-2], out.shape[-1]))
    return reshape(out, out.shape[:-1]) if b.ndim == 1 else out


@register_grad(matmul)
def _matmul_grad(a: TensorProxy, b: TensorProxy) -> TensorProxy:
    out = matmul(a, b)
    g = get_grad(out)
    if a.ndim == 1 and b.ndim == 1:
        put_grad(a, g * b)
        put_grad(b, g * a)
        return out
    left, right = a, b
    if a.ndim == 1:
        left, g = unsqueeze(a, 0), unsqueeze(g, -2)
    if b.ndim == 1:
        right, g = unsqueeze(b, 1), unsqueeze(g, -1)
    if needs_grad(a):
        put_grad(a, _drop(matmul(g, right.transpose(-2, -1)), a, 0))
    if needs_grad(b):
        if right.ndim == 2 and left.ndim > 2:
            rows, g_rows = reshape(left, (-1, left.shape[-1])), reshape(g, (-1, g.shape[-1]))
            put_grad(b, _drop(matmul(rows.transpose(0, 1), g_rows), b, 1))
        else:
            put_grad(b, _drop(matmul(left.transpose(-2, -1), g), b, 1))
    return out


def _drop(gradient: TensorProxy, vector: TensorProxy, matrix_dim: int) -> TensorProxy:
    """The gradient of a vector that was made a matrix: its batch dims summed, its dim of length 1 dropped."""
    if vector.ndim > 1:
        return gradient
    dims = tuple(range(gradient.ndim - 2))
    gradient = gradient.sum(dims) if dims else gradient
    return reshape(gradient, vector.shape)
