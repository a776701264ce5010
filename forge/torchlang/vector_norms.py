"""The norms of torch, and distances and similarities made of them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from forge import clang, prims
from forge.ir import TensorProxy, check, short_dtype
from forge.prims.core import check_dim, same, torch_check
from forge.torch_internals.versions import WRONG_OPTION
from forge.torchlang.core import torchsymbol
from forge.torchlang.solvers import check_square, inv_ex
from forge.torchlang.spectral import svdvals


def _norm_input(op: str, x: TensorProxy, dtype: torch.dtype | None) -> TensorProxy:
    torch_check(
        dtype is None or dtype.is_complex == x.is_complex(),
        lambda: f"{op}: dtype should be {'complex' if x.is_complex() else 'real'} as {x} is, but got {dtype}",
    )
    torch_check(
        dtype is None or torch.promote_types(x.dtype, dtype) == dtype,
        lambda: f"{op}: the dtype of {x} should be convertible without narrowing to the specified dtype {dtype}",
    )
    x = x if dtype is None else clang.convert(x, dtype)
    torch_check(
        clang.category(x.dtype) > 1,
        lambda: f"{op}: Expected a floating point or complex tensor as input. Got {x}; convert it first",
    )
    return x


def _vector_norm(
    op: str, x: TensorProxy, ord: float, dim: int | Sequence[int] | None, keepdim: bool, dtype: torch.dtype | None
) -> TensorProxy:
    x = _norm_input(op, x, dtype)
    dims = clang.canonical_dims(op, dim, x.ndim)
    torch_check(
        (ord > 0 and ord != float("inf")) or not any(prims.statically_true(x.shape[dim] == 0) for dim in dims),
        lambda: f"{op}: cannot compute the {ord} norm of {x} over an empty dimension, as it has no identity",
    )
    return clang.vector_norm(x, ord, dims, keepdim)


@torchsymbol(torch.linalg.vector_norm)
def vector_norm(
    x: TensorProxy,
    ord: float = 2,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> TensorProxy:
    """Return (sum of |x|^ord)^(1 / ord) over `dim` (all by default)."""
    return _vector_norm("linalg.vector_norm", x, ord, dim, keepdim, dtype)


def _matrix_norm(
    op: str, x: TensorProxy, ord: float | str, dims: Sequence[int], keepdim: bool, dtype: torch.dtype | None
) -> TensorProxy:
    torch_check(x.ndim >= 2, lambda: f"{op}: The input tensor A must have at least 2 dimensions, but it is {x}")
    torch_check(len(dims) == 2, lambda: f"{op}: dim must be a 2-tuple of ints, but is {dims}")
    if ord == "fro":
        return _vector_norm(op, x, 2, dims, keepdim, dtype)
    if ord in ("nuc", 2, -2):
        return _spectral_norm(_norm_input(op, x, dtype), ord, prims.check_dims(op, dims, x.ndim), keepdim)
    torch_check(
        ord in (1, -1, float("inf"), -float("inf")), lambda: f"{op}: Order {ord} not supported for a matrix norm"
    )
    x = _norm_input(op, x, dtype)
    summed, axis = prims.check_dims(op, dims, x.ndim)
    if ord in (float("inf"), -float("inf")):
        summed, axis = axis, summed
    sums = clang.vector_norm(x, 1, (summed,), True)
    largest = ord in (1, float("inf"))
    best = _largest(sums, axis) if largest else clang.amin(sums, axis, True)
    return best if keepdim else prims.squeeze(best, tuple(sorted((summed, axis))))


def _spectral_norm(x: TensorProxy, ord: float | str, dims: Sequence[int], keepdim: bool) -> TensorProxy:
    """Return a norm of singular values: the sum ("nuc"), the largest (2) or the smallest (-2)."""
    values = svdvals(clang.movedim(x, dims, (-2, -1)))
    if ord == "nuc":
        norm = clang.sum(values, -1, True)
    else:
        norm = _largest(values, values.ndim - 1) if ord == 2 else clang.amin(values, -1, True)
    norm = prims.squeeze(norm, (norm.ndim - 1,))
    for dim in sorted(dims) if keepdim else ():
        norm = clang.unsqueeze(norm, dim)
    return norm


def _largest(sizes: TensorProxy, dim: int) -> TensorProxy:
    """Return the largest along `dim`, or 0 if it is empty."""
    if prims.statically_true(sizes.shape[dim] == 0):
        return prims.full((*sizes.shape[:dim], 1, *sizes.shape[dim + 1 :]), 0, sizes.dtype, sizes.device)
    return clang.amax(sizes, dim, True)


@torchsymbol(torch.linalg.cond)
def cond(input: TensorProxy, p: float | str | None = None) -> TensorProxy:
    """Return the condition number of matrices in a norm: the norm times that of the inverse; inf for a singular
    matrix."""
    torch_check(
        input.ndim >= 2, lambda: f"linalg.cond: The input tensor must have at least 2 dimensions, but it is {input}"
    )
    check(
        p in (None, "fro", "nuc", 1, -1, 2, -2, math.inf, -math.inf),
        lambda: f"linalg.cond got an invalid norm type: {p}",
        WRONG_OPTION,
    )
    if prims.statically_true(input.numel() == 0):
        return prims.full(input.shape[:-2], 0, prims.real_dtype(input.dtype), input.device)
    if p in (None, 2, -2):
        values = svdvals(input)
        largest, smallest = clang.select(values, -1, 0), clang.select(values, -1, -1)
        return smallest / largest if p == -2 else largest / smallest
    check_square(f"linalg.cond(ord={p})", input)
    if p == "nuc":
        values = svdvals(input)
        return clang.sum(values, -1) * clang.sum(clang.reciprocal(values), -1)
    inverse, info = inv_ex(input)
    sizes = [_matrix_norm("linalg.cond", x, p, (-2, -1), False, None) for x in (input, inverse)]
    return clang.where(info == 0, sizes[0] * sizes[1], math.inf)


@torchsymbol(torch.linalg.matrix_norm)
def matrix_norm(
    A: TensorProxy,
    ord: float | str = "fro",
    dim: Sequence[int] = (-2, -1),
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> TensorProxy:
    """Return a norm of matrices: Frobenius, or the extreme absolute sum of rows (inf, -inf) or columns (1, -1)."""
    return _matrix_norm("linalg.matrix_norm", A, ord, dim, keepdim, dtype)


@torchsymbol(torch.linalg.norm)
def linalg_norm(
    A: TensorProxy,
    ord: float | str | None = None,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> TensorProxy:
    """Return a vector norm over one dim (or of all elements without ord), a matrix norm over two."""
    if ord is not None and dim is None:
        torch_check(
            A.ndim in (1, 2),
            lambda: f"linalg.norm: If dim is not specified but ord is, the input must be 1D or 2D. Got {A}",
        )
        dim = tuple(range(A.ndim))
    if ord is None:
        return _vector_norm("linalg.norm", A, 2, dim, keepdim, dtype)
    dims = clang.as_tuple(dim)
    if len(dims) == 1 and not isinstance(ord, str):
        return _vector_norm("linalg.norm", A, ord, dims, keepdim, dtype)
    return _matrix_norm("linalg.norm", A, ord, dims, keepdim, dtype)


@torchsymbol(torch.norm)
def norm(
    input: TensorProxy,
    p: float | str | None = "fro",
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    out: None = None,
    dtype: torch.dtype | None = None,
) -> TensorProxy:
    """Return the p-norm of the elements over `dim`; "fro" is 2."""
    return _p_norm(input, p, dim, keepdim, dtype)


@torchsymbol(Tensor.norm)
def tensor_norm(
    self: TensorProxy,
    p: float | str | None = "fro",
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> TensorProxy:
    """Return the p-norm of the elements over `dim`; "fro" is 2."""
    return _p_norm(self, p, dim, keepdim, dtype)


def _p_norm(
    x: TensorProxy, p: float | str | None, dim: int | Sequence[int] | None, keepdim: bool, dtype: torch.dtype | None
) -> TensorProxy:
    if p == "nuc":
        return _nuclear_norm(x, dim, keepdim, dtype)
    torch_check(not isinstance(p, str) or p == "fro", lambda: f"norm: p is {p!r}, but must be a number, 'fro' or 'nuc'")
    return _vector_norm("norm", x, 2 if p is None or isinstance(p, str) else p, dim, keepdim, dtype)


def _nuclear_norm(
    x: TensorProxy, dim: int | Sequence[int] | None, keepdim: bool, dtype: torch.dtype | None
) -> TensorProxy:
    dims = tuple(range(x.ndim)) if dim is None else clang.as_tuple(dim)
    torch_check(len(dims) == 2, lambda: f"norm: p='nuc' wants two dims, but x is {x} and dim is {dim}")
    return _matrix_norm("norm", x, "nuc", dims, keepdim, dtype)


@torchsymbol(torch.cosine_similarity)
def cosine_similarity(x1: TensorProxy, x2: TensorProxy, dim: int = 1, eps: float = 1e-8) -> TensorProxy:
    """Return x1 · x2 / (|x1| |x2|) along `dim`, with each norm at least eps."""
    x1, x2 = clang.prepare("cosine_similarity", x1, x2)
    torch_check(
        x1.is_floating_point(),
        lambda: f"cosine_similarity: expected common dtype to be floating point, yet it is {short_dtype(x1.dtype)}",
    )
    dims = (check_dim("cosine_similarity", dim, x1.ndim),) if x1.ndim else ()
    norms = [clang.vector_norm(x, 2, dims, True) for x in (x1, x2)]
    norms = [prims.with_data(norm, clang.where(norm < eps, eps, norm)) for norm in norms]  # torch clamps without grad
    units = [x / norm for x, norm in zip((x1, x2), norms, strict=True)]
    return clang.sum(units[0] * units[1], dims) if dims else units[0] * units[1]


@torchsymbol(torch.pairwise_distance)
def pairwise_distance(
    x1: TensorProxy, x2: TensorProxy, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> TensorProxy:
    """Return the p-norm of x1 - x2 + eps along the last dim."""
    difference = clang.add(clang.sub(x1, x2), eps)
    return _vector_norm("pairwise_distance", difference, p, -1 if difference.ndim else None, keepdim, None)


@torchsymbol(torch.cdist)
def cdist(
    x1: TensorProxy, x2: TensorProxy, p: float = 2.0, compute_mode: str = "use_mm_for_euclid_dist_if_necessary"
) -> TensorProxy:
    """Return out with out[..., i, j] = the p-norm of x1[..., i, :] - x2[..., j, :]. compute_mode is torch's choice of a
    kernel.

    Shapes: x1 (..., P, M), x2 (..., R, M), whose batch dims broadcast.
    """
    torch_check(
        x1.ndim >= 2 and x2.ndim >= 2, lambda: f"cdist only supports at least 2D tensors, but got {x1} and {x2}"
    )
    torch_check(
        same(x1.shape[-1], x2.shape[-1]),
        lambda: f"cdist: X1 and X2 must have the same number of columns, but they are {x1} and {x2}",
    )
    for name, value in (("X1", x1), ("X2", x2)):
        torch_check(
            value.is_floating_point(),
            lambda name=name, value=value: f"cdist only supports floating-point dtypes, {name} got: {value}",
        )
    torch_check(p >= 0, lambda: f"cdist only supports non-negative p values, but p is {p}")
    difference = clang.unsqueeze(x1, -2) - clang.unsqueeze(x2, -3)
    return _vector_norm("cdist", difference, p, -1, False, None)
