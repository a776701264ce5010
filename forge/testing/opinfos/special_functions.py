"""OpInfos of the Bessel and Airy functions and of the orthogonal polynomials."""

from forge.prims.special_functions import BESSEL, POLYNOMIALS, SMOOTH
from forge.testing.opinfo import FLOATS, INTEGERS
from forge.testing.opinfos.elementwise import UNARY, UNARY_ERRORS
from forge.testing.table import index, ints, op, sample, t, wrong

_DTYPES = (*FLOATS[:2], *INTEGERS)  # torch's kernels take no half precision

for _name in BESSEL:
    op(
        f"special.{_name}",
        UNARY,
        UNARY_ERRORS,
        dtypes=_DTYPES,
        domain=(0.2, None) if "_k" in _name else (None, None),
        gradient=_name in SMOOTH,
    )

_DEGREES = (
    sample(t(5), index(5, high=6)),
    sample(t(2, 3), index(2, 1, high=9)),
    sample(t(3, 4).t(), 2),
    sample(t(3, low=-0.9, high=0.9), ints(0, 7, 20)),
    sample(0.5, t(3)),
    sample(t(), t()),
    sample(t(0, 3), 1),
)
_MISTAKES = (
    wrong([1.0], t(3), error=TypeError, match="must be Tensor or Number|invalid combination"),
    wrong(t(3), t(4), match="must match the size"),
)

op(" ".join(f"special.{name}" for name in POLYNOMIALS), _DEGREES, _MISTAKES, dtypes=_DTYPES, gradient=False)
