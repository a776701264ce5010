"""Gradients of matrices on which a formula fails: singular ones, those with equal eigenvalues; and their errors."""

from collections.abc import Callable

import pytest
import torch

import forge
from forge.api.functional import Direct

linalg = torch.linalg
Matrix = list[list[float]]

SINGULAR = [[1.0, 2.0], [2.0, 4.0]]
SINGULAR_3 = [[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [1.0, 0.0, 1.0]]
IDENTITY = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
ZEROS = [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
TWINS = [[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
PLANE = [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 2.0]]


def _gradients(function: Callable, matrix: Matrix, dtype: torch.dtype, *, again: bool = False) -> list:
    A = torch.tensor(matrix, dtype=dtype).requires_grad_()
    out = function(A)
    (gradient,) = torch.autograd.grad(out, A, torch.ones_like(out) * 2, create_graph=again)
    if not again:
        return [gradient]
    weights = torch.arange(1.0, gradient.numel() + 1).reshape(gradient.shape).to(dtype)
    return [gradient, torch.autograd.grad(gradient, A, weights)[0]]


def _weighted(x: torch.Tensor) -> torch.Tensor:
    """Return a function of x that does not depend on signs or phases."""
    return (x.abs() ** 2 * torch.arange(1.0, x.numel() + 1).reshape(x.shape)).sum()


DEGENERATE = {
    "det, rank 1": (linalg.det, SINGULAR),
    "det, rank 2": (linalg.det, SINGULAR_3),
    "det, 0": (linalg.det, [[0.0, 0.0], [0.0, 0.0]]),
    "slogdet": (lambda A: linalg.slogdet(A)[1], SINGULAR),
    "logdet": (torch.logdet, SINGULAR),
    "eigvalsh, twins": (linalg.eigvalsh, TWINS),
    "eigh, values of twins": (lambda A: linalg.eigh(A)[0], IDENTITY),
    "eigh, vectors of twins": (lambda A: _weighted(linalg.eigh(A)[1]), TWINS),
    "eigvals, twins": (lambda A: linalg.eigvals(A).abs(), TWINS),
    "svdvals, twins": (linalg.svdvals, IDENTITY),
    "svdvals, 0": (linalg.svdvals, ZEROS),
    "svd, values alone": (lambda A: linalg.svd(A)[1], IDENTITY),
    "svd, U alone": (lambda A: _weighted(linalg.svd(A)[0]), PLANE),
    "svd, U and V": (lambda A: sum(map(_weighted, linalg.svd(A)[::2])), PLANE),
    "svd, U of twins": (lambda A: _weighted(linalg.svd(A)[0]), TWINS),
    "svd, U of wide zeros": (lambda A: _weighted(linalg.svd(A, full_matrices=False)[0]), ZEROS),
    "pinv": (lambda A: linalg.pinv(A, rtol=1e-6), SINGULAR_3),
    "nuclear norm": (lambda A: linalg.matrix_norm(A, "nuc"), SINGULAR_3),
    "norm 2, twins": (lambda A: linalg.matrix_norm(A, 2), IDENTITY),
    "norm -2, 0": (lambda A: linalg.matrix_norm(A, -2), ZEROS),
    "cond": (linalg.cond, SINGULAR),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=["real", "complex"])
@pytest.mark.parametrize("name", DEGENERATE)
def test_gradients_of_degenerate_matrices_are_torchs(name: str, dtype: torch.dtype) -> None:
    function, matrix = DEGENERATE[name]
    theirs = _gradients(function, matrix, dtype)
    torch.testing.assert_close(_gradients(Direct(function), matrix, dtype), theirs, equal_nan=True)


PHASES = {
    "eigh": lambda A: linalg.eigh(A)[1],
    "eig": lambda A: linalg.eig(A)[1],
    "svd": lambda A: linalg.svd(A)[0],
}


@pytest.mark.parametrize("name", PHASES)
def test_a_gradient_that_depends_on_a_phase_raises(name: str) -> None:
    """The derivative of |V|^2 does not depend on it; that of V times i does."""
    for function in (PHASES[name], Direct(PHASES[name])):
        A = torch.randn(3, 3, dtype=torch.complex128, requires_grad=True)
        vectors = function(A + A.mH)
        torch.autograd.grad(vectors, A, vectors.detach(), retain_graph=True)
        with pytest.raises(RuntimeError, match="specified up to multiplication"):
            torch.autograd.grad(vectors, A, vectors.detach() * 1j)


REFUSED = {
    "solve": lambda A: linalg.solve(A, A[0]),
    "inv": linalg.inv,
    "cholesky": linalg.cholesky,
    "lu_factor": linalg.lu_factor,
}


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_solved_raises_torchs_error(name: str, training: bool) -> None:
    A = torch.zeros(3, 3, requires_grad=training)
    with pytest.raises(RuntimeError) as theirs:
        REFUSED[name](A)
    with pytest.raises(type(theirs.value)):
        forge.jit(REFUSED[name])(A)


def test_a_mode_without_a_gradient_says_so_in_the_backward() -> None:
    for mode in ("r", "complete"):
        A = torch.randn(4, 3, requires_grad=True)
        R = forge.jit(linalg.qr)(A, mode)[1]
        with pytest.raises(RuntimeError, match="qr"):
            R.sum().backward()


TWICE = {
    "det": (linalg.det, [[2.0, 1.0, 0.0], [1.0, 3.0, 1.0], [0.0, 1.0, 4.0]]),
    "det, equal singular values": (linalg.det, IDENTITY),
    "det, rank 1": (linalg.det, SINGULAR),
    "det, rank 2": (linalg.det, SINGULAR_3),
    "svdvals, rank 1": (lambda A: linalg.svdvals(A)[0], SINGULAR),
}


@pytest.mark.parametrize("name", TWICE)
def test_second_gradients_of_degenerate_matrices_are_torchs(name: str) -> None:
    function, matrix = TWICE[name]
    theirs = _gradients(function, matrix, torch.float64, again=True)
    ours = _gradients(Direct(function), matrix, torch.float64, again=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
