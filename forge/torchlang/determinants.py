"""Determinants and their logarithms."""

import math

import torch
from torch import Tensor

from forge import clang, prims
from forge.ir import TensorProxy
from forge.torchlang.aliases import results
from forge.torchlang.core import torchsymbol


@torchsymbol(torch.linalg.det)
def linalg_det(A: TensorProxy) -> TensorProxy:
    """Return the determinant of each matrix."""
    return prims.linalg_det(A)


@torchsymbol(torch.det, Tensor.det)
def det(input: TensorProxy) -> TensorProxy:
    """Return the determinant of each matrix."""
    return linalg_det(input)


@torchsymbol(torch.linalg.slogdet)
def linalg_slogdet(A: TensorProxy) -> tuple[TensorProxy, TensorProxy]:
    """Return (the sign or phase of each determinant, the logarithm of its absolute value)."""
    return results.linalg_slogdet(prims.linalg_slogdet(A))


@torchsymbol(torch.slogdet, Tensor.slogdet)
def slogdet(input: TensorProxy) -> tuple[TensorProxy, TensorProxy]:
    """Return (the sign or phase of each determinant, the logarithm of its absolute value)."""
    return results.slogdet(linalg_slogdet(input))


@torchsymbol(torch.logdet, Tensor.logdet)
def logdet(input: TensorProxy) -> TensorProxy:
    """Return the logarithm of each determinant; nan if it is negative."""
    sign, logarithm = linalg_slogdet(input)
    if input.dtype.is_complex:
        return clang.log(sign) + logarithm
    return clang.where(sign == -1, math.nan, logarithm)
