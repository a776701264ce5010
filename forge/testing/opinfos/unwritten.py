"""OpInfos of tensors of unspecified values with strides of their own."""

import torch

from forge.testing.opinfo import ALL
from forge.testing.table import DEVICE, DTYPE, ints, op, sample, t, wrong

_DTYPES = (*ALL, torch.complex64)

op(
    "empty_permuted",
    sample((2, 3, 4), (2, 0, 1), dtype=DTYPE, device=DEVICE),
    sample((2, 3), (0, 1), device=DEVICE),
    sample((), (), dtype=DTYPE, device=DEVICE),
    sample((0, 3), (1, 0), dtype=DTYPE, device=DEVICE),
    wrong((2,), (0, 1), match="does not match the length"),
    wrong((2,), (3,), match="Dimension out of range"),
    wrong((2, 3), (0, 0), match="Duplicate dim not allowed"),
    dtypes=_DTYPES,
    gradient=False,
)
_mistakes = (((2, 3), (1,), "must match dimensionality"), ((2,), (-1,), "Negative strides|strides must be"))
op(
    "empty_strided",
    sample((2, 3), (1, 2), dtype=DTYPE, device=DEVICE),
    sample((2, 3), (7, 8), device=DEVICE),
    sample((), (), dtype=DTYPE, device=DEVICE),
    [wrong(*args, match=match) for *args, match in _mistakes],
    dtypes=_DTYPES,
    gradient=False,
)
op(
    "Tensor.new_empty_strided",
    sample(ints(1), (2, 3), (1, 2), dtype=DTYPE),
    sample(ints(1), (2, 3), (7, 8), dtype=torch.float64),
    sample(ints(1), (), ()),
    [wrong(t(1), *args, match=match) for *args, match in _mistakes],
    dtypes=_DTYPES,
    gradient=False,
)
