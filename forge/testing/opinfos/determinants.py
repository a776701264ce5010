"""OpInfos of the determinants family."""

import torch

from forge.testing.opinfo import sample
from forge.testing.opinfos.matrices import FLAT, OBLONG, register, regular
from forge.testing.opinfos.specs import t

_SQUARE = (
    sample(regular(3, 3)),
    sample(regular(2, 1, 4, 4)),
    sample(regular(3, 3, swapped=True)),
    sample(t(0, 0)),
    sample(t(2, 1, 1)),
)
for _name, _op in {
    "linalg.det": torch.linalg.det,
    "det": torch.det,
    "linalg.slogdet": torch.linalg.slogdet,
    "slogdet": torch.slogdet,
    "logdet": torch.logdet,
}.items():
    register(_name, _op, _SQUARE, (FLAT, OBLONG))
