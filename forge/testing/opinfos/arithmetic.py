"""OpInfos of the arithmetic family."""

import math

import torch

from forge.testing.opinfo import FLOATS, INTEGERS
from forge.testing.table import op, sample, t, values, wrong

op(
    "gcd lcm",
    sample(t(5), t(5)),
    sample(t(2, 3), t(3)),
    sample(t(3, 4).t(), t(4, 3)),
    sample(t(), t()),
    sample(t(0, 3), t(3)),
    sample(values([0, 0, 12, 18]), values([0, 5, 18, 12])),
    sample(t(3), t(3, dtype=torch.int16)),
    wrong([1], t(3), error=TypeError, match="must be Tensor"),
    wrong(t(3, dtype=torch.int32), t(4, dtype=torch.int32), match="must match the size"),
    dtypes=INTEGERS,
    gradient=False,
)

op(
    "frexp",
    sample(t(5)),
    sample(t(2, 3)),
    sample(t()),
    sample(t(0, 3)),
    sample(t(3, 4).t()),
    sample(values([0.0, -0.0, 1.0, -8.0, 2.0**-20, math.nan])),
    [wrong([1.0], error=TypeError, match="must be Tensor"), wrong(t(3, dtype=torch.int64), match="floating-point")],
    dtypes=FLOATS,
)
