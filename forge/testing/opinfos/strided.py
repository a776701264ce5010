"""OpInfos of what reads memory as it lies."""

import torch

from forge.testing.opinfo import ALL
from forge.testing.table import op, register_computed, sample, t, wrong

_DTYPES = (*ALL, torch.complex64)
op(
    "as_strided Tensor.as_strided as_strided_copy",
    sample(t(3, 4), (2, 2), (1, 2)),
    sample(t(3, 4), (2, 2), (1, 2), 3),
    sample(t(6), (4, 3), (1, 1)),
    sample(t(4, 3).t(), (3,), (2,), storage_offset=1),
    sample(t(3), (), ()),
    sample(t(3), (0, 2), (1, 1)),
    wrong(t(3), (2,), (1, 1), match="mismatch in length of strides and shape"),
    wrong(t(3), (2,), (-1,), match="[Nn]egative strides"),
    dtypes=_DTYPES,
)

register_computed(["as_strided"])
