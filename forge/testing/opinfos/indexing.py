"""OpInfos of the indexing family."""

import operator
from functools import partial
from typing import Any

import torch

from forge.testing.opinfo import ALL, FLOATS, REAL
from forge.testing.table import (
    DTYPE,
    Target,
    Value,
    index,
    ints,
    mask,
    on_a_clone,
    op,
    permutation,
    register_computed,
    sample,
    shared_value,
    t,
    tolerance,
    values,
    wrong,
)

ALL_OF_IT = slice(None)

_op = partial(op, dtypes=ALL)


# keys

_BASIC_KEYS = (
    0,
    -1,
    ALL_OF_IT,
    slice(1, None),
    slice(-2, None),
    slice(0, 10, 2),
    slice(2, 1),
    ...,
    None,
    (ALL_OF_IT, 1),
    (..., slice(None, None, 3)),
    (None, 0, ..., None),
    (0, -1, 2),
    (1, ALL_OF_IT, slice(1, -1)),
)


_ROWS, _PAIR = shared_value(ints(0, 2)), shared_value(ints([1], [-1]))
# of a (3, 4, 5) tensor, with index tensors: one, several, broadcast, apart, with slices, ints and None
_INDEX_KEYS: tuple[Any, ...] = (
    _ROWS,
    _PAIR,
    ints(),
    [0, 2],
    values(1, torch.int64),
    _ROWS.int(),
    (_ROWS, _ROWS),
    (_ROWS, _PAIR),
    (ALL_OF_IT, _ROWS),
    (_ROWS, ALL_OF_IT, _ROWS),
    (ALL_OF_IT, _ROWS, _PAIR),
    (0, _ROWS),
    (0, ALL_OF_IT, _ROWS),
    (_ROWS, None, _ROWS),
    (slice(1, None), _ROWS, slice(None, None, 2)),
    (ALL_OF_IT, values(-1, torch.int64), ALL_OF_IT),
    (values(1, torch.int64), ALL_OF_IT, _ROWS),
    ([0, 1], [1, 2]),
)
_op(
    "getitem",
    *(sample(t(3, 4, 5), key) for key in (*_BASIC_KEYS, *_INDEX_KEYS)),
    [sample(t(), ...), sample(t(), None), sample(t(0, 3), ints()), sample(t(5, 4).t(), ints(3, 3))],
    wrong(t(3), 3, error=IndexError, match="out of bounds|out of range"),
    wrong(t(3), (0, 0), error=IndexError, match="too many indices"),
    wrong(t(3), 1.5, error=IndexError, match="only integers, slices"),
    wrong(t(3), slice(None, None, -1), error=ValueError, match="step must be positive|greater than zero"),
    wrong(t(3), t(2), error=IndexError, match="tensors used as indices"),
    op=operator.getitem,
)


def _assign(x: torch.Tensor, key: Any, value: Any) -> torch.Tensor:
    """Return a copy of x with x[key] = value."""
    out = x.clone()
    out[key] = value
    return out


def _part(key: Any) -> Value:
    """Return a value to assign at a key: of its shape, or broadcast along its first dim."""

    def make(target: Target) -> torch.Tensor:
        shape = torch.empty(3, 4, 5, device=target.device)[target.fill(key)].shape
        return target.info.tensor(shape[1:] or shape, target.device, target.dtype)

    return Value(make)


_op(
    "setitem",
    *(sample(t(3, 4, 5), key, _part(key)) for key in _BASIC_KEYS),
    *(sample(t(3, 4, 5), key, 1) for key in _BASIC_KEYS),
    *(sample(t(3, 4, 5), _INDEX_KEYS[i], _part(_INDEX_KEYS[i])) for i in (0, 2, 3, 4, 8, 9, 11, 14, 15)),
    *(sample(t(3, 4, 5), key, 1) for key in _INDEX_KEYS),
    sample(t(3, 4), mask(3, 4), 2),
    sample(t(3, 4), mask(3), 2),
    sample(t(3, 4), mask(3), t(4)),
    sample(t(3, 4), (ALL_OF_IT, mask(4)), t()),
    sample(t(2, 3), values([[True, False, True]] * 2, torch.bool), t(4)),
    sample(t(3, 4), 0, t(1, 1, 4)),
    sample(t(3, 4), 0, values(1.5, torch.float32)),
    wrong(t(3), 3, 0, error=IndexError, match="out of bounds|out of range"),
    wrong(t(3, 4), 0, t(3), match="cannot be broadcast"),
    wrong(t(3), mask(4), 0, error=IndexError, match="shape of the mask"),
    symbols=("operator.setitem",),
    op=_assign,
)
_op(
    "index_put",
    sample(t(3, 4), (ints(0, 2),), t(4)),
    sample(t(3, 4), (ints(0, 2), ints(1, 1)), t(2)),
    sample(t(3, 4), [ints(0, 2)], t(2, 4), accumulate=True),
    sample(t(3, 4), (mask(3, 4),), t()),
    wrong(t(3), (ints(0, 1),), t(3), match="cannot be broadcast"),
    wrong(t(3), (ints(0),), t(1).double(), match="dtypes match"),
)
_op(
    "ops.aten.index",
    [sample(t(3, 4), [ints(0, 2)]), sample(t(3, 4), [None, ints(0, 2)]), sample(t(3, 4), [ints([0], [1]), ints(0, 2)])],
    wrong(t(3), [t(2)], error=IndexError, match="tensors used as indices"),
    op=torch.ops.aten.index.Tensor,
)


