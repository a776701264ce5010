"""The eigenvalues and singular values, and functions of them: pseudoinverses, ranks, condition numbers."""

import torch
from torch import Tensor

from forge import clang, prims
from forge.ir import NUMBER_TYPES, TensorProxy, get_grad, put_grad, register_grad
from forge.prims.core import torch_check
from forge.torchlang.aliases import TensorOrNumber, results
from forge.torchlang.core import torchsymbol

Pair = tuple[TensorProxy, TensorProxy]
Triple = tuple[TensorProxy, TensorProxy, TensorProxy]


@torchsymbol(torch.linalg.eigh)
def eigh(input: TensorProxy, UPLO: str = "L") -> Pair:
    """Return (eigenvalues of symmetric or Hermitian matrices, ascending; eigenvectors as columns)."""
    return results.linalg_eigh(prims.linalg_eigh(input, UPLO))


@torchsymbol(torch.linalg.eigvalsh)
def eigvalsh(input: TensorProxy, UPLO: str = "L") -> TensorProxy:
    """Return the eigenvalues of symmetric or Hermitian matrices, ascending."""
    return prims.linalg_eigh(input, UPLO)[0]


@torchsymbol(torch.linalg.eig)
def eig(input: TensorProxy) -> Pair:
    """Return (complex eigenvalues, eigenvectors as columns)."""
    return results.linalg_eig(prims.linalg_eig(input))


@torchsymbol(torch.linalg.eigvals)
def eigvals(input: TensorProxy) -> TensorProxy:
    """Return the complex eigenvalues."""
    return prims.linalg_eig(input)[0]


@torchsymbol(torch.linalg.svd)
def linalg_svd(A: TensorProxy, full_matrices: bool = True, *, driver: str | None = None) -> Triple:
    """Return (U, S, Vh) with A = U @ diag(S) @ Vh; without full_matrices, only the vectors of the singular values."""
    return results.linalg_svd(prims.linalg_svd(A, full_matrices, driver=driver))


@torchsymbol(torch.linalg.svdvals)
def svdvals(A: TensorProxy, *, driver: str | None = None) -> TensorProxy:
    """Return the singular values, descending."""
    return prims.linalg_svd(A, False, driver=driver)[1]


@torchsymbol(torch.svd, Tensor.svd)
def svd(input: TensorProxy, some: bool = True, compute_uv: bool = True) -> Triple:
    """Return (U, S, V) with input = U @ diag(S) @ V^H; without compute_uv, U and V are zeros."""
    torch_check(input.ndim >= 2, lambda: f"svd: input should have at least 2 dimensions, but it is {input}")
    if compute_uv:
        U, S, Vh = prims.linalg_svd(input, not some)
        return results.svd((U, S, prims.mH(Vh)))
    batch, rows, columns = input.shape[:-2], *input.shape[-2:]
    zeros = [prims.full((*batch, side, side), 0, input.dtype, input.device) for side in (rows, columns)]
    return results.svd((zeros[0], svdvals(input), zeros[1]))


# pseudoinverses, ranks


def _largest(x: TensorProxy) -> TensorProxy:
    """Return the largest of each row."""
    return clang.amax(x, -1, True)


def _cutoff(
    x: TensorProxy, sizes: TensorProxy, atol: TensorProxy | float | None, rtol: TensorProxy | float | None
) -> TensorProxy:
    """Return the bound up to which singular values count as 0: the larger of atol and rtol times the largest one.

    By default rtol is the dtype's epsilon times the longer side, or 0 if a positive atol is given.
    """
    if rtol is None:
        rtol = torch.finfo(sizes.dtype).eps * torch.sym_max(*x.shape[-2:])
        if isinstance(atol, TensorProxy):
            rtol = clang.where(atol > 0, 0.0, rtol)
        elif atol is not None and atol > 0:
            rtol = 0.0
    relative = _column(rtol) * _largest(sizes)
    absolute = 0.0 if atol is None else _column(atol)
    if isinstance(absolute, NUMBER_TYPES):
        return clang.where(relative > absolute, relative, absolute)
    return clang.maximum(relative, absolute)


