"""OpInfos of the factorizations family."""

import warnings
from typing import Any

import torch

from forge.testing.opinfos.matrices import FLAT, OBLONG, hermitian, lower, register, regular
from forge.testing.table import detach_args, ints, sample, t, values, wrong
from forge.torch_internals.versions import TORCH

warnings.filterwarnings("ignore", message=r"torch\.(lu|qr|svd|cholesky|triangular_solve)")

# triangular systems

_TRIANGULAR = (
    sample(lower(3, 3), t(3, 2), upper=False),
    sample(regular(3, 3), t(3, 2), upper=True),
    sample(regular(2, 3, 3, column_major=True), t(3, 2), upper=True, unitriangular=True),
    sample(lower(3, 3), t(4, 2, 3), upper=False, left=False),
    sample(regular(3, 3), t(2, 3), upper=True, left=False, unitriangular=True),
    sample(t(0, 0), t(0, 2), upper=True),
)
register(
    "linalg.solve_triangular",
    _TRIANGULAR,
    wrong(t(2, 3), t(3, 2), upper=True, match="square"),
    wrong(t(3, 3), t(2, 2), upper=True, match="ncompatible shapes"),
)
register(
    "triangular_solve",
    sample(t(3, 2), regular(3, 3)),
    sample(t(3, 2), lower(3, 3), False),
    sample(t(3, 2), regular(2, 3, 3), transpose=True),
    sample(t(2, 3, 2), regular(3, 3), True, True, True),
    [wrong(t(3), regular(3, 3), match="at least 2 dimensions"), wrong(t(3, 2), t(2, 3), match="square")],
)

# Cholesky's

_POSITIVE = (
    sample(hermitian(3, 3)),
    sample(hermitian(2, 4, 4)),
    sample(hermitian(3, 3, column_major=True)),
    sample(t(0, 0)),
)
_NEGATIVE = wrong(values([[-1.0, 0.0], [0.0, 1.0]]), error=torch.linalg.LinAlgError, match="not positive-definite")
_UPPER = sample(hermitian(2, 3, 3), upper=True)
register("linalg.cholesky_ex linalg.cholesky", _POSITIVE, _UPPER, FLAT, OBLONG)
if TORCH < (2, 15):  # torch.cholesky is an error
    register("cholesky", _POSITIVE, sample(hermitian(3, 3), True), OBLONG)
register(
    "cholesky_inverse",
    sample(lower(3, 3)),
    sample(lower(2, 4, 4, column_major=True)),
    sample(regular(3, 3), True),
    sample(regular(2, 3, 3), upper=False),
    FLAT,
    OBLONG,
)
register(
    "cholesky_solve",
    sample(t(3, 2), lower(3, 3)),
    sample(t(2, 3, 1), lower(3, 3, column_major=True)),
    sample(t(3, 2), regular(2, 3, 3), True),
    sample(t(3, 2), regular(3, 3), upper=False),
    [wrong(t(3), lower(3, 3), match="at least 2 dim"), wrong(t(2, 2), lower(3, 3), match="ncompatible")],
)

# LU

_SHAPES = (
    sample(regular(3, 3)),
    sample(regular(2, 4, 4)),
    sample(regular(3, 5)),
    sample(regular(2, 5, 3)),
    sample(regular(3, 3, column_major=True)),
    sample(t(0, 3)),
)
register("linalg.lu_factor_ex", _SHAPES, sample(regular(3, 3), check_errors=True), FLAT)
register("linalg.lu_factor linalg.lu", _SHAPES, FLAT)
register("lu", _SHAPES[:4], sample(regular(3, 3), get_infos=True), FLAT)
_PIVOTS = values([2, 3, 3], torch.int32)
_UNPACKED_WRONG = (wrong(regular(3, 3), ints(1, 2, 3), match="int32"), wrong(t(3), _PIVOTS, match="2 or more"))
register(
    "lu_unpack",
    sample(regular(3, 3), _PIVOTS),
    sample(regular(3, 5), _PIVOTS),
    sample(regular(5, 3), _PIVOTS),
    sample(regular(3, 3), _PIVOTS, unpack_pivots=False),
    _UNPACKED_WRONG,
)