# along a dim

_selections = [
    (t(3, 4), 0, ints(0, 2, 2)),
    (t(3, 4), -1, ints(1)),
    (t(4, 3).t(), 1, ints(0, 3)),
    (t(3, 4), 0, ints().int()),
]
_wrong_selection = [
    wrong(torch.ones(3, 4), 0, torch.tensor([[0], [1]]), error=IndexError, match="vector"),  # RuntimeError on a GPU
    wrong(t(3, 4), 2, ints(0), error=IndexError, match="out of range"),
]
_op(
    "index_select",
    *(sample(*selection) for selection in _selections),
    [sample(t(), 0, ints(0)), sample(t(3), 0, values(2, torch.int64))],
    _wrong_selection,
)


_op(
    "index_add",
    *(sample(*selection, source) for selection, source in zip(_selections, (t(3, 4), t(3, 1), t(3, 2)), strict=False)),
    [sample(*_selections[0], t(3, 4), alpha=2), sample(t(), 0, ints(0), t())],
    wrong(t(3), 0, ints(0), t(1).double(), match="same (dtype|scalar type)"),
    dtypes=REAL,
    directives=(
        tolerance("a GPU adds repeated rows in half precision, in no fixed order", devices=("cuda",)),
        tolerance(
            "the scaled rows are rounded to bfloat16 before they are added, and may cancel",
            1.6e-2,
            1.6e-2,
            dtypes=(torch.bfloat16,),
            devices=("cpu",),
        ),
    ),
)
_op(
    "index_copy",
    sample(t(3, 4), 0, ints(2, 0), t(2, 4)),
    sample(t(3, 4), -1, ints(1), t(3, 1)),
    sample(t(4, 3).t(), 1, ints(0, 3), t(3, 2)),
    sample(t(), 0, ints(0), t()),
    wrong(t(3), 0, ints(0), t(1).double(), match="same (dtype|scalar type)"),
)
_op(
    "index_fill",
    *(sample(*selection, 1) for selection in _selections[:3]),
    [sample(*_selections[0], t()), sample(t(), 0, ints(0), 1)],
    wrong(t(3), 0, ints(0), t(2), match="0-dim"),
)
_op(
    "gather",
    sample(t(3, 4), 0, index(2, 4, high=3)),
    sample(t(3, 4), -1, index(3, 6, high=4)),
    sample(t(3, 4), 0, index(5, 2, high=3)),
    sample(t(), 0, ints(0)),
    sample(t(4, 3).t(), 1, index(3, 0, high=4)),
    sample(t(3, 4), 0, index(0, 4, high=3).to(torch.uint8)),
    wrong(t(3, 4), 0, ints(0), match="same number of dimensions"),
    wrong(t(3, 4), 0, mask(2, 4), match="Expected dtype int32/int64 for index"),
    wrong(t(3, 4), 0, index(2, 5, high=3), match="no larger than"),
)
_op(
    "take_along_dim",
    sample(t(3, 4), index(2, 4, high=3), 0),
    sample(t(3, 4), index(1, 4, high=3), dim=0),
    sample(t(1, 4), index(3, 2, high=4), 1),
    sample(t(3, 4), index(5, high=12)),
    sample(t(3, 4), index(3, 2, high=4, low=-4), 1),
    wrong(t(3, 4), ints(0), 0, match="same number of dimensions"),
    wrong(t(), ints(0)[0], 0, error=IndexError, match="tensor has no dimensions"),
)
_op(
    "take",
    sample(t(3, 4), index(2, 2, high=12)),
    sample(t(3, 4), ints(-1, 0)),
    sample(t(4, 3).t(), ints(5)),
    sample(t(), ints(0)),
    wrong(t(3), t(2), match="[Ee]xpected a long tensor|dtype|Long"),
)


