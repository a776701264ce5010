"""OpInfos of the spectral family.

Complex vectors are known up to a phase, on which a gradient may not depend: they are tested in functions of them that
do not.
"""

import math
from typing import Any

import torch

from forge.testing.opinfo import Directive
from forge.testing.opinfos.matrices import FLAT, OBLONG, SOLVED, hermitian, register, regular, singular
from forge.testing.table import detach_args, sample, t, values, wrong
from forge.torch_internals.versions import WRONG_OPTION

_HERMITIAN = (
    sample(hermitian(3, 3)),
    sample(hermitian(2, 4, 4)),
    sample(hermitian(3, 3, column_major=True)),
    sample(hermitian(3, 3), "U"),
    sample(hermitian(3, 3), UPLO="L"),
    sample(t(0, 0)),
)
_REAL = SOLVED[:2]


def sizes_of_eigh(*args: Any, **kwargs: Any) -> Any:
    """Return eigenvalues, and what does not depend on the phases of eigenvectors."""
    values, vectors = torch.linalg.eigh(*args, **kwargs)
    return values, vectors.abs()


def sizes_of_eig(A: Any) -> Any:
    """Return eigenvalues, and what does not depend on the phases of eigenvectors."""
    values, vectors = torch.linalg.eig(A)
    return values, vectors.abs()


def sizes_of_svd(*args: Any, **kwargs: Any) -> Any:
    """Return singular values, and what does not depend on the phases of singular vectors."""
    U, S, Vh = torch.linalg.svd(*args, **kwargs)
    length = S.shape[-1]
    return U.abs(), S, Vh.abs(), (U[..., :length] * S.unsqueeze(-2).exp()) @ Vh[..., :length, :]


_LETTER = wrong(hermitian(3, 3), "X", match="UPLO")
register("linalg.eigh", _HERMITIAN, FLAT, OBLONG, _LETTER, dtypes=_REAL)
register("linalg.eigh.sizes", _HERMITIAN, FLAT, OBLONG, op=sizes_of_eigh)
register("linalg.eigvalsh", _HERMITIAN, FLAT, OBLONG, _LETTER)
_GENERAL = (sample(regular(3, 3)), sample(regular(2, 4, 4)), sample(regular(3, 3, column_major=True)), sample(t(0, 0)))
register("linalg.eig", _GENERAL, FLAT, OBLONG, op=sizes_of_eig)
_OVERWRITTEN = Directive(
    "skip",
    "torch's kernel for a GPU overwrites a column-major argument, and not in the same way from call to call",
    test="test_inputs_unchanged",
    devices=("cuda",),
)
register("linalg.eigvals", _GENERAL, FLAT, OBLONG, directives=(_OVERWRITTEN,))

_SHAPES = (
    sample(regular(3, 3)),
    sample(regular(2, 4, 4)),
    sample(regular(3, 5), full_matrices=False),
    sample(regular(2, 5, 3), False),
    sample(regular(3, 4)),
    sample(regular(4, 3)),
    sample(regular(3, 3, column_major=True)),
    sample(t(0, 3)),
)
register("linalg.svd", _SHAPES[:4], FLAT, dtypes=_REAL)
register("linalg.svd.sizes", _SHAPES[:4], FLAT, op=sizes_of_svd)
register("linalg.svdvals", _SHAPES[:2] + _SHAPES[4:], FLAT)
register("svd", _SHAPES[:2], sample(regular(4, 3)), sample(regular(3, 3), some=False), FLAT, dtypes=_REAL)
register("svd.values", sample(regular(3, 4), True, False), sample(regular(2, 3, 3), compute_uv=False), FLAT)


# pseudoinverses, ranks

_RANKS = (
    sample(regular(3, 3)),
    sample(regular(2, 4, 3)),
    sample(regular(3, 4, column_major=True)),
    sample(singular(3, 3), rtol=1e-3),
    sample(regular(3, 3), atol=2.5, rtol=0.1),
    sample(regular(2, 3, 3), atol=values([0.1, 2.5], torch.float32)),
    sample(hermitian(3, 3), hermitian=True),
    sample(hermitian(3, 3), 0.1, True),
    sample(t(0, 3)),
)
_FLAT_RANK = wrong(t(3), match="2 or more|at least 2")
register("linalg.pinv", _RANKS, _FLAT_RANK)
register("pinverse", _RANKS[:3], sample(regular(3, 3), 0.1), _FLAT_RANK)
register("linalg.matrix_rank", _RANKS, sample(regular(3, 3), 2.5), _FLAT_RANK, gradient=False)
_NO_NORM = wrong(t(3, 3), 5, error=WRONG_OPTION, match="invalid norm type")
_MISTAKES = (FLAT, _NO_NORM, wrong(t(2, 3), "fro", match="square"))
register(
    "linalg.cond",
    *[sample(regular(2, 3, 3), p) for p in (None, "nuc", 2, -2)],
    [sample(regular(3, 4)), sample(t(2, 0, 0))],
    _MISTAKES,
)


# torch's backward raises, for its forward changes an inverse in place
register(
    "linalg.cond.of_inverses",
    *[sample(regular(2, 3, 3), p) for p in ("fro", 1, -1, math.inf, -math.inf)],
    [sample(values([[0.0, 0.0], [0.0, 0.0]]), 1), sample(values([[1.0, 1.0], [1.0, 1.0]]), "fro")],
    _MISTAKES[1:],
    gradient=False,
    wrap=detach_args(0),
)
