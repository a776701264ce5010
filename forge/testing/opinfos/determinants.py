"""OpInfos of the determinants family."""

from forge.testing.opinfo import Directive
from forge.testing.opinfos.matrices import FLAT, OBLONG, register, regular
from forge.testing.table import sample, t
from forge.torch_internals.versions import TORCH

_SQUARE = (
    sample(regular(3, 3)),
    sample(regular(2, 1, 4, 4)),
    sample(regular(3, 3, column_major=True)),
    sample(t(0, 0)),
    sample(t(2, 1, 1)),
)
_NO_GRADIENT_OF_EMPTY = Directive(
    "xfail",
    "torch's determinant of an empty matrix gave it no gradient, and gives an empty one now",
    test="test_gradient",
)
register("linalg.det det", _SQUARE, FLAT, OBLONG, directives=(_NO_GRADIENT_OF_EMPTY,) if TORCH < (2, 12) else ())
register("linalg.slogdet slogdet logdet", _SQUARE, FLAT, OBLONG)