# scatters

_wrong_scatter = [
    wrong(t(3, 4), 0, ints(0), t(1), match="same number of dimensions"),
    wrong(t(3, 4), 0, index(2, 4, high=3), t(1, 4), match="no larger than|larger"),
    wrong(t(3), 0, ints(0), t(1).double(), match="dtype to be equal"),
]
_op(
    "scatter",
    sample(t(3, 4), 0, permutation(3, 4), t(3, 4)),
    sample(t(3, 4), 0, permutation(3, 4)[:2], t(2, 4)),
    sample(t(3, 4), -1, index(3, 2, high=4), 1),
    sample(t(3, 4), 0, index(2, 2, high=3), value=1),
    sample(t(3), 0, ints(1), t(1)),
    _wrong_scatter,
)
_op(
    "scatter_add",
    sample(t(3, 4), 0, index(5, 4, high=3), t(5, 4)),
    sample(t(3, 4), 1, index(2, 3, high=4), t(2, 3)),
    sample(t(), 0, ints(0), t(1)),
    _wrong_scatter,
    dtypes=REAL,
)
_reductions = ("sum", "prod", "mean", "amax", "amin")
_op(
    "scatter_reduce",
    *(
        sample(t(3, 4), 0, index(5, 4, high=3), t(5, 4), reduce, include_self=own)
        for reduce in _reductions
        for own in (True, False)
    ),
    sample(t(4), 0, ints(1, 1, 2), ints(0, 3, 0).to(DTYPE), "prod"),
    wrong(t(3), 0, ints(0), t(1), "median", match="reduce argument must be either"),
    dtypes=FLOATS,
)


# masks and whole tensors

_op(
    "masked_fill",
    sample(t(3, 4), mask(3, 4), 1),
    sample(t(3, 4), mask(4), 1),
    sample(t(3, 1), mask(3, 4), t()),
    sample(t(), mask(), 0),
    sample(t(4, 3).t(), mask(3, 1), value=True),
    wrong(t(3), t(3), 0, match="only supports boolean masks"),
    wrong(t(3), mask(3), t(3), match="0-dimensional value"),
)
_op(
    "masked_scatter",
    [sample(t(3, 4), mask(3, 4), t(12)), sample(t(3, 4), mask(4), t(5, 4)), sample(t(3, 4), mask(3, 1), t(12))],
    wrong(t(3), t(3), t(3), match="expected.*(Bool|Boolean|bool)|mask"),
    wrong(t(3), mask(3), t(3).double(), match="same dtypes"),
)
_op(
    "select_scatter",
    [sample(t(3, 4), t(4), 0, 1), sample(t(3, 4), t(3), 1, -1)],
    wrong(t(3, 4), t(3), 0, 1, match="expected src to have a size equal"),
)
_op(
    "slice_scatter",
    [sample(t(3, 4), t(2, 4), 0, 1), sample(t(3, 4), t(3, 2), dim=1, start=0, end=4, step=2), sample(t(3, 4), t(3, 4))],
    wrong(t(3, 4), t(3, 4), 0, 1, match="expected src to have a size equal"),
)


_op(
    "Tensor.copy_",
    [sample(t(3, 4), t(3, 4)), sample(t(3, 4), t(4)), sample(t(3, 4), t(3, 1).float()), sample(t(4, 3).t(), t())],
    wrong(t(3), t(4), match="must match the existing size"),
    wrap=on_a_clone,
)
_op(
    "fill",
    [sample(t(3, 4), 1), sample(t(3, 4), t()), sample(t(), True), sample(t(0, 2), 2)],
    wrong(t(3), t(2), match="0-dimension value tensor"),
)


# places

_sorted = [t(5).sort()[0], t(2, 5).sort()[0]]
_op(
    "searchsorted",
    sample(_sorted[0], t(2, 3)),
    sample(_sorted[1], t(2, 3), right=True),
    sample(_sorted[1], t(2, 0), out_int32=True, side="right"),
    sample(_sorted[0], 1),
    wrong(t(2, 3), t(3, 2), match="first N-1 dimensions"),
    dtypes=REAL,
    gradient=False,
)
_op(
    "bucketize",
    [sample(t(2, 3), _sorted[0]), sample(t(), _sorted[0], right=True, out_int32=True)],
    wrong(t(3), t(2, 3), match="must be 1 dimension"),
    dtypes=REAL,
    gradient=False,
)

register_computed(["getitem"])
