"""The torch executor's solvers and determinants, whose gradients reuse the forward's factorization."""

import torch

from forge import prims, torchlang
from forge.executors.torchex.core import run_torchlang, torchex
from forge.ir import TensorProxy, get_grad, needs_grad, put_grad
from forge.prims.core import like
from forge.prims.determinants import slogdet_gradient
from forge.prims.solvers import has_vectors, solution_gradient


def _factor(A: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the LU factorization of each matrix. Raises the error of torch.linalg.solve for a singular matrix."""
    LU, pivots, info = torch.linalg.lu_factor_ex(A)
    torch.ops.aten._linalg_check_errors.default(info, "torch.linalg.solve", is_matrix=A.ndim == 2)
    return LU, pivots


def _factored_meta(A: TensorProxy) -> tuple[TensorProxy, TensorProxy]:
    return like(A), like(A, shape=A.shape[:-1], dtype=torch.int32)


factored = torchex.register_operator("factored", meta=_factored_meta, fn=_factor)
lu_solve = torchex.register_operator("lu_solve", like=prims.linalg_lu_solve, fn=torch.linalg.lu_solve)
lu_factor = torchex.register_operator("lu_factor", like=prims.linalg_lu_factor_ex, fn=torch.linalg.lu_factor_ex)


def _solve_grad(A: TensorProxy, B: TensorProxy, *, left: bool = True) -> TensorProxy:
    """Solve the adjoint system with the factorization of A."""
    vectors = has_vectors(A, B)
    LU, pivots = factored(A)
    X = lu_solve(LU, pivots, B.unsqueeze(-1) if vectors else B, left=left)
    X = X.squeeze((-1,)) if vectors else X
    g = get_grad(X)
    of_B = lu_solve(LU, pivots, g.unsqueeze(-1) if vectors else g, left=left, adjoint=True)
    of_B = of_B.squeeze((-1,)) if vectors else of_B
    put_grad(B, of_B)
    if needs_grad(A):
        put_grad(A, solution_gradient(of_B, X, vectors, left))
    return X


run_torchlang(torchlang.solve, grad_transform=_solve_grad)


def _sign(LU: TensorProxy, pivots: TensorProxy) -> TensorProxy:
    """Return the determinant of the permutation: 1 or -1."""
    rows = prims.iota(pivots.shape[-1], 1, 1, pivots.dtype, pivots.device)
    swaps = (pivots != rows).to(torch.int64).sum(-1)
    return 1 - 2 * (swaps % 2)


def _factored_as_torch(A: TensorProxy) -> tuple[TensorProxy, TensorProxy]:
    """Return LU and the pivots as torch's determinants compute them: real matrices are row-major and so are factored
    transposed."""
    return lu_factor(A if A.dtype.is_complex else A.mT)[:2]


def _det_grad(A: TensorProxy) -> TensorProxy:
    """Compute det(A)^* A^-H. A zero on the diagonal of U becomes epsilon, as in torch: a zero determinant has zeros."""
    LU, pivots = _factored_as_torch(A)
    diagonal = LU.diagonal(0, -2, -1)
    out = diagonal.prod(-1) * _sign(LU, pivots)
    small = (diagonal == 0).where(torch.finfo(A.dtype).eps, 0.0).to(A.dtype)
    factors = get_grad(out) * out.conj()
    put_grad(A, _times_inverse(LU + prims.diagonal_matrix(small), pivots, factors))
    return out


def _times_inverse(LU: TensorProxy, pivots: TensorProxy, factors: TensorProxy) -> TensorProxy:
    """Return factors * A^-H, from torch's factorization of A."""
    scaled = factors.unsqueeze(-1).unsqueeze(-1) * prims.identity_like(LU, LU.shape[-1])
    return lu_solve(LU, pivots, scaled, adjoint=LU.dtype.is_complex)


run_torchlang(torchlang.linalg_det, grad_transform=_det_grad)


def _slogdet_grad(A: TensorProxy) -> tuple[TensorProxy, TensorProxy]:
    LU, pivots = _factored_as_torch(A)
    diagonal = LU.diagonal(0, -2, -1)
    sign = diagonal.sgn().prod(-1) * _sign(LU, pivots)
    logarithm = diagonal.abs().log().sum(-1)
    put_grad(A, _times_inverse(LU, pivots, slogdet_gradient(sign, get_grad(sign), get_grad(logarithm))))
    return sign, logarithm


run_torchlang(torchlang.linalg_slogdet, grad_transform=_slogdet_grad)
