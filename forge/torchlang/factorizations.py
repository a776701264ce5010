"""The factorizations of matrices into triangular and unitary ones, and their solvers."""

from collections.abc import Callable
from types import FunctionType

import torch
from torch import Tensor

from forge import clang, prims
from forge.ir import TensorProxy, end_grad, get_grad, put_grad, register_grad
from forge.prims.core import same_shape, torch_check
from forge.torchlang.aliases import results
from forge.torchlang.core import torchsymbol

Pair = tuple[TensorProxy, TensorProxy]
Triple = tuple[TensorProxy, TensorProxy, TensorProxy]

# triangular systems


@torchsymbol(torch.linalg.solve_triangular)
def solve_triangular(
    input: TensorProxy, B: TensorProxy, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> TensorProxy:
    """Return X with input @ X = B, or X @ input = B, for triangular input. Dtypes: out has input's, as in torch."""
    B = clang.convert(B, input.dtype)
    return prims.linalg_solve_triangular(input, B, upper=upper, left=left, unitriangular=unitriangular)


@torchsymbol(torch.triangular_solve, Tensor.triangular_solve)
def triangular_solve(
    input: TensorProxy, A: TensorProxy, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Pair:
    """Return (X with A @ X = input, or with A's transpose, for triangular A; a copy of A)."""
    for name, value in (("b", input), ("A", A)):
        torch_check(
            value.ndim >= 2,
            lambda name=name, value=value: (
                f"torch.triangular_solve: Expected {name} to have at least 2 dimensions, but it is {value}"
            ),
        )
    matrix, triangle = (A.mT, not upper) if transpose else (A, upper)
    solution = prims.linalg_solve_triangular(matrix, input, upper=triangle, unitriangular=unitriangular)
    copy = prims.clone(clang.expand_to(A, (*solution.shape[:-2], *A.shape[-2:])))
    return results.triangular_solve((solution, copy))


# Cholesky factorization


def _older(function: Callable, method: Callable) -> Callable:
    """Return a decorator that makes a symbol of a function that torch 2.15 keeps only as an error, written in
    Python."""
    return (lambda body: body) if isinstance(function, FunctionType) else torchsymbol(function, method)


@torchsymbol(torch.linalg.cholesky_ex)
def cholesky_ex(input: TensorProxy, *, upper: bool = False, check_errors: bool = False) -> Pair:
    """Return (L with input = L @ L^H, or its adjoint; the error codes, not 0 for matrices that are not positive
    definite)."""
    return results.linalg_cholesky_ex(prims.linalg_cholesky_ex(input, upper=upper, check_errors=check_errors))


@torchsymbol(torch.linalg.cholesky)
def linalg_cholesky(input: TensorProxy, *, upper: bool = False) -> TensorProxy:
    """Return L with input = L @ L^H, or its adjoint."""
    return prims.linalg_cholesky_ex(input, upper=upper, check_errors=True)[0]


@_older(torch.cholesky, Tensor.cholesky)
def cholesky(input: TensorProxy, upper: bool = False) -> TensorProxy:
    """Return L with input = L @ L^H, or its adjoint."""
    return prims.linalg_cholesky_ex(input, upper=upper, check_errors=True)[0]


@torchsymbol(torch.cholesky_inverse, Tensor.cholesky_inverse)
def cholesky_inverse(input: TensorProxy, upper: bool = False) -> TensorProxy:
    """Return the inverse of the matrix with the Cholesky factor input."""
    return prims.cholesky_inverse(input, upper)


@torchsymbol(torch.cholesky_solve, Tensor.cholesky_solve)
def cholesky_solve(input: TensorProxy, input2: TensorProxy, upper: bool = False) -> TensorProxy:
    """Return X with A @ X = input, where input2 is the Cholesky factor of A."""
    return prims.cholesky_solve(input, input2, upper)


# LU


@torchsymbol(torch.linalg.lu_factor_ex)
def lu_factor_ex(A: TensorProxy, *, pivot: bool = True, check_errors: bool = False) -> Triple:
    """Return (L and U in one matrix, pivots as in LAPACK, the error codes, not 0 for singular matrices)."""
    factors = prims.linalg_lu_factor_ex(A, pivot=pivot, check_errors=check_errors)
    return results.linalg_lu_factor_ex(factors)


@torchsymbol(torch.linalg.lu_factor)
def lu_factor(A: TensorProxy, *, pivot: bool = True) -> Pair:
    """Return (L and U in one matrix, pivots as in LAPACK)."""
    return results.linalg_lu_factor(prims.linalg_lu_factor_ex(A, pivot=pivot, check_errors=True)[:2])


@torchsymbol(torch.functional.lu)
def lu(A: TensorProxy, pivot: bool = True, get_infos: bool = False, out: None = None) -> Pair | Triple:
    """Return lu_factor under its old name, which accepts singular matrices; with get_infos, also the error codes."""
    factors = prims.linalg_lu_factor_ex(A, pivot=pivot)
    return results._lu_with_info(factors) if get_infos else tuple(factors[:2])


@torchsymbol(torch.lu_unpack)
def lu_unpack(
    LU_data: TensorProxy, LU_pivots: TensorProxy, unpack_data: bool = True, unpack_pivots: bool = True
) -> Triple:
    """Return (P, L, U) from lu_factor's result; empty tensors for those that are not requested."""
    return results.lu_unpack(prims.lu_unpack(LU_data, LU_pivots, unpack_data, unpack_pivots))


@torchsymbol(torch.linalg.lu)
def linalg_lu(A: TensorProxy, *, pivot: bool = True) -> Triple:
    """Return (P, L, U) with A = P @ L @ U; P is empty without pivots."""
    LU, pivots, _ = prims.linalg_lu_factor_ex(A, pivot=pivot)
    return results.linalg_lu(prims.lu_unpack(LU, pivots, True, pivot))


@torchsymbol(torch.linalg.lu_solve)
def linalg_lu_solve(
    LU: TensorProxy, pivots: TensorProxy, B: TensorProxy, *, left: bool = True, adjoint: bool = False
) -> TensorProxy:
    """Return X with A @ X = B, or X @ A = B, given the LU factorization of A; `adjoint` takes A's adjoint."""
    return prims.linalg_lu_solve(LU, pivots, B, left=left, adjoint=adjoint)


@torchsymbol(torch.lu_solve, Tensor.lu_solve)
def lu_solve(input: TensorProxy, LU_data: TensorProxy, LU_pivots: TensorProxy) -> TensorProxy:
    """Return X with A @ X = input, given the LU factorization of A."""
    return prims.linalg_lu_solve(LU_data, LU_pivots, input)


# LDL


@torchsymbol(torch.linalg.ldl_factor)
def ldl_factor(input: TensorProxy, *, hermitian: bool = False) -> Pair:
    """Return (L and D in one matrix, pivots as in LAPACK) with input = L @ D @ L^H."""
    factors = prims.linalg_ldl_factor_ex(input, hermitian=hermitian, check_errors=True)
    return results.linalg_ldl_factor(factors[:2])


@torchsymbol(torch.linalg.ldl_solve)
def ldl_solve(LD: TensorProxy, pivots: TensorProxy, B: TensorProxy, *, hermitian: bool = False) -> TensorProxy:
    """Return X with A @ X = B, given the LDL factorization of A."""
    return prims.linalg_ldl_solve(LD, pivots, B, hermitian=hermitian)


# QR


@torchsymbol(torch.linalg.qr)
def linalg_qr(A: TensorProxy, mode: str = "reduced") -> Pair:
    """Return (Q, R) with A = Q @ R: Q's columns are orthonormal, R is upper triangular."""
    return results.linalg_qr(prims.linalg_qr(A, mode))


@_older(torch.qr, Tensor.qr)
def qr(input: TensorProxy, some: bool = True) -> Pair:
    """Return linalg.qr under its old name."""
    return results.qr(prims.linalg_qr(input, "reduced" if some else "complete"))


@torchsymbol(torch.geqrf, Tensor.geqrf)
def geqrf(input: TensorProxy) -> Pair:
    """Return the QR factorization in LAPACK's form: (R with Householder vectors below its diagonal, their factors)."""
    return results.geqrf(prims.geqrf(input))


def _reflections(op: str, input: TensorProxy, tau: TensorProxy) -> Pair:
    """Return (V, T) with H_1 @ H_2 @ … = I - V @ T @ V^H, where H_i = I - tau_i v_i v_i^H and V holds the v_i, with
    ones on the diagonal and zeros above it.

    Source: R. Schreiber and C. Van Loan, A storage-efficient WY representation for products of Householder
    transformations, SIAM J. Sci. Stat. Comput. 10 (1989); T = (I + D S)^-1 D with D = diag(tau), and S the products of
    the v_i above the diagonal.
    """
    columns = tau.shape[-1]
    below = clang.tril(input[..., :columns], -1)
    V = below + prims.pad_matrices(prims.identity_like(input, columns), input.shape[-2], columns)
    products = clang.triu(prims.mH(V) @ V, 1) * clang.unsqueeze(tau, -1)
    T = prims.linalg_solve_triangular(products, prims.diagonal_matrix(tau), upper=True, unitriangular=True)
    return V, T


def _check_reflections(op: str, input: TensorProxy, tau: TensorProxy) -> None:
    torch_check(input.ndim >= 2, lambda: f"{op}: input must have at least 2 dimensions, but it is {input}")
    torch_check(
        same_shape(tau.shape[:-1], input.shape[:-2]),
        lambda: f"{op}: tau must have one dimension less than input, and its batch dims: they are {tau} and {input}",
    )
    torch_check(
        tau.dtype == input.dtype,
        lambda: f"{op}: tau dtype must be equal to input's dtype, but they are {tau} and {input}",
    )
    torch_check(
        not prims.statically_true(tau.shape[-1] > input.shape[-1]),
        lambda: f"{op}: input.shape[-1] must be greater than or equal to tau.shape[-1]: they are {input} and {tau}",
    )


def _product(op: str, input: TensorProxy, tau: TensorProxy) -> TensorProxy:
    _check_reflections(op, input, tau)
    torch_check(
        not prims.statically_true(input.shape[-2] < input.shape[-1]),
        lambda: f"{op}: input.shape[-2] must be greater than or equal to input.shape[-1], but it is {input}",
    )
    V, T = _reflections(op, input, tau)
    rows, columns = input.shape[-2:]
    return prims.pad_matrices(prims.identity_like(input, columns), rows, columns) - V @ (
        T @ prims.mH(V[..., :columns, :])
    )


@torchsymbol(torch.linalg.householder_product)
def householder_product(input: TensorProxy, tau: TensorProxy) -> TensorProxy:
    """Return the first columns of the product of the Householder reflections in geqrf's form."""
    return _product("linalg.householder_product", input, tau)


@torchsymbol(torch.orgqr, Tensor.orgqr)
def orgqr(input: TensorProxy, input2: TensorProxy) -> TensorProxy:
    """Return linalg.householder_product under its old name."""
    return _product("orgqr", input, input2)


@torchsymbol(torch.ormqr, Tensor.ormqr)
def ormqr(
    input: TensorProxy, input2: TensorProxy, input3: TensorProxy, left: bool = True, transpose: bool = False
) -> TensorProxy:
    """Return Q @ input3, or input3 @ Q, for the product Q of Householder reflections in geqrf's form, or its adjoint.

    Shapes: input (..., m, k), input2 (..., k), and m rows of input3, or columns.
    """
    _check_reflections("ormqr", input, input2)
    torch_check(
        same_shape(input3.shape[:-2], input.shape[:-2]),
        lambda: f"ormqr: other must have input's batch dims, but they are {input3} and {input}",
    )
    torch_check(
        prims.same(input3.shape[-2 if left else -1], input.shape[-2]),
        lambda: f"ormqr: other is {input3}, which does not fit {input}",
    )
    torch_check(
        input3.dtype == input.dtype, lambda: f"ormqr: other must have input's dtype, but they are {input3} and {input}"
    )
    V, T = _reflections("ormqr", input, input2)
    T = prims.mH(T) if transpose else T
    if left:
        return input3 - V @ (T @ (prims.mH(V) @ input3))
    return input3 - ((input3 @ V) @ T) @ prims.mH(V)


@register_grad(ormqr)
def _ormqr_grad(
    input: TensorProxy, input2: TensorProxy, input3: TensorProxy, left: bool = True, transpose: bool = False
) -> TensorProxy:
    """Return no gradient of the reflections if a tensor is empty, as torch does."""
    if not any(prims.statically_true(x.numel() == 0) for x in (input, input2, input3)):
        return NotImplemented
    out = ormqr(input, input2, input3, left, transpose)
    put_grad(input3, ormqr(input, input2, get_grad(out), left, not transpose))
    end_grad(input)
    end_grad(input2)
    return out
