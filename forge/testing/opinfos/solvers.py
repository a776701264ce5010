"""OpInfos of the solvers family."""

import torch

from forge.testing.opinfo import REAL
from forge.testing.opinfos.matrices import FLAT, OBLONG, register, regular
from forge.testing.table import Value, register_computed, sample, t, values, wrong


def _near_identity(*shape: int, side: int) -> Value:
    """Return the identity of `side` dims, reshaped and disturbed."""
    return (t(*shape) / 3 * 0.3).then(lambda x: x + torch.eye(side, device=x.device).reshape(x.shape))


register(
    "linalg.inv inverse linalg.inv_ex",
    [sample(regular(3, 3)), sample(regular(2, 1, 4, 4)), sample(regular(3, 3, column_major=True)), sample(t(0, 0))],
    FLAT,
    OBLONG,
)
_SYSTEMS = (
    sample(regular(3, 3), t(3, 2)),
    sample(regular(3, 3), t(3)),
    sample(regular(2, 3, 3), t(2, 3)),
    sample(regular(2, 3, 3, column_major=True), t(3, 1)),
    sample(regular(3, 3), t(4, 3, 2)),
    sample(regular(3, 3), t(2, 3), left=False),
    sample(t(0, 0), t(0, 2)),
)
_MISFITS = (wrong(t(2, 3), t(3), match="square"), wrong(regular(3, 3), t(2, 2), match="ncompatible shapes"))
register("linalg.solve", _SYSTEMS, _MISFITS)
register("linalg.solve_ex", _SYSTEMS, sample(regular(3, 3), t(3), check_errors=True), _MISFITS)
register(
    "linalg.tensorinv",
    [sample(_near_identity(2, 3, 6, side=6)), sample(_near_identity(4, 2, 2, side=4), ind=1)],
    [wrong(t(2, 3, 5), match="satisfy the requirement"), wrong(t(2, 2), 0, match="positive integer")],
)


register(
    "linalg.tensorsolve",
    [sample(_near_identity(2, 3, 6, side=6), t(2, 3)), sample(_near_identity(2, 6, 3, side=6), t(2, 3), dims=(1,))],
    wrong(t(2, 3, 5), t(2, 3), match="satisfy the requirement"),
)
register(
    "matrix_exp",
    [sample(t(3, 3, low=-1, high=1)), sample(t(2, 4, 4, low=-1, high=1)), sample(t(3, 3).t()), sample(t(0, 0))],
    FLAT,
    OBLONG,
    op=torch.linalg.matrix_exp,
)
register(
    "linalg.matrix_power",
    *[sample(regular(3, 3), n) for n in (2, 0, 1, 3, 6, -1, -2)],
    sample(regular(2, 3, 3, column_major=True), 5),
    [wrong(t(3), 2, match="at least 2 dim"), wrong(t(2, 3), 2, match="square")],
)
register(
    "linalg.vecdot",
    [sample(t(3), t(3)), sample(t(2, 3), t(3)), sample(t(4, 3), t(4, 1), dim=0), sample(t(2, 0), t(2, 0))],
    wrong(t(3, dtype=torch.int64), t(3, dtype=torch.int64), match="floating point or complex"),
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64),
)
register(
    "linalg.vander",
    [sample(t(3)), sample(t(2, 3)), sample(t(3), N=5), sample(t(3), N=2), sample(t(), N=2)],
    [wrong(t(3), N=1, match="greater than 1"), wrong(values([True, False], torch.bool), match="but got")],
    dtypes=(*REAL[:2], torch.int64, torch.complex64),
)
register(
    "linalg.diagonal",
    [sample(t(3, 4)), sample(t(2, 3, 4), offset=1), sample(t(2, 3, 4), offset=-1, dim1=0, dim2=2), sample(t(3, 3).t())],
    wrong(t(3, 3), dim1=1, dim2=1, match="cannot be identical"),
    dtypes=(*REAL, torch.complex64),
)
register_computed(("linalg.diagonal",))
