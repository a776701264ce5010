"""OpInfos of the determinants family."""

import torch

from forge.testing.opinfo import Directive, sample
from forge.testing.opinfos.matrices import FLAT, OBLONG, register, regular
from forge.testing.opinfos.specs import t
from forge.torch_internals.versions import TORCH

_SQUARE = (
    sample(regular(3, 3)),
    sample(regular(2, 1, 4, 4)),
    sample(regular(3, 3, swapped=True)),
    sample(t(0, 0)),
    sample(t(2, 1, 1)),
)
_NO_GRADIENT_OF_EMPTY = Directive(
    "xfail",
    "torch's determinant of an empty matrix gave it no gradient, and gives an empty one now",
    test="test_gradient",
)
for _name, _op in {"linalg.det": torch.linalg.det, "det": torch.det}.items():
    register(_name, _op, _SQUARE, (FLAT, OBLONG), directives=(_NO_GRADIENT_OF_EMPTY,) if TORCH < (2, 12) else ())
for _name, _op in {
    "linalg.slogdet": torch.linalg.slogdet,
    "slogdet": torch.slogdet,
    "logdet": torch.logdet,
}.items():
    register(_name, _op, _SQUARE, (FLAT, OBLONG))
