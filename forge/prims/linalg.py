"""Linear algebra prims."""

import torch

from forge.ir import TensorProxy, check
from forge.prims.core import check_same_device, like, primitive, register_vjp, same, torch_check
from forge.prims.elementwise import conjugate
from forge.prims.shape import permute


@primitive()
def matmul(a: TensorProxy, b: TensorProxy) -> TensorProxy:
    """out[..., i, j] = sum over k of a[..., i, k] * b[..., k, j].

    Shapes: (..., n, k) and (..., k, m) with equal batch dims; out is (..., n, m).
    Dtypes: one for both, not bool. Source: torch.matmul, without its broadcasting.
    """
    check(
        a.ndim == b.ndim and a.ndim >= 2,
        lambda: f"prims.matmul: a is {a} and b is {b}, but both must have one rank of at least 2; use torch.matmul",
    )
    torch_check(
        same(a.shape[-1], b.shape[-2]) and all(map(same, a.shape[:-2], b.shape[:-2])),
        lambda: f"prims.matmul: mat1 and mat2 shapes cannot be multiplied: {a} and {b}",
    )
    torch_check(
        a.dtype == b.dtype and a.dtype != torch.bool,
        lambda: f"prims.matmul: expected one dtype (not bool) for both, but a is {a} and b is {b}",
    )
    check_same_device("prims.matmul", a, b)
    return like(a, shape=(*a.shape[:-1], b.shape[-1]))


def _swap_last(x: TensorProxy) -> TensorProxy:
    return permute(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


register_vjp(
    matmul, a=lambda g, b: matmul(g, _swap_last(conjugate(b))), b=lambda g, a: matmul(_swap_last(conjugate(a)), g)
)