def unpack_pivots(LU: Any, pivots: Any) -> Any:
    """Return P alone: torch raises in its backward."""
    return torch.lu_unpack(LU.detach(), pivots, unpack_data=False)


register(
    "lu_unpack.pivots",
    [sample(regular(3, 3), _PIVOTS), sample(regular(5, 3), _PIVOTS)],
    _UNPACKED_WRONG[:1],
    gradient=False,
    op=unpack_pivots,
)
register(
    "linalg.lu_solve",
    sample(regular(3, 3), _PIVOTS, t(3, 2)),
    sample(regular(3, 3), _PIVOTS, t(2, 3, 2), adjoint=True),
    sample(regular(3, 3, column_major=True), _PIVOTS, t(2, 3), left=False),
    sample(regular(3, 3), _PIVOTS, t(2, 3), left=False, adjoint=True),
    [wrong(regular(3, 3), _PIVOTS, t(2, 2), match="ncompatible shapes"), wrong(t(3), _PIVOTS, t(3, 1), match="2 dim")],
)
register(
    "lu_solve",
    [sample(t(3, 2), regular(3, 3), _PIVOTS), sample(t(2, 3, 2), regular(3, 3), _PIVOTS)],
    wrong(t(2, 2), regular(3, 3), _PIVOTS, match="ncompatible shapes"),
)

# LDL

register(
    "linalg.ldl_factor",
    [sample(hermitian(3, 3)), sample(hermitian(2, 3, 3), hermitian=True), sample(t(0, 0))],
    FLAT,
    OBLONG,
    gradient=False,
)
register(
    "linalg.ldl_solve",
    sample(hermitian(3, 3), values([1, 2, 3], torch.int32), t(3, 2)),
    sample(hermitian(3, 3), values([1, 2, 3], torch.int32), t(3, 2), hermitian=True),
    wrong(hermitian(3, 3), values([1, 2, 3]), t(3, 2), match="integers"),
    gradient=False,
)

# QR

register(
    "linalg.qr",
    _SHAPES,
    [sample(regular(3, 4), "complete"), sample(regular(2, 3, 3), mode="complete")],
    FLAT,
    wrong(regular(3, 3), "raw", match="mode"),
)
# modes of which torch has no gradient: it raises in the backward
register(
    "linalg.qr.without_gradient",
    [sample(regular(4, 3), "complete"), sample(regular(2, 3, 4), "r")],
    wrong(regular(3, 3), "raw", match="mode"),
    gradient=False,
    wrap=detach_args(0),
)
if TORCH < (2, 15):  # torch.qr is an error
    register("qr", _SHAPES[:4], sample(regular(3, 4), some=False), FLAT)
register("geqrf", sample(regular(3, 3)), sample(regular(2, 4, 3)), sample(regular(3, 4)), FLAT, gradient=False)
_REFLECTIONS = (sample(t(3, 3), t(3)), sample(t(5, 3), t(2)), sample(t(2, 4, 3), t(2, 3)), sample(t(3, 4).t(), t(3)))
_TOO_MANY = wrong(t(3, 2), t(3), match="greater than or equal")
_WIDE = wrong(t(2, 3), t(2), match="greater than or equal")
register("linalg.householder_product", _REFLECTIONS, _TOO_MANY, _WIDE)
register("orgqr", _REFLECTIONS[:3], _TOO_MANY, _WIDE)
register(
    "ormqr",
    sample(t(4, 3), t(3), t(4, 2)),
    sample(t(4, 2), t(2), t(4, 3), True, True),
    sample(t(2, 4, 3), t(2, 3), t(2, 5, 4), left=False),
    sample(t(4, 3), t(3), t(5, 4), left=False, transpose=True),
    wrong(t(4, 3), t(3), t(3, 2), match="fit|equal"),
    wrong(t(4, 3), t(2, 3), t(4, 2), match="one dimension less|dimension"),
    wrong(t(4, 3), t(3), t(2, 4, 2), match="batch|dim"),
)
