"""The discrete Fourier transforms of complex and of real numbers.

normalization is torch's code: 0 leaves the sum unscaled, 1 divides it by the square root of the number of terms, 2 by
that number. A transform is linear, and the gradient rule of each is its adjoint; forwards and backwards are adjoint to
each other, under every normalization.
"""

import torch

from forge.ir import Dim, TensorProxy, check, get_grad, put_grad, register_grad
from forge.prims.core import like, primitive, register_vjp
from forge.prims.creation import iota
from forge.prims.elementwise import COMPLEX, check_dtype
from forge.prims.shape import pad, reshape


@primitive()
def fft_c2c(x: TensorProxy, dim: list[int], normalization: int, forward: bool) -> TensorProxy:
    """Return the transform over `dim`: forward with e^(-2 pi i jk / n), else with e^(2 pi i jk / n).

    Dtypes: complex, and out the same.
    """
    check_dtype("prims.fft_c2c", x, COMPLEX)
    return like(x)


@primitive()
def fft_r2c(x: TensorProxy, dim: list[int], normalization: int, onesided: bool) -> TensorProxy:
    """Return the forward transform of real numbers over `dim`.

    Shapes: x's; onesided: the first half of dim[-1], n // 2 + 1 of n, which determines the other.
    Dtypes: floating point; out has the corresponding complex dtype.
    """
    check(x.dtype.is_floating_point, lambda: f"prims.fft_r2c: x is {x}, but must be floating point", TypeError)
    shape = list(x.shape)
    if onesided:
        shape[dim[-1]] = shape[dim[-1]] // 2 + 1
    return like(x, shape=shape, dtype=x.dtype.to_complex())


@primitive()
def fft_c2r(x: TensorProxy, dim: list[int], normalization: int, last_dim_size: Dim) -> TensorProxy:
    """Return the backward transform over `dim` whose result is real.

    Shapes: x is the first half of the transformed numbers, out has last_dim_size in dim[-1].
    Dtypes: complex, and out that of the parts.
    """
    check_dtype("prims.fft_c2r", x, COMPLEX)
    shape = [last_dim_size if i == dim[-1] else size for i, size in enumerate(x.shape)]
    return like(x, shape=shape, dtype=x.dtype.to_real())


register_vjp(fft_c2c, x=lambda g, dim, normalization, forward: fft_c2c(g, dim, normalization, not forward))


@register_grad(fft_r2c)
def _r2c_grad(x: TensorProxy, dim: list[int], normalization: int, onesided: bool) -> TensorProxy:
    """Treat the gradient of the missing half as 0."""
    out = fft_r2c(x, dim, normalization, onesided)
    g = get_grad(out)
    if onesided:
        missing = [(0, x.shape[i] - g.shape[i] if i == dim[-1] else 0) for i in range(x.ndim)]
        g = pad(g, tuple(missing), 0)
    put_grad(x, fft_c2c(g, dim, normalization, False))  # put_grad takes the real part
    return out


@register_grad(fft_c2r)
def _c2r_grad(x: TensorProxy, dim: list[int], normalization: int, last_dim_size: Dim) -> TensorProxy:
    """Count twice the elements that also stand for their mirror image: all but the first and, for an even length, the
    last."""
    out = fft_c2r(x, dim, normalization, last_dim_size)
    half = fft_r2c(get_grad(out), dim, normalization, True)
    size = half.shape[dim[-1]]
    place = iota(size, 0, 1, torch.int64, half.device)
    twice = (place > 0) & (place <= last_dim_size - size)
    weight = reshape(twice.where(2, 1), tuple(size if i == dim[-1] else 1 for i in range(x.ndim)))
    put_grad(x, half * weight)
    return out
