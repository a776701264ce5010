"""OpInfos of distances, and of slices scaled down to a norm."""

import math

import torch

from forge.testing.opinfo import FLOATS
from forge.testing.table import op, sample, t, values, wrong

_DTYPES = (*FLOATS, torch.complex64)
_REPEATED = [[0, 0], [0, 0], [1, 1], [2, 1], [0, 1]]  # rows and differences
_ORDERS = (1, 0.5, 1.5, 2, 3, math.inf)

_dists = [
    sample(t(3, 4), t(3, 4)),
    sample(t(3, 4).t(), t(3), 1),
    sample(t(), t(2), p=3),
    sample(t(0), t(0)),
    *[sample(t(3, 4), t(3, 4), p) for p in (*_ORDERS, -1, -math.inf)],
]
_bad_dist = [wrong(t(3), t(2), match="must match"), wrong(t(0), t(0), math.inf, match="no identity|not have")]
_renorms = [
    sample(t(3, 4), 2, 0, 1.0),
    sample(t(3, 4).t(), 1, -1, 2),
    sample(t(2, 3, 4), 3, 1, 1e9),
    sample(t(2, 3), 2, 0, 0.0),
    *[sample(t(2, 3, 4), p, 2, 1.5) for p in _ORDERS],
]
_bad_renorm = [
    wrong(t(3), 2, 0, 1.0, match="needs at least 2 dimensions"),
    wrong(t(3, 3), 0, 0, 1.0, match="non-positive"),
    wrong(t(3, 3), 2, 0, -1.0, match="maxnorm to be >= 0"),
    wrong(t(3, 3), 2, 2, 1.0, error=IndexError, match="out of range"),
]
op("dist", _dists, _bad_dist, dtypes=_DTYPES)
op("Tensor.dist", _dists, _bad_dist, dtypes=(torch.float32, torch.complex64))
op("renorm", _renorms, _bad_renorm, dtypes=_DTYPES)
op("Tensor.renorm", _renorms, _bad_renorm, dtypes=(torch.float32, torch.complex64))
op(
    "pdist",
    [sample(t(4, 3)), sample(t(5, 2).t(), 1.0), sample(t(1, 3)), sample(t(3, 0))],
    *[sample(t(4, 3), p) for p in (0.0, *_ORDERS)],
    *[sample(values(_REPEATED), p) for p in (0.5, 1.0, 2.0, 3.0, math.inf)],
    wrong(t(3), match="only supports 2D tensors"),
    wrong(t(3, 3, dtype=torch.int64), match="only supports floating-point dtypes"),
    wrong(t(3, 3), -1.0, match="non-negative p values"),
    dtypes=(torch.float32, torch.float64),
)
