"""The prims of determinants and their logarithms."""

import torch

from forge.ir import Symbol, TensorProxy, get_grad, put_grad, register_grad
from forge.prims.creation import iota
from forge.prims.elementwise import imag, real_dtype
from forge.prims.factorizations import diagonal_matrix, identity_like, mH
from forge.prims.library import make_library_prim
from forge.prims.solvers import linalg_solve_ex
from forge.prims.spectral import linalg_svd

linalg_det: Symbol[TensorProxy] = make_library_prim(torch.linalg.det, "The determinant of each matrix.")
linalg_slogdet = make_library_prim(
    torch.linalg.slogdet, "The sign of each determinant (a number of length 1), and the logarithm of its size."
)


@register_grad(linalg_det)
def _det_grad(A: TensorProxy) -> TensorProxy:
    """Return the adjoint of A's adjugate: det(A)^* A^-H; for a singular matrix, computed from its singular value
    decomposition, where the adjugate of a diagonal matrix consists of products of the other elements. Each matrix takes
    one of the two paths; on the other, it is replaced by a matrix that has a gradient there.

    Source: N. J. Higham, What is the adjugate of a matrix?,
    https://nhigham.com/2020/06/16/what-is-the-adjugate-of-a-matrix
    """
    out = linalg_det(A)
    g = get_grad(out)
    singular = (abs(out) < 100 * torch.finfo(A.dtype).eps).unsqueeze(-1).unsqueeze(-1)
    identity = identity_like(A, A.shape[-1])
    regular = linalg_solve_ex(mH(singular.where(identity, A)), _times(g * out.conj(), identity))[0]
    put_grad(A, singular.where(_adjugate_gradient(singular.where(A, _distinct(A)), g), regular))
    return out


def _times(factors: TensorProxy, matrix: TensorProxy) -> TensorProxy:
    return factors.unsqueeze(-1).unsqueeze(-1) * matrix


def _distinct(A: TensorProxy) -> TensorProxy:
    """Return a matrix with the singular values 1, 2, 3, …"""
    return diagonal_matrix(iota(A.shape[-1], 1, 1, real_dtype(A.dtype), A.device))


def _adjugate_gradient(A: TensorProxy, g: TensorProxy) -> TensorProxy:
    U, S, Vh = linalg_svd(A)
    size = S.shape[-1]
    own = identity_like(S, size) > 0
    others = own.where(1.0, S.unsqueeze(-2).expand((*S.shape, size))).prod(-1)
    turn = (linalg_det(U) * linalg_det(Vh)).conj() * g
    return (U * (turn.unsqueeze(-1) * others).unsqueeze(-2)) @ Vh


def slogdet_gradient(sign: TensorProxy, of_sign: TensorProxy, of_logarithm: TensorProxy) -> TensorProxy:
    """Return the number that, times A^-H, is the gradient of sign(det(A)) and log |det(A)|."""
    return of_logarithm - imag(of_sign.conj() * sign) * 1j if sign.dtype.is_complex else of_logarithm


@register_grad(linalg_slogdet)
def _slogdet_grad(A: TensorProxy) -> tuple[TensorProxy, TensorProxy]:
    sign, logarithm = linalg_slogdet(A)
    factors = slogdet_gradient(sign, get_grad(sign), get_grad(logarithm))
    put_grad(A, linalg_solve_ex(mH(A), _times(factors, identity_like(A, A.shape[-1])))[0])
    return sign, logarithm
