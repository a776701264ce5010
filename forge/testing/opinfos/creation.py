"""OpInfos of the creation family."""

from functools import partial

import torch

from forge.testing.opinfo import ALL, FLOATS, REAL, Sample
from forge.testing.table import DEVICE, DTYPE, index, ints, on_a_clone, op, sample, t, unary, values, wrong

_op = partial(op, dtypes=ALL, gradient=False)


def from_arguments(*rows: Sample) -> list[Sample]:
    """Return the rows with the tested dtype and device, and before them the first one without a dtype."""
    first = rows[0]
    return [
        sample(*first.args, **first.kwargs, device=DEVICE),
        *(sample(*row.args, **row.kwargs, dtype=DTYPE, device=DEVICE) for row in rows),
    ]


# sizes

_sizes = from_arguments(sample(2, 3), sample((2, 3)), sample(()), sample(0, 2), sample([4], pin_memory=False))
_negative = [wrong(2, -1, match="negative dimension")]
_op("zeros ones empty", _sizes, _negative)
_op(
    "full",
    from_arguments(sample((2, 3), 1), sample((2,), True), sample((), 2.5), sample([0, 2], fill_value=0)),
    wrong((-1,), 1, match="negative dimension"),
)
_op(
    "full.inferred_dtype",
    *(sample((2,), value, device=DEVICE) for value in (True, 1, 1.5, -2)),
    wrong((-1,), 1, match="negative dimension"),
    dtypes=(torch.float32,),
)

_no_tensor = [wrong([1.0], error=TypeError, match="must be Tensor")]
_op(
    "zeros_like ones_like",
    unary((2, 3), (), (0, 3)),
    [sample(t(2, 3), dtype=torch.float64), sample(t(2, 3, 4, 5).to(memory_format=torch.channels_last), device=DEVICE)],
    _no_tensor,
)
# of integers: gradients cannot be compared of unspecified values
_op("empty_like", *(sample(index(*shape, high=9), dtype=DTYPE) for shape in ((2, 3), (), (0, 3))), _no_tensor)
_op(
    "full_like",
    unary((2, 3), (), (0, 3), fill_value=1),
    sample(t(2), 1.5, dtype=torch.float64),
    wrong([1.0], 1, error=TypeError, match="must be Tensor"),
)
_bad_new = [wrong(t(2), (-1,), match="negative dimension")]
_op(
    "Tensor.new_zeros Tensor.new_ones",
    [sample(t(2), 2, 3), sample(t(2), (2, 3)), sample(t(2), [0], dtype=torch.float64), sample(t(2), (), device=DEVICE)],
    _bad_new,
)
_op("Tensor.new_empty", sample(ints(1), 2, 3, dtype=DTYPE), sample(ints(1), (0, 2)), _bad_new)
_op(
    "Tensor.new_full",
    [sample(t(2), (2, 3), 1), sample(t(2), (), 1, dtype=torch.float64)],
    wrong(t(2), (-1,), 1, match="negative dimension"),
)


# numbers


_ragged = [
    wrong([[1, 2], [3]], error=ValueError, match="expected sequence.* of (one )?length"),
    wrong([1, "a"], error=(TypeError, ValueError), match="data holds 'a'"),
]
_numbers = from_arguments(sample([[1, 2], [3, 4]]), sample(3), sample([]), sample([True, False]), sample([[], []]))
_op("tensor", _numbers, _ragged)
_op(
    "tensor.inferred_dtype",
    map(sample, (1, 2.5, True, [1, 2], [1, 2.5], [True, 2], (), [[]])),
    _ragged,
    dtypes=(torch.float32,),
)
_op(
    "as_tensor",
    [sample(t(2, 3)), sample(t(2, 3), dtype=torch.float64), sample([1, 2], device=DEVICE), sample(2.5, dtype=DTYPE)],
    _ragged,
    gradient=True,
)
_op(
    "Tensor.new_tensor",
    [sample(t(2), [1, 0]), sample(t(2), 1, dtype=torch.float64)],
    wrong(t(2), [[1, 2], [3]], error=ValueError, match="expected sequence.* of (one )?length"),
)
_op(
    "scalar_tensor",
    from_arguments(sample(1), sample(2.5), sample(True)),
    wrong("x", error=TypeError, match="must be Number|must be a number"),
)


# sequences

_op(
    "arange",
    from_arguments(
        sample(5),
        sample(0),
        sample(1, 6),
        sample(1, 8, 3),
        sample(6, 0, -2),
        sample(0.0, 7.0, 2.0),
        sample(start=1, end=4, step=2),
    ),
    [wrong(0, 5, 0, match="step must be nonzero"), wrong(5, 0, match="inconsistent with step sign")],
    dtypes=REAL,
)
_op(
    "arange.inferred_dtype",
    [sample(0.0, 2.0, 0.3, device=DEVICE), sample(2, 0.5, -0.25, device=DEVICE), sample(3.5, device=DEVICE)],
    wrong(5.0, 0.0, match="inconsistent with step sign"),
    dtypes=(torch.float32,),
)
_lines = from_arguments(sample(0, 8, 5), sample(2.0, 9.0, 4), sample(3, 3, 1), sample(0, 1, 0), sample(4, 0, steps=5))
_bad_line = [wrong(0, 1, -1, match="must be non-negative")]
_op("linspace", _lines, _bad_line, dtypes=REAL)


_op(
    "linspace.of_tensors logspace.of_tensors",
    sample(values(0), values(3), 5),
    sample(values(3), 1, steps=4),
    sample(-1, values(2), 3, dtype=torch.float64),
    sample(values(2), values(2), 1),
    sample(values(2), values(2), 0),
    sample(values(0), values(3), 3, dtype=torch.int64),
    wrong(t(1), 2, 3, match="only supports 0-dimensional start and end"),
    dtypes=REAL,
    gradient=False,
)
_op(
    "linspace.tensors",
    [sample(t(), t(), 5), sample(t(), 3, steps=4, dtype=torch.float64), sample(-2.0, t(), 1)],
    wrong(t(1), 2.0, 3, match="0-dimensional start and end"),
    dtypes=REAL[:2],
)
_op(
    "logspace",
    from_arguments(sample(0, 2, 5), sample(-1.0, 1.0, 3, base=2.0), sample(0, 1, 1)),
    wrong(0, 1, -1, match="must be non-negative"),
    dtypes=FLOATS,
)
_op(
    "eye",
    from_arguments(sample(3), sample(2, 4), sample(4, 2), sample(0), sample(n=2, m=0)),
    wrong(-1, match="greater or equal to 0"),
)
_op(
    "tril_indices triu_indices",
    *(
        sample(*arguments, device=DEVICE)
        for arguments in ((3, 4), (4, 3, 1), (3, 3, -2), (0, 2), (3, 3, 5), (3, 3, -5))
    ),
    sample(3, 4, 0, dtype=torch.int32, device=DEVICE),
    wrong(-1, 2, match="must be non-negative|non-negative"),
    dtypes=(torch.float32,),
)
_op(
    "Tensor.zero_",
    unary((2, 3), (), (0, 3)),
    wrong("x", error=AttributeError, match="clone"),
    gradient=True,
    wrap=on_a_clone,
)
