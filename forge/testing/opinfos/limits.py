"""OpInfos of the limits of values."""

import math

import torch

from forge.testing.opinfo import ALL, REAL
from forge.testing.opinfos.elementwise import BINARY_ERRORS, EXTREMA, binary
from forge.testing.table import Where, floats, op, sample, shared_value, t, values, wrong

_HIGH = shared_value(t(3, 1))
op(
    "clamp",
    *(sample(t(3, 5), *limits) for limits in ((-1, 2), (None, 1), (0, None), (2, -1))),
    [sample(t(), min=0, max=1), sample(t(0, 2), 0)],
    Where(lambda dtype: dtype != torch.uint8, [sample(t(5), -0.5, 2.5)]),
    [sample(t(3, 5), t(5), _HIGH), sample(t(3, 5), max=_HIGH)],
    floats(sample(values([-1.0, 2.0, math.nan, math.inf]), -1, 2)),
    wrong(t(3), match="At least one of 'min' or 'max' must not be None"),
    wrong(t(3), t(4), match="must match the size"),
    dtypes=REAL,
)
op("clamp_min clamp_max", binary(1, 0), BINARY_ERRORS, dtypes=REAL)
op("fmax fmin", EXTREMA, BINARY_ERRORS, dtypes=ALL)
