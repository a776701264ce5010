"""The systems of linear equations, inverses, and the matrix exponential."""

import torch

from forge.ir import Symbol, TensorProxy, get_grad, needs_grad, put_grad, register_grad
from forge.prims.core import same_shape
from forge.prims.factorizations import mH
from forge.prims.library import make_library_prim
from forge.prims.shape import cat

linalg_inv_ex = make_library_prim(torch.linalg.inv_ex, "The inverse of each matrix, and where it is singular.")


@register_grad(linalg_inv_ex)
def _inv_ex_grad(A: TensorProxy, *, check_errors: bool = False) -> tuple[TensorProxy, TensorProxy]:
    inverse, info = linalg_inv_ex(A, check_errors=check_errors)
    put_grad(A, -(mH(inverse) @ get_grad(inverse) @ mH(inverse)))
    return inverse, info


linalg_solve_ex: Symbol[tuple[TensorProxy, TensorProxy]] = make_library_prim(
    torch.linalg.solve_ex, "X with A @ X = B, or X @ A = B, and where A is singular; B may be vectors."
)


def has_vectors(A: TensorProxy, B: TensorProxy) -> bool:
    """Return whether the right-hand side of a system is one vector per matrix, as torch.linalg.solve interprets it."""
    if B.ndim == 1:
        return True
    return same_shape(A.shape[:-1], B.shape)


def solution_gradient(of_B: TensorProxy, X: TensorProxy, vectors: bool, left: bool) -> TensorProxy:
    """Return the gradient of A from that of B, where A @ X = B, or X @ A = B."""
    if vectors:
        of_B, X = of_B.unsqueeze(-1), X.unsqueeze(-1)
    return -(of_B @ mH(X) if left else mH(X) @ of_B)


@register_grad(linalg_solve_ex)
def _solve_ex_grad(
    A: TensorProxy, B: TensorProxy, *, left: bool = True, check_errors: bool = False
) -> tuple[TensorProxy, TensorProxy]:
    X, info = linalg_solve_ex(A, B, left=left, check_errors=check_errors)
    vectors = has_vectors(A, B)
    g = get_grad(X)
    of_B = linalg_solve_ex(mH(A), g.unsqueeze(-1) if vectors else g, left=left)[0]
    of_B = of_B.squeeze((-1,)) if vectors else of_B
    put_grad(B, of_B)
    if needs_grad(A):
        put_grad(A, solution_gradient(of_B, X, vectors, left))
    return X, info


linalg_matrix_exp: Symbol[TensorProxy] = make_library_prim(
    torch.linalg.matrix_exp, "The exponential of each matrix: I + A + A @ A / 2 + …"
)


@register_grad(linalg_matrix_exp)
def _matrix_exp_grad(A: TensorProxy) -> TensorProxy:
    """Compute the directional derivative as a block of the exponential of a block matrix.

    Source: R. Mathias, A chain rule for matrix functions and applications, SIAM J. Matrix Anal. Appl. 17 (1996).
    """
    out = linalg_matrix_exp(A)
    adjoint, g, side = mH(A), get_grad(out), A.shape[-1]
    blocks = cat([cat([adjoint, g], A.ndim - 1), cat([adjoint * 0, adjoint], A.ndim - 1)], A.ndim - 2)
    put_grad(A, linalg_matrix_exp(blocks)[..., :side, side:])
    return out
