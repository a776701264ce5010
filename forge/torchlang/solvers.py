"""The systems of linear equations, inverses, and powers and exponentials of matrices."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from forge import clang, prims
from forge.ir import Dim, TensorProxy
from forge.prims.core import check_dims, same, torch_check
from forge.torchlang.aliases import results
from forge.torchlang.core import View, torchsymbol
from forge.torchlang.linalg import check_one_dtype

Pair = tuple[TensorProxy, TensorProxy]


@torchsymbol(torch.linalg.inv_ex)
def inv_ex(A: TensorProxy, *, check_errors: bool = False) -> Pair:
    """Return (the inverse of each matrix, the error codes, not 0 for singular matrices)."""
    return results.linalg_inv_ex(prims.linalg_inv_ex(A, check_errors=check_errors))


@torchsymbol(torch.linalg.inv)
def inv(A: TensorProxy) -> TensorProxy:
    """Return the inverse of each matrix."""
    return prims.linalg_inv_ex(A, check_errors=True)[0]


@torchsymbol(torch.inverse, Tensor.inverse)
def inverse(input: TensorProxy) -> TensorProxy:
    """Return the inverse of each matrix."""
    return prims.linalg_inv_ex(input, check_errors=True)[0]


@torchsymbol(torch.linalg.solve_ex)
def solve_ex(A: TensorProxy, B: TensorProxy, *, left: bool = True, check_errors: bool = False) -> Pair:
    """Return (X with A @ X = B, or X @ A = B; the error codes, not 0 for singular matrices)."""
    return results.linalg_solve_ex(prims.linalg_solve_ex(A, B, left=left, check_errors=check_errors))


@torchsymbol(torch.linalg.solve)
def solve(A: TensorProxy, B: TensorProxy, *, left: bool = True) -> TensorProxy:
    """Return X with A @ X = B, or X @ A = B; B may be vectors."""
    return prims.linalg_solve_ex(A, B, left=left, check_errors=True)[0]


@torchsymbol(torch.linalg.tensorinv)
def tensorinv(input: TensorProxy, ind: int = 2) -> TensorProxy:
    """Return the inverse for tensordot: of the matrix of the first `ind` dims and the other dims."""
    torch_check(ind > 0, lambda: f"linalg.tensorinv: Expected a strictly positive integer for 'ind', but got {ind}")
    first, last = input.shape[:ind], input.shape[ind:]
    rows, columns = math.prod(first), math.prod(last)
    torch_check(
        same(rows, columns),
        lambda: (
            "linalg.tensorinv: Expected self to satisfy the requirement prod(self.shape[ind:]) == "
            f"prod(self.shape[:ind]), but it is {input} and ind is {ind}"
        ),
    )
    inverse = prims.linalg_inv_ex(clang.reshape(input, (rows, columns)), check_errors=True)[0]
    return clang.reshape(inverse, (*last, *first))


@torchsymbol(torch.linalg.tensorsolve)
def tensorsolve(input: TensorProxy, other: TensorProxy, dims: Sequence[int] | None = None) -> TensorProxy:
    """Return X with tensordot(input, X, X.ndim) = other; `dims` of input are moved to its end first."""
    if dims is not None:
        axes = check_dims("linalg.tensorsolve", dims, input.ndim)
        input = clang.movedim(input, axes, tuple(range(input.ndim - len(axes), input.ndim)))
    shape = input.shape[other.ndim :]
    rows, columns = math.prod(shape), math.prod(input.shape[: other.ndim])
    torch_check(
        same(rows, columns),
        lambda: (
            "linalg.tensorsolve: Expected self to satisfy the requirement prod(self.shape[other.ndim:]) == "
            f"prod(self.shape[:other.ndim]), but input is {input} and other is {other}"
        ),
    )
    matrix, vector = clang.reshape(input, (rows, columns)), clang.reshape(other, (-1,))
    return clang.reshape(prims.linalg_solve_ex(matrix, vector, check_errors=True)[0], shape)


# powers and exponentials


@torchsymbol(torch.linalg.matrix_exp, torch.matrix_exp, Tensor.matrix_exp)
def matrix_exp(input: TensorProxy) -> TensorProxy:
    """Return the exponential of each matrix."""
    return prims.linalg_matrix_exp(input)


@torchsymbol(torch.linalg.matrix_power, torch.matrix_power, Tensor.matrix_power)
def matrix_power(input: TensorProxy, n: int) -> TensorProxy:
    """Return the n-th power of each matrix; for a negative n, of its inverse."""
    check_square("linalg.matrix_power", input)
    n = int(n)  # the program depends on n
    if n == 0:  # whose gradient is zeros
        never = prims.full(input.shape, False, torch.bool, input.device)
        return clang.where(never, input, prims.identity_like(input, input.shape[-1]))
    if n < 0:
        input, n = prims.linalg_inv_ex(input, check_errors=True)[0], -n
        return input if n == 1 else _power(input, n)
    return prims.clone(input) if n == 1 else _power(input, n)


def _power(x: TensorProxy, n: int) -> TensorProxy:
    """Return a power by squaring; a cube takes two products."""
    if n == 3:
        return (x @ x) @ x
    result: TensorProxy | None = None
    square = x
    while True:
        n, odd = divmod(n, 2)
        if odd:
            result = square if result is None else result @ square
        if n == 0 and result is not None:
            return result
        square = square @ square


def check_square(op: str, x: TensorProxy) -> None:
    """Raise RuntimeError unless x is a batch of square matrices."""
    torch_check(x.ndim >= 2, lambda: f"{op}: The input tensor A must have at least 2 dimensions, but it is {x}")
    torch_check(same(x.shape[-1], x.shape[-2]), lambda: f"{op}: A must be batches of square matrices, but it is {x}")


# vectors


@torchsymbol(torch.linalg.vecdot)
def vecdot(x: TensorProxy, y: TensorProxy, *, dim: int = -1) -> TensorProxy:
    """Return the sum of conj(x) * y along `dim`; other dims broadcast."""
    torch_check(
        clang.category(x.dtype) > 1,
        lambda: f"linalg.vecdot: Expected a floating point or complex tensor as input. Got {x}",
    )
    check_one_dtype("linalg.vecdot", x=x, y=y)
    return clang.sum(clang.conj(x) * y, dim)


@torchsymbol(torch.linalg.vander)
def linalg_vander(x: TensorProxy, *, N: Dim | None = None) -> TensorProxy:
    """Return the powers 0 to N - 1 of each element, as the last dim."""
    torch_check(
        x.dtype != torch.bool,
        lambda: f"linalg.vander supports floating point, complex, and integer tensors, but got {x}",
    )
    x = x if x.ndim else clang.unsqueeze(x, 0)  # as torch does
    count = x.shape[-1] if N is None else N
    torch_check(
        not prims.statically_true(count <= 1), lambda: f"linalg.vander: N must be greater than 1, but it is {count}"
    )
    shape = (*x.shape, count - 1)
    powers = prims.cumprod(clang.expand_to(clang.unsqueeze(x, -1), shape), x.ndim)
    ones = prims.full((*x.shape, 1), 1, powers.dtype, x.device)
    return prims.cat([ones, powers], x.ndim)


@torchsymbol(torch.linalg.diagonal, view=View.ALWAYS)
def linalg_diagonal(A: TensorProxy, *, offset: Dim = 0, dim1: int = -2, dim2: int = -1) -> TensorProxy:
    """Return the elements of matrices whose index along dim2 is the one along dim1 plus `offset`, as the last dim."""
    return clang.diagonal(A, offset, dim1, dim2)
