"""The factorizations of matrices into triangular and unitary ones."""

import torch

from forge.ir import Dim, Symbol, TensorProxy, get_grad, put_grad, register_grad
from forge.prims.core import check_same_device, like, primitive, same, statically_true, torch_check
from forge.prims.creation import full
from forge.prims.elementwise import FLOAT, check_dtype, no_derivative, refuse_gradient
from forge.prims.library import make_library_prim
from forge.prims.shape import cat, diagonal_backward


def mH(x: TensorProxy) -> TensorProxy:
    """Return the conjugate transpose of each matrix."""
    return x.mT.conj()


def diagonal_matrix(x: TensorProxy) -> TensorProxy:
    """Return matrices with these diagonals and zeros elsewhere."""
    return diagonal_backward(x, (*x.shape, x.shape[-1]), 0, x.ndim - 1, x.ndim)


def identity_like(x: TensorProxy, length: Dim) -> TensorProxy:
    """Return the identity matrix in x's dtype, on its device."""
    return diagonal_matrix(full((length,), 1, x.dtype, x.device))


def upper_and_half_diagonal(x: TensorProxy) -> TensorProxy:
    """Return x with zeros below the diagonal, and half the diagonal: a Hermitian matrix is the sum of this part and its
    adjoint."""
    return (x.triu() + x.triu(1)) * 0.5


# triangular systems, which the other rules use


