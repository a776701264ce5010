"""OpInfos of the Bessel and Airy functions and of the orthogonal polynomials."""

import torch

from forge.prims.special_functions import BESSEL, POLYNOMIALS, SMOOTH
from forge.testing.opinfo import FLOATS, INTEGERS, OpInfo, register_opinfo, sample
from forge.testing.opinfos.elementwise import unary_errors, unary_samples
from forge.testing.opinfos.specs import calls, classes, errors, given, t, wrong

_DTYPES = (*FLOATS[:2], *INTEGERS)  # torch's kernels take no half precision

for _name in BESSEL:
    register_opinfo(
        OpInfo(
            f"special.{_name}",
            getattr(torch.special, _name),
            unary_samples,
            unary_errors,
            dtypes=_DTYPES,
            domain=(0.2, None) if "_k" in _name else (None, None),
            gradient=_name in SMOOTH,
        )
    )

_DEGREES = (
    sample(t(5), classes(5, count=6)),
    sample(t(2, 3), classes(2, 1, count=9)),
    sample(t(4, 3, swapped=True), 2),
    sample(t(3, low=-0.9, high=0.9), given(0, 7, 20, dtype=torch.int64)),
    sample(0.5, t(3)),
    sample(t(), t()),
    sample(t(0, 3), 1),
)
_MISTAKES = (
    wrong([1.0], t(3), error=TypeError, match="must be Tensor or Number|invalid combination"),
    wrong(t(3), t(4), match="must match the size"),
)

for _name in POLYNOMIALS:
    register_opinfo(
        OpInfo(
            f"special.{_name}",
            getattr(torch.special, _name),
            calls(*_DEGREES),
            errors(*_MISTAKES),
            dtypes=_DTYPES,
            gradient=False,
        )
    )