def _column(tolerance: TensorOrNumber) -> TensorOrNumber:
    return clang.unsqueeze(tolerance, -1) if isinstance(tolerance, TensorProxy) else tolerance


@torchsymbol(torch.linalg.pinv)
def pinv(
    input: TensorProxy,
    rcond: TensorProxy | float | None = None,
    hermitian: bool = False,
    *,
    atol: TensorProxy | float | None = None,
    rtol: TensorProxy | float | None = None,
) -> TensorProxy:
    """Return the pseudoinverse of each matrix: singular values up to max(atol, rtol * the largest) count as 0."""
    torch_check(
        input.ndim >= 2,
        lambda: f"linalg.pinv: Expected a tensor with 2 or more dimensions of floating types, but it is {input}",
    )
    if prims.statically_true(input.numel() == 0):
        return prims.clone(prims.mH(input))
    if hermitian:
        values, left = prims.linalg_eigh(input)
        sizes, right = clang.abs(values), prims.mH(left)
    else:
        left, values, right = prims.linalg_svd(input, False)
        sizes = values
    cutoff = _cutoff(input, sizes, atol, rtol if rcond is None else rcond)
    inverses = clang.where(sizes > cutoff, clang.reciprocal(values), 0.0)
    return (prims.mH(right) * clang.unsqueeze(inverses, -2)) @ prims.mH(left)


@torchsymbol(torch.pinverse, Tensor.pinverse)
def pinverse(input: TensorProxy, rcond: float = 1e-15) -> TensorProxy:
    """Return linalg.pinv under its old name."""
    return pinv(input, rcond)


@register_grad(pinv)
def _pinv_grad(
    input: TensorProxy,
    rcond: TensorProxy | float | None = None,
    hermitian: bool = False,
    *,
    atol: TensorProxy | float | None = None,
    rtol: TensorProxy | float | None = None,
) -> TensorProxy:
    """Differentiate for matrices of constant rank, whose singular values may be equal, or 0.

    Source: G. Golub and V. Pereyra, The differentiation of pseudo-inverses and nonlinear least squares problems whose
    variables separate, SIAM J. Numer. Anal. 10 (1973), equation 4.12.
    """
    empty = prims.statically_true(input.numel() == 0)  # reads no tolerance
    out = pinv(input) if empty else pinv(input, rcond, hermitian, atol=atol, rtol=rtol)
    g, X = get_grad(out), prims.mH(out)
    gX = prims.mH(g)
    # with the projectors I - A X and I - X A written out
    row_part = (gX - input @ (out @ gX)) @ out @ X
    column_part = X @ out @ (gX - (gX @ out) @ input)
    put_grad(input, row_part + column_part - X @ g @ X)
    for tolerance in (rcond, atol, rtol):
        put_grad(tolerance, None)
    return out


@torchsymbol(torch.linalg.matrix_rank)
def matrix_rank(
    input: TensorProxy,
    tol: TensorProxy | float | None = None,
    hermitian: bool = False,
    *,
    atol: TensorProxy | float | None = None,
    rtol: TensorProxy | float | None = None,
) -> TensorProxy:
    """Return the number of singular values above max(atol, rtol * the largest); tol is an atol, and excludes rtol."""
    torch_check(
        input.ndim >= 2,
        lambda: f"linalg.matrix_rank: The input tensor input must have at least 2 dimensions, but it is {input}",
    )
    if tol is not None:
        atol, rtol = tol, 0.0
    if prims.statically_true(input.numel() == 0):
        return prims.full(input.shape[:-2], 0, torch.int64, input.device)
    sizes = clang.abs(prims.linalg_eigh(input)[0]) if hermitian else prims.linalg_svd(input, False)[1]
    return clang.sum(sizes > _cutoff(input, sizes, atol, rtol), -1)
