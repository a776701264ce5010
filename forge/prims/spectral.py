"""The eigenvalues and singular values, with their vectors.

An eigenvector is known up to a factor (a sign, a phase of a complex one). A gradient that depends on it has no meaning;
if it is a phase, the backward raises, like torch's. If only values are used, their gradient does not include that of
the vectors, which is infinite for equal values.
"""

import torch

from forge.ir import Symbol, Tag, TensorProxy, get_grad, put_grad, register_grad
from forge.prims.core import like, primitive, register_vjp, same
from forge.prims.elementwise import imag
from forge.prims.factorizations import diagonal_matrix, identity_like, mH
from forge.prims.library import make_library_prim
from forge.prims.solvers import linalg_solve_ex


@primitive(tags=[Tag.SYNCHRONIZING])
def check_phase(gradient: TensorProxy, phase: TensorProxy, op: str) -> TensorProxy:
    """Return the gradient unchanged.

    Raises, at run time: RuntimeError if `phase`, the dependence of the gradient on a vector's phase, is not 0.
    """
    return like(gradient)


register_vjp(check_phase, gradient=lambda g: g, phase=None)


def _check_phases(gradient: TensorProxy, of_vectors: TensorProxy, op: str) -> TensorProxy:
    """Return the gradient after a check that it does not depend on the phases of complex vectors, from their products
    with their gradients."""
    if not of_vectors.dtype.is_complex:
        return gradient
    return check_phase(gradient, imag(_diagonal(of_vectors)), op)


def _diagonal(x: TensorProxy) -> TensorProxy:
    return x.diagonal(0, -2, -1)


def _differences(x: TensorProxy) -> TensorProxy:
    """Return out with out[i, j] = x[j] - x[i], and 1 on the diagonal."""
    return x.unsqueeze(-2) - x.unsqueeze(-1) + identity_like(x, x.shape[-1])


def _without_diagonal(x: TensorProxy) -> TensorProxy:
    return x.tril(-1) + x.triu(1)


linalg_eigh = make_library_prim(
    torch.linalg.eigh, "The eigenvalues of symmetric or Hermitian matrices, ascending, and their vectors."
)


@register_grad(linalg_eigh)
def _eigh_grad(A: TensorProxy, UPLO: str = "L") -> tuple[TensorProxy, TensorProxy]:
    """Compute the gradient for symmetric matrices. Source: M. Giles, Collected matrix derivative results for forward
    and reverse mode algorithmic differentiation, section 3.1."""
    values, vectors = linalg_eigh(A, UPLO)
    of_values = (vectors * get_grad(values).unsqueeze(-2)) @ mH(vectors)
    put_grad(A, of_values, of=(values,))
    turned = mH(vectors) @ get_grad(vectors)
    skew = (turned - mH(turned)) * 0.5
    of_vectors = vectors @ (_without_diagonal(skew) / _differences(values)) @ mH(vectors)
    put_grad(A, _check_phases(of_vectors, turned, "linalg_eigh_backward"), of=(vectors,))
    return values, vectors


linalg_eig = make_library_prim(torch.linalg.eig, "The complex eigenvalues of matrices, and vectors of length 1.")


@register_grad(linalg_eig)
def _eig_grad(A: TensorProxy) -> tuple[TensorProxy, TensorProxy]:
    """Compute the gradient from those of D and V. With A V = V D, dD is the diagonal of P = V^-1 dA V, and dV = V (P /
    E) up to the lengths of its columns, which stay 1; E has the differences of the eigenvalues. Source: as in
    _eigh_grad."""
    values, vectors = linalg_eig(A)
    put_grad(A, _similar(vectors, diagonal_matrix(get_grad(values))), of=(values,))
    turned = mH(vectors) @ get_grad(vectors)
    norms = (mH(vectors) @ vectors) * _diagonal(turned).real.unsqueeze(-2)
    inner = _without_diagonal(turned - norms) / _differences(values).conj()
    put_grad(A, _check_phases(_similar(vectors, inner), turned, "linalg_eig_backward"), of=(vectors,))
    return values, vectors


def _similar(vectors: TensorProxy, inner: TensorProxy) -> TensorProxy:
    """Return V^-H @ inner @ V^H."""
    return linalg_solve_ex(mH(vectors), inner @ mH(vectors))[0]


linalg_svd: Symbol[tuple[TensorProxy, TensorProxy, TensorProxy]] = make_library_prim(
    torch.linalg.svd, "(U, S, Vh): matrices with orthonormal columns, singular values descending, and rows."
)


@register_grad(linalg_svd)
def _svd_grad(
    A: TensorProxy, full_matrices: bool = True, *, driver: str | None = None
) -> tuple[TensorProxy, TensorProxy, TensorProxy]:
    """Compute the gradient; only the vectors of singular values have one. A phase is divided between U and Vh.

    Source: J. Townsend, Differentiating the singular value decomposition,
    https://j-towns.github.io/papers/svd-derivative.pdf
    """
    outputs = linalg_svd(A, full_matrices, driver=driver)
    (U, S, Vh), (gU, gS, gVh) = outputs, map(get_grad, outputs)
    rows, columns, size = *A.shape[-2:], S.shape[-1]
    if full_matrices:
        U, gU, Vh, gVh = U[..., :size], gU[..., :size], Vh[..., :size, :], gVh[..., :size, :]
    put_grad(A, (U * gS.unsqueeze(-2)) @ Vh, of=(outputs[1],))
    of_U, of_V = mH(U) @ gU, Vh @ mH(gVh)
    squares = (S.unsqueeze(-2) + S.unsqueeze(-1)) * (S.unsqueeze(-2) - S.unsqueeze(-1)) + identity_like(S, size)
    from_U = U @ (_skew(of_U) / squares * S.unsqueeze(-2)) @ Vh
    if not same(rows, size):
        from_U = from_U + ((gU - U @ of_U) / S.unsqueeze(-2)) @ Vh
    from_V = U @ (_skew(of_V) / squares * S.unsqueeze(-1)) @ Vh
    if not same(columns, size):
        from_V = from_V + U @ ((gVh - mH(of_V) @ Vh) / S.unsqueeze(-1))
    phases = _skew(of_U) + _skew(of_V)
    put_grad(A, _check_phases(from_U, phases, "svd_backward"), of=(outputs[0],))
    put_grad(A, _check_phases(from_V, phases, "svd_backward"), of=(outputs[2],))
    if A.dtype.is_complex:
        turn = _diagonal(_skew(of_U)) * 0.5 / S
        put_grad(A, (U * turn.unsqueeze(-2)) @ Vh, of=(outputs[0], outputs[2]))
    return outputs


def _skew(x: TensorProxy) -> TensorProxy:
    return x - mH(x)
