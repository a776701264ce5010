"""OpInfos of functions that write at places, or say where and what elements are."""

import torch

from forge.testing.opinfo import ALL, FLOATS, INTEGERS, REAL
from forge.testing.table import DTYPE, Value, index, ints, mask, op, sample, t, wrong
from forge.torch_internals.functions import torch_unsafe_masked_index, torch_unsafe_masked_index_put_accumulate

_WITH_COMPLEX = (*ALL, torch.complex64)


_INTEGER = Value(lambda target: torch.int64 if target.dtype.is_floating_point else target.dtype)


op(
    "diagonal_scatter Tensor.diagonal_scatter",
    [sample(t(3, 4), t(3)), sample(t(4, 3).t(), t(2), 2), sample(t(2, 3, 4), t(4, 2), -1, 1, 0), sample(t(0, 3), t(0))],
    wrong(t(3, 4), t(2), match="to have a size equal to the slice"),
    wrong(t(3, 4), t(3), 0, 1, 1, match="cannot be identical"),
    dtypes=_WITH_COMPLEX,
)


for _reduce in ("prod", "mean", "amax", "amin"):
    op(
        f"index_reduce.{_reduce}",
        sample(t(3, 4), 0, ints(2, 0, 2), t(3, 4), _reduce),
        sample(t(4, 3).t(), 1, ints(1, 1), t(3, 2), _reduce, include_self=False),
        sample(t(5), -1, ints(4).int(), t(1), _reduce),
        sample(t(), 0, ints(0), t(), _reduce),
        sample(t(2, 3), 0, ints(), t(0, 3), _reduce),
        wrong(t(3, 4), 0, ints(0), t(1, 3), _reduce, match="must match self"),
        wrong(t(3), 0, ints(0, 1), t(1), _reduce, match="Number of indices"),
        wrong(t(3), 0, t(1), t(1), _reduce, match="Expected dtype int32/int64"),
        wrong(t(3), 0, ints(0)[None], t(1), _reduce, error=IndexError, match="supposed to be a vector"),
        wrong(t(3), 0, ints(0), t(1).double(), _reduce, match="same scalar"),
        wrong(t(3), 0, ints(0), t(1), "sum", match="to be one of prod"),
        dtypes=REAL,
    )

op(
    "put Tensor.put Tensor.put_",
    sample(t(3, 4), ints(1, -1, 5), t(3)),
    sample(t(3, 4), ints(1, 1, 5).view(3, 1), t(1, 3), True),
    sample(t(5), ints(), t(0)),
    sample(t(), ints(0), t(1), accumulate=True),
    wrong(t(3), ints(0, 1), t(1), error=IndexError, match="same number of elements"),
    wrong(t(3), ints(0).int(), t(1), match="Expected a long tensor"),
    wrong(t(3), ints(0), t(1).double(), match="to have the same"),
    wrong(t(0), ints(0), t(1), error=IndexError, match="into an empty tensor"),
    dtypes=_WITH_COMPLEX,
)


# by a mask

op(
    "_unsafe_masked_index",
    sample(t(5), mask(6), [index(6, high=9)], 2),
    sample(t(4, 5), mask(3, 2), [index(3, 1, high=6), index(1, 2, high=6)], 1),
    sample(t(4, 5).t(), mask(3, 1), [index(3, high=5)], 0),
    sample(t(0), mask(3), [ints(0, 1, 2)], 1),
    wrong(t(3), mask(1), [t(1)], 0.0, match="found unexpected index type"),
    dtypes=_WITH_COMPLEX,
    op=torch_unsafe_masked_index,
)
op(
    "_unsafe_masked_index_put_accumulate",
    sample(t(5), mask(6), [index(6, high=9)], t(6)),
    sample(t(4, 5), mask(3, 2), [index(3, 1, high=6), index(2, high=6)], t(3, 2)),
    sample(t(0), mask(3), [ints(0, 1, 2)], t(3)),
    wrong(t(3), mask(1), [t(1)], t(1), match="found unexpected index type"),
    wrong(t(3), mask(1), [ints(0)], t(1).double(), match="source and destination dtypes match"),
    dtypes=_WITH_COMPLEX,
    op=torch_unsafe_masked_index_put_accumulate,
)


# values of elements, and their places

op(
    "isin",
    sample(index(3, 4, high=9).to(DTYPE), index(5, high=9).to(DTYPE)),
    sample(index(2, high=9).to(DTYPE), index(40, high=99).to(DTYPE), invert=True),
    sample(ints(1, 2).to(DTYPE), 2),
    sample(2, ints(1, 2).to(DTYPE), assume_unique=True),
    sample(t(3), t(0)),
    sample(t(0), t(3)),
    wrong(t(2).bool(), t(2).bool(), match="Unsupported input type"),
    wrong("x", t(2), error=TypeError, match="must be|invalid combination"),
    dtypes=(*FLOATS, *INTEGERS),
    gradient=False,
)
op(
    "unravel_index",
    sample(index(4, high=6).to(_INTEGER), (2, 3)),
    sample(index(2, 3, high=24).to(_INTEGER), [2, 3, 4]),
    sample(index(high=5).to(_INTEGER), 5),
    sample(index(0, high=6).to(_INTEGER), torch.Size([2, 3])),
    wrong(t(3), (2, 3), error=TypeError, match="to be integer dtype"),
    wrong(ints(1), (2, -3), error=ValueError, match="cannot have negative values"),
    dtypes=INTEGERS,
    gradient=False,
)
