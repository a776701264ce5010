"""Matrices that can be factored, as data: samples of the families of linear algebra."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from forge.testing.opinfo import OpInfo, register_opinfo
from forge.testing.opinfos.specs import Spec, calls, errors, wrong

SOLVED = (torch.float32, torch.float64, torch.complex64)  # what torch's linear algebra takes


def register(name: str, op: Any, samples: tuple, mistakes: tuple, **known: Any) -> None:
    """The OpInfo of an operation on matrices."""
    known = {"dtypes": SOLVED, **known}
    register_opinfo(OpInfo(name, op, calls(*samples), errors(*mistakes), **known))


@dataclass(frozen=True)
class Matrices(Spec):
    """Random matrices with a property, which `make` gives them."""

    make: Callable[[torch.Tensor], torch.Tensor] = torch.clone

    def tensor(self, info: OpInfo, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        x = self.make(info.tensor(self.shape, device, self.dtype or dtype) / 3)
        return x.mT.clone(memory_format=torch.contiguous_format).mT if self.swapped else x


def _near_diagonal(x: torch.Tensor) -> torch.Tensor:
    """Of full rank; diagonal elements, eigenvalues and singular values are far from each other."""
    side = min(x.shape[-2:])
    x = x * 0.4
    x.diagonal(dim1=-2, dim2=-1).add_(torch.arange(2, side + 2, device=x.device))
    return x


def _hermitian(x: torch.Tensor) -> torch.Tensor:
    return _near_diagonal((x + x.mH) / 2)


def regular(*shape: int, **options: Any) -> Matrices:
    """Matrices of full rank, with singular values that are not near each other."""
    return Matrices(shape, make=_near_diagonal, **options)


def hermitian(*shape: int, **options: Any) -> Matrices:
    """Symmetric or Hermitian, positive definite matrices."""
    return Matrices(shape, make=_hermitian, **options)


def lower(*shape: int, **options: Any) -> Matrices:
    """Lower triangular matrices."""
    return Matrices(shape, make=lambda x: _near_diagonal(x).tril(), **options)


def singular(*shape: int, **options: Any) -> Matrices:
    """Matrices whose last column is the first."""
    return Matrices(shape, make=_last_as_first, **options)


def _last_as_first(x: torch.Tensor) -> torch.Tensor:
    x = _near_diagonal(x)
    x[..., -1] = x[..., 0]
    return x


FLAT = wrong(Spec((3,)), match="2 dim|2 or more dim|Dimension out of range|at least 2")
OBLONG = wrong(Spec((2, 3)), match="square")