@primitive()
def linalg_solve_triangular(
    A: TensorProxy, B: TensorProxy, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> TensorProxy:
    """Return X with A @ X = B, or X @ A = B, for triangular A, whose other triangle is not read.

    Shapes: A (..., n, n), B (..., n, k), or (..., k, n) for left=False; batch dims broadcast. Dtypes: the same for
    both, floating point or complex. torch has no metadata for symbolic sizes. Source: torch.linalg.solve_triangular.
    """
    equation = "AX = B" if left else "XA = B"
    return _solution("linalg.solve_triangular", A, B, -2 if left else -1, f"the equation {equation}")


def _solution(op: str, A: TensorProxy, B: TensorProxy, dim: int, equation: str) -> TensorProxy:
    """Return the solution of a system with batches of square matrices A, with the length of B's `dim`."""
    for name, x in (("A", A), ("B", B)):
        torch_check(
            x.ndim >= 2,
            lambda name=name, x=x: f"{op}: The input tensor {name} must have at least 2 dimensions, but it is {x}",
        )
    torch_check(A.dtype == B.dtype, lambda: f"{op}: Expected A and B to have the same dtype, but they are {A} and {B}")
    torch_check(same(*A.shape[-2:]), lambda: f"{op}: A must be batches of square matrices, but it is {A}")
    torch_check(
        same(A.shape[-1], B.shape[dim]), lambda: f"{op}: Incompatible shapes of A and B for {equation}: {A} and {B}"
    )
    check_dtype(op, A, FLOAT)
    check_same_device(op, A, B)
    return like(B, shape=(*torch.broadcast_shapes(A.shape[:-2], B.shape[:-2]), *B.shape[-2:]))


@register_grad(linalg_solve_triangular)
def _solve_triangular_grad(
    A: TensorProxy, B: TensorProxy, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> TensorProxy:
    how = {"left": left, "unitriangular": unitriangular}
    out = linalg_solve_triangular(A, B, upper=upper, **how)
    of_B = linalg_solve_triangular(mH(A), get_grad(out), upper=not upper, **how)
    put_grad(B, of_B)
    of_A = -(of_B @ mH(out) if left else mH(out) @ of_B)
    inside = 1 if unitriangular else 0
    put_grad(A, of_A.triu(inside) if upper else of_A.tril(-inside))
    return out


# A = L L^H

linalg_cholesky_ex = make_library_prim(
    torch.linalg.cholesky_ex, "The Cholesky factor of positive definite matrices, and where each could not be factored."
)


@register_grad(linalg_cholesky_ex)
def _cholesky_ex_grad(
    A: TensorProxy, *, upper: bool = False, check_errors: bool = False
) -> tuple[TensorProxy, TensorProxy]:
    """Compute the gradient by a closed formula. Source: I. Murray, Differentiation of the Cholesky decomposition,
    arXiv:1602.07527, equation 10."""
    factor, info = linalg_cholesky_ex(A, upper=upper, check_errors=check_errors)
    L, g = (mH(factor), mH(get_grad(factor))) if upper else (factor, get_grad(factor))
    product = mH(L) @ g
    inner = (product.tril() + mH(product.tril(-1))) * 0.5
    half = linalg_solve_triangular(L, inner, upper=False, left=False)
    put_grad(A, linalg_solve_triangular(mH(L), half, upper=True))
    return factor, info


@primitive()
def cholesky_solve(B: TensorProxy, L: TensorProxy, upper: bool = False) -> TensorProxy:
    """Return X with L @ L^H @ X = B, for a Cholesky factor L; for `upper`, with L^H @ L.

    Shapes: B (..., n, k), L (..., n, n); batch dims broadcast. Dtypes: the same for both, floating point or complex.
    torch has no metadata for symbolic sizes. Source: torch.cholesky_solve.
    """
    return _solution("cholesky_solve", L, B, -2, "a system")


@register_grad(cholesky_solve)
def _cholesky_solve_grad(B: TensorProxy, L: TensorProxy, upper: bool = False) -> TensorProxy:
    out = cholesky_solve(B, L, upper)
    of_B = cholesky_solve(get_grad(out), L, upper)
    put_grad(B, of_B)
    product = of_B @ mH(out)
    both = product + mH(product)
    put_grad(L, -(L @ both if upper else both @ L))
    return out


cholesky_inverse: Symbol[TensorProxy] = make_library_prim(
    torch.cholesky_inverse, "The inverse of L @ L^H, of a Cholesky factor L."
)


@register_grad(cholesky_inverse)
def _cholesky_inverse_grad(L: TensorProxy, upper: bool = False) -> TensorProxy:
    out = cholesky_inverse(L, upper)
    g = get_grad(out)
    both = out @ (g + mH(g)) @ out
    put_grad(L, -(L @ both if upper else both @ L))
    return out


# P^T A = L U

lu_unpack: Symbol[tuple[TensorProxy, TensorProxy, TensorProxy]] = make_library_prim(
    torch.lu_unpack, "(P, L, U) of a compact LU factorization and its pivots; empty tensors for what is not asked for."
)
linalg_lu_factor_ex = make_library_prim(
    torch.linalg.lu_factor_ex,
    "The LU factorization: L and U in one matrix, pivots as LAPACK has them, and where U is singular.",
)


@register_grad(lu_unpack)
def _lu_unpack_grad(
    LU_data: TensorProxy, LU_pivots: TensorProxy, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[TensorProxy, TensorProxy, TensorProxy]:
    P, L, U = lu_unpack(LU_data, LU_pivots, unpack_data, unpack_pivots)
    put_grad(LU_data, None)
    if unpack_data:
        rows, columns = LU_data.shape[-2:]
        put_grad(LU_data, pad_matrices(get_grad(L).tril(-1), rows, columns))
        put_grad(LU_data, pad_matrices(get_grad(U).triu(), rows, columns))
    return P, L, U


def pad_matrices(x: TensorProxy, rows: Dim, columns: Dim) -> TensorProxy:
    """Return matrices padded below and on the right with zeros to this many rows and columns."""
    for dim, size in ((x.ndim - 2, rows), (x.ndim - 1, columns)):
        if not statically_true(x.shape[dim] == size):
            shape = list(x.shape)
            shape[dim] = size - x.shape[dim]
            x = cat([x, full(shape, 0, x.dtype, x.device)], dim)
    return x


def permutation_of(LU: TensorProxy, pivots: TensorProxy) -> TensorProxy:
    """Return the permutation matrix P of A = P @ L @ U."""
    return lu_unpack(LU, pivots, False, True)[0]


@register_grad(linalg_lu_factor_ex)
def _lu_factor_ex_grad(
    A: TensorProxy, *, pivot: bool = True, check_errors: bool = False
) -> tuple[TensorProxy, TensorProxy, TensorProxy]:
    """Compute the gradient from those of L and U. L has ones on its diagonal: with X = L^-1 P^T dA U^-1, dL = L tril(X,
    -1) and dU = triu(X) U for square A. The part to the right of U's square part, or below L's, follows from these.

    Source: S. F. Walter and L. Lehmann, Algorithmic differentiation of linear algebra functions with application in
    optimum experimental design, arXiv:1001.1654, section 4.
    """
    LU, pivots, info = linalg_lu_factor_ex(A, pivot=pivot, check_errors=check_errors)
    g = get_grad(LU)
    rows, columns = LU.shape[-2:]
    side = torch.sym_min(rows, columns)
    square, g_square = LU[..., :side, :side], g[..., :side, :side]
    L = square.tril(-1) + identity_like(LU, side)
    of_lower, of_upper = mH(L) @ g_square, g_square @ mH(square.triu())
    right = below = None
    if not same(rows, columns):
        if rows < columns:
            right = g[..., side:]
            of_lower = of_lower - right @ mH(LU[..., side:])
        else:
            below = g[..., side:, :]
            of_upper = of_upper - mH(LU[..., side:, :]) @ below
    inner = of_lower.tril(-1) + of_upper.triu()
    inner = _over_upper(square, inner) if right is None else cat([_over_upper(square, inner), right], g.ndim - 1)
    gradient = linalg_solve_triangular(mH(square), inner, upper=True, unitriangular=True)
    if below is not None:
        gradient = cat([gradient, _over_upper(square, below)], g.ndim - 2)
    put_grad(A, permutation_of(LU, pivots) @ gradient if pivot else gradient)
    return LU, pivots, info


def _over_upper(LU: TensorProxy, x: TensorProxy) -> TensorProxy:
    """Return x @ U^-H."""
    return linalg_solve_triangular(mH(LU), x, upper=False, left=False)


linalg_lu_solve: Symbol[TensorProxy] = make_library_prim(
    torch.linalg.lu_solve, "X with A @ X = B, or X @ A = B, of an LU factorization of A, or of A's adjoint."
)


@register_grad(linalg_lu_solve)
def _lu_solve_grad(
    LU: TensorProxy, pivots: TensorProxy, B: TensorProxy, *, left: bool = True, adjoint: bool = False
) -> TensorProxy:
    out = linalg_lu_solve(LU, pivots, B, left=left, adjoint=adjoint)
    of_B = linalg_lu_solve(LU, pivots, get_grad(out), left=left, adjoint=not adjoint)
    put_grad(B, of_B)
    # the gradient of A is -(u @ v^H); A = P @ L @ U
    u, v = (of_B, out) if left else (mH(out), mH(of_B))
    u, v = (v, u) if adjoint else (u, v)
    u = permutation_of(LU, pivots).mT @ u
    L = LU.tril(-1) + identity_like(LU, LU.shape[-1])
    of_L, of_U = u @ mH(LU.triu() @ v), mH(L) @ u @ mH(v)
    put_grad(LU, -(of_L.tril(-1) + of_U.triu()))
    return out


# A = L D L^H, which has no gradient in torch

linalg_ldl_factor_ex = make_library_prim(
    torch.linalg.ldl_factor_ex, "The LDL factorization of symmetric or Hermitian matrices: (LD, pivots, info)."
)
refuse_gradient(linalg_ldl_factor_ex)

linalg_ldl_solve = make_library_prim(torch.linalg.ldl_solve, "X with A @ X = B, of an LDL factorization of A.")
refuse_gradient(linalg_ldl_solve)


# A = Q R

linalg_qr = make_library_prim(torch.linalg.qr, "The QR factorization: Q with orthonormal columns, R upper triangular.")


@register_grad(linalg_qr)
def _qr_grad(A: TensorProxy, mode: str = "reduced") -> tuple[TensorProxy, TensorProxy]:
    """Compute the gradient from those of Q and R. With X = Q^H dA R^-1 for a square R, dR = T R and dQ = dA R^-1 - Q T,
    where T is upper triangular and T + T^H =
    X + X^H. The columns of a wide A to the right of its square part are Q times R's.

    Source: as _lu_factor_ex_grad, section 5.
    """
    Q, R = linalg_qr(A, mode)
    gQ, gR = get_grad(Q), get_grad(R)
    rows, columns = A.shape[-2:]
    if mode == "r" or (mode == "complete" and not same(rows, columns) and rows > columns):
        put_grad(A, pad_matrices(no_derivative(gR, f"linalg.qr with mode='{mode}'"), rows, columns))
        return Q, R
    square, gR_square, right = R, gR, None
    if not same(rows, columns) and rows < columns:
        square, gR_square = R[..., :rows], gR[..., :rows]
        right = gR[..., rows:]
        gQ = gQ + Q @ (R[..., rows:] @ mH(right))
    inner = upper_and_half_diagonal(gR_square @ mH(square) - mH(Q) @ gQ)
    gradient = _over_upper(square, gQ + Q @ (inner + mH(inner)))
    put_grad(A, gradient if right is None else cat([gradient, Q @ right], A.ndim - 1))
    return Q, R


@primitive()
def geqrf(input: TensorProxy) -> tuple[TensorProxy, TensorProxy]:
    """Return the QR factorization in LAPACK's form: R with Householder vectors below its diagonal, and their factors.

    Shapes: (..., m, n), and out (..., m, n) and (..., min(m, n)). Dtypes: floating point or complex.
    Raises: RuntimeError for another rank; NotImplementedError for another dtype.
    """
    torch_check(input.ndim >= 2, lambda: f"geqrf: input must have at least 2 dimensions, but it is {input}")
    check_dtype("geqrf", input, FLOAT)
    *batch, rows, columns = input.shape
    return like(input), like(input, shape=(*batch, torch.sym_min(rows, columns)))


refuse_gradient(geqrf)
