"""Matrices that can be factored, as data: samples of the families of linear algebra."""

from collections.abc import Callable
from functools import partial

import torch

from forge.testing.table import Value, op, t, wrong

SOLVED = (torch.float32, torch.float64, torch.complex64)  # the dtypes of torch's linear algebra


register = partial(op, dtypes=SOLVED)


def _near_diagonal(x: torch.Tensor) -> torch.Tensor:
    """Return matrices of full rank, with diagonal elements, eigenvalues and singular values far from each other."""
    side = min(x.shape[-2:])
    x = x * 0.4
    x.diagonal(dim1=-2, dim2=-1).add_(torch.arange(2, side + 2, device=x.device))
    return x


def _hermitian(x: torch.Tensor) -> torch.Tensor:
    return _near_diagonal((x + x.mH) / 2)


def _matrices(make: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...], column_major: bool) -> Value:
    x = (t(*shape) / 3).then(make)
    return x.then(lambda x: x.mT.clone(memory_format=torch.contiguous_format).mT) if column_major else x


def regular(*shape: int, column_major: bool = False) -> Value:
    """Return matrices of full rank, with singular values that are not near each other."""
    return _matrices(_near_diagonal, shape, column_major)


def hermitian(*shape: int, column_major: bool = False) -> Value:
    """Return symmetric or Hermitian, positive definite matrices."""
    return _matrices(_hermitian, shape, column_major)


def lower(*shape: int, column_major: bool = False) -> Value:
    """Return lower triangular matrices."""
    return _matrices(lambda x: _near_diagonal(x).tril(), shape, column_major)


def singular(*shape: int) -> Value:
    """Return matrices whose last column is the first."""
    return _matrices(_last_as_first, shape, False)


def _last_as_first(x: torch.Tensor) -> torch.Tensor:
    x = _near_diagonal(x)
    x[..., -1] = x[..., 0]
    return x


FLAT = wrong(t(3), match="2 dim|2 or more dim|Dimension out of range|at least 2")
OBLONG = wrong(t(2, 3), match="square")
