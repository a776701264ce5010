"""The distances of torch between whole tensors and between rows, and the rescaling of slices to a norm."""

import math

import torch
from torch import Tensor

from forge import clang, prims
from forge.ir import TensorProxy, get_grad, outside_regions, put_grad, register_grad
from forge.prims.core import check_dim, statically_true, torch_check
from forge.torchlang.core import torchsymbol
from forge.torchlang.vector_norms import vector_norm


@torchsymbol(torch.dist, Tensor.dist)
def dist(input: TensorProxy, other: TensorProxy, p: float = 2) -> TensorProxy:
    """Return the p-norm of input - other."""
    return vector_norm(clang.sub(input, other), p)


@torchsymbol(torch.renorm, Tensor.renorm, inplace=Tensor.renorm_)
def renorm(input: TensorProxy, p: float, dim: int, maxnorm: float) -> TensorProxy:
    """Return input with every slice along `dim` whose p-norm exceeds maxnorm scaled down to that norm."""
    torch_check(not isinstance(p, complex), lambda: f"renorm: p must be real-valued, but is {p}")
    torch_check(p > 0, lambda: f"renorm: non-positive-norm not supported: p is {p}")
    torch_check(
        not isinstance(maxnorm, complex) and maxnorm >= 0,
        lambda: f"renorm: expected maxnorm to be >= 0 but got {maxnorm}",
    )
    torch_check(input.ndim > 1, lambda: f"renorm: input needs at least 2 dimensions, but it is {input}")
    norm, _ = _norm_of_slices(input, p, dim)
    factor = clang.where(norm > maxnorm, maxnorm / (norm + 1e-7), 1)
    return clang.mul(input, clang.convert(factor, prims.real_dtype(input.dtype)))


def _norm_of_slices(input: TensorProxy, p: float, dim: int) -> tuple[TensorProxy, tuple[int, ...]]:
    """Return the norms and the reduced dims. Dtypes: torch's accumulation dtypes; on a CPU, float64 for float32.
    Source: at::toAccumulateType."""
    dim = check_dim("renorm", dim, input.ndim)
    dims = tuple(i for i in range(input.ndim) if i != dim)
    wide = clang.wider(input.dtype)
    if wide == input.dtype and input.device.type == "cpu":
        wide = {torch.float32: torch.float64, torch.complex64: torch.complex128}.get(wide, wide)
    return vector_norm(clang.convert(input, wide), p, dims, True), dims


@register_grad(renorm)
def _renorm_grad(input: TensorProxy, p: float, dim: int, maxnorm: float) -> TensorProxy:
    """Compute in torch's order: the part along a slice's own direction is the rounding error of its terms."""
    out = renorm(input, p, dim, maxnorm)
    g, (norm, dims) = get_grad(out), _norm_of_slices(input, p, dim)
    along = clang.sum(clang.convert(clang.real(clang.conj(input) * g), norm.dtype), dims, True)
    inverse = 1 / (norm + 1e-7)
    scaled = inverse * maxnorm * (g - inverse * clang.norm_backward(input, p, dims, norm, along))
    put_grad(input, clang.where(norm > maxnorm, clang.convert(scaled, g.dtype), g))
    return out


# between rows


def _pairs(input: TensorProxy) -> tuple[TensorProxy, TensorProxy, TensorProxy]:
    """Return the differences of every two rows, and the indices of the first and the second."""
    rows = int(input.shape[0])
    places = prims.triangle_indices(True, rows, rows, 1, torch.int64, input.device)
    first, second = clang.select(places, 0, 0), clang.select(places, 0, 1)
    return prims.index(input, (first,)) - prims.index(input, (second,)), first, second


@torchsymbol(torch.pdist)
def pdist(input: TensorProxy, p: float = 2) -> TensorProxy:
    """Return the p-norm distances of all pairs of rows: of the first to the second, to the third, …, of the second to
    the third.

    Shapes: input is (n, features); out is (n * (n - 1) / 2,). Dtypes: floating point.
    """
    torch_check(input.ndim == 2, lambda: f"pdist only supports 2D tensors, got: {input}")
    torch_check(
        input.dtype.is_floating_point, lambda: f"pdist only supports floating-point dtypes, but input is {input}"
    )
    torch_check(p >= 0, lambda: f"pdist only supports non-negative p values, but p is {p}")
    difference = _pairs(input)[0]
    if statically_true(input.shape[1] == 0):
        return clang.sum(difference, 1)
    return clang.vector_norm(difference, p, (1,))


@register_grad(pdist)
def _pdist_grad(input: TensorProxy, p: float = 2) -> TensorProxy:
    out = pdist(input, p)
    difference, first, second = _pairs(input)
    slope = _slope(difference, clang.unsqueeze(out, 1), p) * clang.unsqueeze(get_grad(out), 1)
    gradient = prims.full(input.shape, 0, input.dtype, input.device)
    gradient = prims.index_put(gradient, (first,), slope, True)
    put_grad(input, prims.index_put(gradient, (second,), -slope, True))
    return out


def _slope(difference: TensorProxy, distance: TensorProxy, p: float) -> TensorProxy:
    """Return the derivative of a p-norm with respect to its elements. Where it does not exist, use torch's: 0 at 0, and
    1 for every largest element."""
    sign = clang.sgn(difference)
    if p == 0:
        return difference * 0
    if p == 1:
        return sign
    if math.isinf(p):
        with outside_regions():
            largest = clang.abs(difference) == distance
        return clang.where(largest, sign, 0)
    smooth = difference != 0 if p < 1 else distance != 0
    size = clang.where(smooth, clang.abs(difference), 1)
    return clang.where(smooth, sign * (size / clang.where(smooth, distance, 1)) ** (p - 1), 0)
