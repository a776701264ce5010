"""OpInfos of functions that lay out tensors in one, and of unsafe splits."""

from functools import partial

import torch

from forge.testing.opinfo import ALL
from forge.testing.table import op, register_computed, sample, t, unary, wrong
from forge.torch_internals.functions import torch_chunk_cat

_DTYPES = (*ALL, torch.complex64)

_op = partial(op, dtypes=_DTYPES)


_op(
    "block_diag",
    sample(t(2, 3), t(3, 1)),
    sample(t(2), t(), t(3, 2).t(), t(0), t(0, 2)),
    sample(t(2, 2), t(1, 2, dtype=torch.float64)),
    sample(t(3)),
    wrong(t(2), t(1, 1, 1), match="must have 2 or fewer dimensions"),
)
_op(
    "cartesian_prod",
    [sample(t(2), t(3)), sample(t(2), t(3), t(4)), sample(t(2), t(0)), sample(t(3))],
    [wrong(t(2, 2), t(2), match="Expect a 1D vector"), wrong(t(2), t(2).long(), match="to have the same dtype")],
)
_op(
    "diagflat Tensor.diagflat",
    unary((3,), (2, 3), (), (0,)),
    [sample(t(2), 1), sample(t(2, 2), offset=-2)],
    wrong("x", error=(TypeError, AttributeError), match="Tensor|diagflat"),
)
_op(
    "constant_pad_nd",
    sample(t(2, 3), (1, 2)),
    sample(t(2, 3, 4), (1, 2, -1, 1), 1),
    sample(t(3, 2).t(), [-1, 0, 2, 0], value=1),
    sample(t(0, 2), (1, 1)),
    wrong(t(2), (1,), match="must be divisible by|must be even"),
    wrong(t(2), (1, 1, 1, 1), match="[Ll]ength"),
    wrong(t(2), (-3, -3), match="negative"),
)
_op(
    "_chunk_cat",
    sample([t(5, 2), t(2, 2)], 0, 2),
    sample([t(2, 5, 2), t(2, 3, 1)], 1, 3),
    sample([t(2, 3), t(2, 4)], -1, 2),
    sample([t(2, 3).t()], 0, 4),
    wrong([], 0, 2, match="expects a non-empty input tensor list"),
    wrong([t(2)], 0, 0, match="expects positive num_chunks"),
    wrong([t(0)], 0, 2, match="expects non-empty tensor"),
    wrong([t(2, 2), t(3, 2)], 1, 2, match="expects same sizes"),
    wrong([t(2), t(2).long()], 0, 2, match="with the same dtype"),
    gradient=False,
    op=torch_chunk_cat,
)


# parts

_chunks = [sample(t(5, 3), 2), sample(t(5, 3), 4, -1), sample(t(6), chunks=3, dim=0)]
_splits = [sample(t(5, 3), 2), sample(t(4, 6).t(), 6), sample(t(2, 5), 3, dim=1)]
_sizes = [sample(t(5, 3), [1, 4]), sample(t(5, 3), [1, 2], dim=1)]
_no_dims = [wrong(t(), 1, match="at least a 1-dimensional tensor")]
_bad_sizes = [wrong(t(5), [1, 2], match="sum exactly to 5")]
for _name, _samples, _wrong in (
    ("unsafe_chunk", _chunks, _no_dims),
    ("unsafe_split", _splits, _no_dims),
    ("unsafe_split_with_sizes", _sizes, _bad_sizes),
):
    _op(_name, _samples, _wrong)
    _op(f"Tensor.{_name}", _samples, _wrong, symbols=(f"torch.{_name}",))

register_computed(["unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"])
