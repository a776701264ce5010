"""OpInfos of softmax and its kin."""

from functools import partial

import torch

from forge.testing.table import DTYPE, ints, op, sample, t, tolerance, wrong

_ROWS = [
    sample(t(5), 0),
    sample(t(2, 3), -1),
    sample(t(2, 3), 0),
    sample(t(2, 3, 4), 1),
    sample(t(), 0),
    sample(t(0, 3), 1),
    sample(t(3, 0), 1),
    sample(t(3, 4).t(), 1),
    sample(t(2, 3), dim=1),
    sample(t(2, 3) * 1000, -1),
    sample(t(2, 3), 1, dtype=torch.float32),
    sample(t(2, 3), 1, dtype=torch.float64),
]
_ERRORS = [
    wrong(t(3), 5, error=IndexError, match="Dimension out of range"),
    wrong(t(3, dtype=torch.int64), 0, error=NotImplementedError, match="not implemented"),
]
_LAST_PLACE = tolerance(
    "one unit in the last place of float16, which eager's vectorized sum may round the other way",
    2e-3,
    1e-3,
    dtypes=(torch.float16,),
)
_CANCELS = tolerance(
    "x and the logarithm of the sum cancel: what is left has the last place of bfloat16 of theirs",
    1.6e-2,
    8e-3,
    dtypes=(torch.bfloat16,),
)
_INTEGERS = sample(ints(*range(6)).view(2, 3), 1, dtype=torch.float32)
_NO_DIM = wrong(t(3), error=TypeError, match='missing .* "dim"')
_op = partial(op, family=(_ROWS, _INTEGERS, _ERRORS, _NO_DIM))
_op("softmax", directives=(_LAST_PLACE,))
_op("log_softmax", directives=(_LAST_PLACE, _CANCELS))
_op = partial(op, family=(_ROWS, sample(t(2, 3), 1, 5), sample(t(2, 3), -1, 3, torch.float32), _ERRORS))
_op("nn.functional.softmax nn.functional.softmin", directives=(_LAST_PLACE,))
_op("nn.functional.log_softmax", directives=(_LAST_PLACE, _CANCELS))

_ROUNDED_PRODUCT = tolerance(
    "torch's kernel for a GPU rounds the products with the gradient before it adds them up, which may cancel",
    1.6e-2,
    3e-2,
    devices=("cuda",),
)
_op = partial(
    op,
    family=(
        sample(t(5), t(5), 0, DTYPE),
        sample(t(2, 3), t(2, 3), -1, DTYPE),
        sample(t(2, 3, 4), t(2, 3, 4), 1, DTYPE),
        sample(t(), t(), 0, DTYPE),
        wrong(t(3), t(3), 5, torch.float32, error=IndexError, match="Dimension out of range"),
    ),
)
_op("aten._softmax_backward_data", directives=(_ROUNDED_PRODUCT,))
_op("aten._log_softmax_backward_data")
