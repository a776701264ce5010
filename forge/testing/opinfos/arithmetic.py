"""OpInfos of the arithmetic family."""

import math

import torch

from forge.testing.opinfo import FLOATS, INTEGERS, OpInfo, register_opinfo, sample
from forge.testing.opinfos.specs import calls, errors, given, t, wrong

for _name in ("gcd", "lcm"):
    register_opinfo(
        OpInfo(
            _name,
            getattr(torch, _name),
            calls(
                sample(t(5), t(5)),
                sample(t(2, 3), t(3)),
                sample(t(4, 3, swapped=True), t(4, 3)),
                sample(t(), t()),
                sample(t(0, 3), t(3)),
                sample(given(0, 0, 12, 18), given(0, 5, 18, 12)),
                sample(t(3), t(3, dtype=torch.int16)),
            ),
            errors(
                wrong([1], t(3), error=TypeError, match="must be Tensor"),
                wrong(t(3, dtype=torch.int32), t(4, dtype=torch.int32), match="must match the size"),
            ),
            dtypes=INTEGERS,
            gradient=False,
        )
    )

register_opinfo(
    OpInfo(
        "frexp",
        torch.frexp,
        calls(
            sample(t(5)),
            sample(t(2, 3)),
            sample(t()),
            sample(t(0, 3)),
            sample(t(4, 3, swapped=True)),
            sample(given(0.0, -0.0, 1.0, -8.0, 2.0**-20, math.nan)),
        ),
        errors(
            wrong([1.0], error=TypeError, match="must be Tensor"),
            wrong(t(3, dtype=torch.int64), match="floating-point"),
        ),
        dtypes=FLOATS,
    )
)
