"""The singular value decompositions of low rank, by random projections."""

import math

import torch

from forge import clang, prims
from forge.ir import Tag, TensorProxy, check
from forge.prims.core import statically_true
from forge.torchlang.core import torchsymbol

Triple = tuple[TensorProxy, TensorProxy, TensorProxy]


def _svd(A: TensorProxy, q: int, niter: int) -> Triple:
    """Return (U, S, V) of q singular values, from a basis of A's range made by products with random vectors.

    Source: N. Halko, P.-G. Martinsson and J. Tropp, Finding structure with randomness, arXiv:0909.4061, algorithms 4.4
    and 5.1.
    """
    if A.shape[-2] < A.shape[-1]:
        U, S, V = _svd_of_tall(prims.mH(A), q, niter)
        return V, S, U
    return _svd_of_tall(A, q, niter)


def _svd_of_tall(A: TensorProxy, q: int, niter: int) -> Triple:
    basis = _basis(A @ _noise(A, q))
    for _ in range(niter):
        basis = _basis(A @ _basis(prims.mH(A) @ basis))
    U, S, Vh = prims.linalg_svd(prims.mH(basis) @ A, False)
    return basis @ U, S, prims.mH(Vh)


def _noise(A: TensorProxy, q: int) -> TensorProxy:
    """Return random columns as torch.randn draws them: the parts of a complex number have half its variance."""
    shape = (A.shape[-1], q)
    if not A.dtype.is_complex:
        return prims.normal(shape, 0.0, 1.0, A.dtype, A.device)
    parts = prims.normal((*shape, 2), 0.0, math.sqrt(0.5), prims.real_dtype(A.dtype), A.device)
    return parts[..., 0] + parts[..., 1] * 1j


def _basis(x: TensorProxy) -> TensorProxy:
    return prims.linalg_qr(x, "reduced")[0]


@torchsymbol(torch.svd_lowrank, tags=[Tag.RANDOM])
def svd_lowrank(A: TensorProxy, q: int | None = 6, niter: int | None = 2, M: TensorProxy | None = None) -> Triple:
    """Return approximate (U, S, V) of the q largest singular values of A - M, after `niter` iterations from random
    vectors."""
    A = A if M is None else A - clang.expand(M, A.shape)
    return _svd(A, 6 if q is None else int(q), 2 if niter is None else int(niter))


@torchsymbol(torch.pca_lowrank, tags=[Tag.RANDOM])
def pca_lowrank(A: TensorProxy, q: int | None = None, center: bool = True, niter: int = 2) -> Triple:
    """Return svd_lowrank of a matrix whose rows are samples, after subtraction of their mean if `center`."""
    shorter = torch.sym_min(*A.shape[-2:])
    q = int(torch.sym_min(6, shorter)) if q is None else int(q)
    check(
        q >= 0 and not statically_true(q > shorter),
        lambda: f"pca_lowrank: q(={q}) must be non-negative integer and not greater than min(m, n)={shorter}",
    )
    check(niter >= 0, lambda: f"pca_lowrank: niter(={niter}) must be non-negative integer")
    return _svd(A - clang.mean(A, -2, True) if center else A, q, int(niter))
