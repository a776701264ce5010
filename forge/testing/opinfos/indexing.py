"""OpInfos of the indexing family."""

import operator
from collections.abc import Callable
from typing import Any

import torch

from forge.testing.opinfo import (
    ALL,
    FLOATS,
    REAL,
    Directive,
    ErrorGenerator,
    OpInfo,
    SampleGenerator,
    register_opinfo,
    sample,
)
from forge.testing.opinfos.cases import Maker, cases, errors, register_computed

ALL_OF_IT = slice(None)


def _register(name: str, op: Callable, samples: SampleGenerator, wrong: ErrorGenerator, **known: Any) -> None:
    register_opinfo(OpInfo(name, op, samples, wrong, **{"dtypes": ALL, **known}))


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


def _index_keys(make: Maker) -> list[Any]:
    """Keys of a (3, 4, 5) tensor with index tensors: one, several, broadcast, apart, with slices, ints and None."""
    rows, pair = make.places(0, 2), make.places([1], [-1])
    return [
        rows,
        pair,
        make.places(),
        [0, 2],
        torch.tensor(1, device=make.device),
        rows.int(),
        (rows, rows),
        (rows, pair),
        (ALL_OF_IT, rows),
        (rows, ALL_OF_IT, rows),
        (ALL_OF_IT, rows, pair),
        (0, rows),
        (0, ALL_OF_IT, rows),
        (rows, None, rows),
        (slice(1, None), rows, slice(None, None, 2)),
        (ALL_OF_IT, torch.tensor(-1, device=make.device), ALL_OF_IT),
        (torch.tensor(1, device=make.device), ALL_OF_IT, rows),
        ([0, 1], [1, 2]),
    ]


_COUNT = 18
_wrong_keys = errors(
    (lambda make: sample(make(3), 3), IndexError, "out of bounds|out of range"),
    (lambda make: sample(make(3), (0, 0)), IndexError, "too many indices"),
    (lambda make: sample(make(3), 1.5), IndexError, "only integers, slices"),
    (lambda make: sample(make(3), slice(None, None, -1)), ValueError, "step must be positive|greater than zero"),
    (lambda make: sample(make(3), make(2)), IndexError, "tensors used as indices"),
)
_register(
    "getitem",
    operator.getitem,
    cases(
        *(lambda make, key=key: sample(make(3, 4, 5), key) for key in _BASIC_KEYS),
        *(lambda make, i=i: sample(make(3, 4, 5), _index_keys(make)[i]) for i in range(_COUNT)),
        lambda make: sample(make(), ...),
        lambda make: sample(make(), None),
        lambda make: sample(make(0, 3), make.places()),
        lambda make: sample(make(5, 4).t(), make.places(3, 3)),
    ),
    _wrong_keys,
)


def _assigned(x: torch.Tensor, key: Any, value: Any) -> torch.Tensor:
    """A copy of x with x[key] = value."""
    out = x.clone()
    out[key] = value
    return out


def _fill_case(make: Maker, key: Any) -> Any:
    return sample(make(3, 4, 5), key, 1)


def _assign_case(make: Maker, key: Any) -> Any:
    x = make(3, 4, 5)
    shape = x[key].shape
    return sample(x, key, make(*shape[1:]) if len(shape) > 1 else make(*shape))


_MASKS: tuple[Callable[[Maker], Any], ...] = (
    lambda make: sample(make(3, 4), make.mask(3, 4), 2),
    lambda make: sample(make(3, 4), make.mask(3), 2),
    lambda make: sample(make(3, 4), make.mask(3), make(4)),
    lambda make: sample(make(3, 4), (ALL_OF_IT, make.mask(4)), make()),
    lambda make: sample(make(2, 3), torch.tensor([[True, False, True]] * 2, device=make.device), make(4)),
)
_register(
    "setitem",
    _assigned,
    cases(
        *(lambda make, key=key: _assign_case(make, key) for key in _BASIC_KEYS),
        *(lambda make, key=key: _fill_case(make, key) for key in _BASIC_KEYS),
        *(lambda make, i=i: _assign_case(make, _index_keys(make)[i]) for i in (0, 2, 3, 4, 8, 9, 11, 14, 15)),
        *(lambda make, i=i: _fill_case(make, _index_keys(make)[i]) for i in range(_COUNT)),
        *_MASKS,
        lambda make: sample(make(3, 4), 0, make(1, 1, 4)),
        lambda make: sample(make(3, 4), 0, torch.tensor(1.5, device=make.device)),
    ),
    errors(
        (lambda make: sample(make(3), 3, 0), IndexError, "out of bounds|out of range"),
        (lambda make: sample(make(3, 4), 0, make(3)), RuntimeError, "cannot be broadcast"),
        (lambda make: sample(make(3), make.mask(4), 0), IndexError, "shape of the mask"),
    ),
    symbols=("operator.setitem",),
)
_register(
    "index_put",
    torch.index_put,
    cases(
        lambda make: sample(make(3, 4), (make.places(0, 2),), make(4)),
        lambda make: sample(make(3, 4), (make.places(0, 2), make.places(1, 1)), make(2)),
        lambda make: sample(make(3, 4), [make.places(0, 2)], make(2, 4), accumulate=True),
        lambda make: sample(make(3, 4), (make.mask(3, 4),), make()),
    ),
    errors(
        (lambda make: sample(make(3), (make.places(0, 1),), make(3)), RuntimeError, "cannot be broadcast"),
        (lambda make: sample(make(3), (make.places(0),), make(1).double()), RuntimeError, "dtypes match"),
    ),
)
_register(
    "ops.aten.index",
    torch.ops.aten.index.Tensor,
    cases(
        lambda make: sample(make(3, 4), [make.places(0, 2)]),
        lambda make: sample(make(3, 4), [None, make.places(0, 2)]),
        lambda make: sample(make(3, 4), [make.places([0], [1]), make.places(0, 2)]),
    ),
    errors((lambda make: sample(make(3), [make(2)]), IndexError, "tensors used as indices")),
)


# along a dim

_selections = [
    lambda make: (make(3, 4), 0, make.places(0, 2, 2)),
    lambda make: (make(3, 4), -1, make.places(1)),
    lambda make: (make(4, 3).t(), 1, make.places(0, 3)),
    lambda make: (make(3, 4), 0, make.places().int()),
]
_wrong_selection = errors(
    (lambda make: sample(torch.ones(3, 4), 0, torch.tensor([[0], [1]])), IndexError, "vector"),  # RuntimeError on a GPU
    (lambda make: sample(make(3, 4), 2, make.places(0)), IndexError, "out of range"),
)
_register(
    "index_select",
    torch.index_select,
    cases(
        *(lambda make, case=case: sample(*case(make)) for case in _selections),
        lambda make: sample(make(), 0, make.places(0)),
        lambda make: sample(make(3), 0, torch.tensor(2, device=make.device)),
    ),
    _wrong_selection,
)


def _sources(make: Maker, case: Callable) -> tuple:
    x, dim, index = case(make)
    shape = list(x.shape)
    shape[dim] = index.numel()
    return x, dim, index, make(*shape)


_distinct = [
    lambda make: (make(3, 4), 0, make.places(2, 0)),
    lambda make: (make(3, 4), -1, make.places(1)),
    lambda make: (make(4, 3).t(), 1, make.places(0, 3)),
]
_register(
    "index_add",
    torch.index_add,
    cases(
        *(lambda make, case=case: sample(*_sources(make, case)) for case in _selections[:3]),
        lambda make: sample(*_sources(make, _selections[0]), alpha=2),
        lambda make: sample(make(), 0, make.places(0), make()),
    ),
    errors(
        (lambda make: sample(make(3), 0, make.places(0), make(1).double()), RuntimeError, "same (dtype|scalar type)")
    ),
    dtypes=REAL,
    directives=(
        Directive(
            "tolerance",
            "a GPU adds repeated rows in half precision, in no fixed order",
            executors=("torch-prims",),
            devices=("cuda",),
            dtypes=(torch.bfloat16, torch.float16),
            tolerance=(2e-2, 2e-2),
        ),
        Directive(
            "tolerance",
            "the scaled rows are rounded to bfloat16 before they are added, and may cancel",
            executors=("torch-prims",),
            devices=("cpu",),
            dtypes=(torch.bfloat16,),
            tolerance=(1.6e-2, 1.6e-2),
        ),
    ),
)
_register(
    "index_copy",
    torch.index_copy,
    cases(
        *(lambda make, case=case: sample(*_sources(make, case)) for case in _distinct),
        lambda make: sample(make(), 0, make.places(0), make()),
    ),
    errors(
        (lambda make: sample(make(3), 0, make.places(0), make(1).double()), RuntimeError, "same (dtype|scalar type)")
    ),
)
_register(
    "index_fill",
    torch.index_fill,
    cases(
        *(lambda make, case=case: sample(*case(make), 1) for case in _selections[:3]),
        lambda make: sample(*_selections[0](make), make()),
        lambda make: sample(make(), 0, make.places(0), 1),
    ),
    errors((lambda make: sample(make(3), 0, make.places(0), make(2)), RuntimeError, "0-dim")),
)
_register(
    "gather",
    torch.gather,
    cases(
        lambda make: sample(make(3, 4), 0, make.index((2, 4), 3)),
        lambda make: sample(make(3, 4), -1, make.index((3, 6), 4)),
        lambda make: sample(make(3, 4), 0, make.index((5, 2), 3)),
        lambda make: sample(make(), 0, make.places(0)),
        lambda make: sample(make(4, 3).t(), 1, make.index((3, 0), 4)),
        lambda make: sample(make(3, 4), 0, make.index((0, 4), 3).to(torch.uint8)),
    ),
    errors(
        (lambda make: sample(make(3, 4), 0, make.places(0)), RuntimeError, "same number of dimensions"),
        (lambda make: sample(make(3, 4), 0, make.mask(2, 4)), RuntimeError, "Expected dtype int32/int64 for index"),
        (lambda make: sample(make(3, 4), 0, make.index((2, 5), 3)), RuntimeError, "no larger than"),
    ),
)
_register(
    "take_along_dim",
    torch.take_along_dim,
    cases(
        lambda make: sample(make(3, 4), make.index((2, 4), 3), 0),
        lambda make: sample(make(3, 4), make.index((1, 4), 3), dim=0),
        lambda make: sample(make(1, 4), make.index((3, 2), 4), 1),
        lambda make: sample(make(3, 4), make.index((5,), 12)),
        lambda make: sample(make(3, 4), make.index((3, 2), 4, low=-4), 1),
    ),
    errors(
        (lambda make: sample(make(3, 4), make.places(0), 0), RuntimeError, "same number of dimensions"),
        (lambda make: sample(make(), make.places(0)[0], 0), IndexError, "tensor has no dimensions"),
    ),
)
_register(
    "take",
    torch.take,
    cases(
        lambda make: sample(make(3, 4), make.index((2, 2), 12)),
        lambda make: sample(make(3, 4), make.places(-1, 0)),
        lambda make: sample(make(4, 3).t(), make.places(5)),
        lambda make: sample(make(), make.places(0)),
    ),
    errors((lambda make: sample(make(3), make(2)), RuntimeError, "[Ee]xpected a long tensor|dtype|Long")),
)


# scatters

_wrong_scatter = errors(
    (lambda make: sample(make(3, 4), 0, make.places(0), make(1)), RuntimeError, "same number of dimensions"),
    (lambda make: sample(make(3, 4), 0, make.index((2, 4), 3), make(1, 4)), RuntimeError, "no larger than|larger"),
    (lambda make: sample(make(3), 0, make.places(0), make(1).double()), RuntimeError, "dtype to be equal"),
)
_register(
    "scatter",
    torch.scatter,
    cases(
        lambda make: sample(make(3, 4), 0, make.permutation(3, 4), make(3, 4)),
        lambda make: sample(make(3, 4), 0, make.permutation(3, 4)[:2], make(2, 4)),
        lambda make: sample(make(3, 4), -1, make.index((3, 2), 4), 1),
        lambda make: sample(make(3, 4), 0, make.index((2, 2), 3), value=1),
        lambda make: sample(make(3), 0, make.places(1), make(1)),
    ),
    _wrong_scatter,
)
_register(
    "scatter_add",
    torch.scatter_add,
    cases(
        lambda make: sample(make(3, 4), 0, make.index((5, 4), 3), make(5, 4)),
        lambda make: sample(make(3, 4), 1, make.index((2, 3), 4), make(2, 3)),
        lambda make: sample(make(), 0, make.places(0), make(1)),
    ),
    _wrong_scatter,
    dtypes=REAL,
)
_reductions = ("sum", "prod", "mean", "amax", "amin")
_register(
    "scatter_reduce",
    torch.scatter_reduce,
    cases(
        *(
            lambda make, reduce=reduce, own=own: sample(
                make(3, 4), 0, make.index((5, 4), 3), make(5, 4), reduce, include_self=own
            )
            for reduce in _reductions
            for own in (True, False)
        ),
        lambda make: sample(make(4), 0, make.places(1, 1, 2), make.places(0, 3, 0).to(make.dtype), "prod"),
    ),
    errors(
        (
            lambda make: sample(make(3), 0, make.places(0), make(1), "median"),
            RuntimeError,
            "reduce argument must be either",
        )
    ),
    dtypes=FLOATS,
)


# masks and whole tensors

_register(
    "masked_fill",
    torch.masked_fill,
    cases(
        lambda make: sample(make(3, 4), make.mask(3, 4), 1),
        lambda make: sample(make(3, 4), make.mask(4), 1),
        lambda make: sample(make(3, 1), make.mask(3, 4), make()),
        lambda make: sample(make(), make.mask(), 0),
        lambda make: sample(make(4, 3).t(), make.mask(3, 1), value=True),
    ),
    errors(
        (lambda make: sample(make(3), make(3), 0), RuntimeError, "only supports boolean masks"),
        (lambda make: sample(make(3), make.mask(3), make(3)), RuntimeError, "0-dimensional value"),
    ),
)
_register(
    "masked_scatter",
    torch.masked_scatter,
    cases(
        lambda make: sample(make(3, 4), make.mask(3, 4), make(12)),
        lambda make: sample(make(3, 4), make.mask(4), make(5, 4)),
        lambda make: sample(make(3, 4), make.mask(3, 1), make(12)),
    ),
    errors(
        (lambda make: sample(make(3), make(3), make(3)), RuntimeError, "expected.*(Bool|Boolean|bool)|mask"),
        (lambda make: sample(make(3), make.mask(3), make(3).double()), RuntimeError, "same dtypes"),
    ),
)
_register(
    "select_scatter",
    torch.select_scatter,
    cases(lambda make: sample(make(3, 4), make(4), 0, 1), lambda make: sample(make(3, 4), make(3), 1, -1)),
    errors((lambda make: sample(make(3, 4), make(3), 0, 1), RuntimeError, "expected src to have a size equal")),
)
_register(
    "slice_scatter",
    torch.slice_scatter,
    cases(
        lambda make: sample(make(3, 4), make(2, 4), 0, 1),
        lambda make: sample(make(3, 4), make(3, 2), dim=1, start=0, end=4, step=2),
        lambda make: sample(make(3, 4), make(3, 4)),
    ),
    errors((lambda make: sample(make(3, 4), make(3, 4), 0, 1), RuntimeError, "expected src to have a size equal")),
)


def _copied(x: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
    """x.copy_(src) on a clone of x."""
    return x.clone().copy_(src)


_register(
    "Tensor.copy_",
    _copied,
    cases(
        lambda make: sample(make(3, 4), make(3, 4)),
        lambda make: sample(make(3, 4), make(4)),
        lambda make: sample(make(3, 4), make(3, 1).float()),
        lambda make: sample(make(4, 3).t(), make()),
    ),
    errors((lambda make: sample(make(3), make(4)), RuntimeError, "must match the existing size")),
    symbols=("torch.Tensor.copy_",),
)
_register(
    "fill",
    torch.fill,
    cases(
        lambda make: sample(make(3, 4), 1),
        lambda make: sample(make(3, 4), make()),
        lambda make: sample(make(), True),
        lambda make: sample(make(0, 2), 2),
    ),
    errors((lambda make: sample(make(3), make(2)), RuntimeError, "0-dimension value tensor")),
)


# places

_sorted = [lambda make: make(5).sort()[0], lambda make: make(2, 5).sort()[0]]
_register(
    "searchsorted",
    torch.searchsorted,
    cases(
        lambda make: sample(_sorted[0](make), make(2, 3)),
        lambda make: sample(_sorted[1](make), make(2, 3), right=True),
        lambda make: sample(_sorted[1](make), make(2, 0), out_int32=True, side="right"),
        lambda make: sample(_sorted[0](make), 1),
    ),
    errors((lambda make: sample(make(2, 3), make(3, 2)), RuntimeError, "first N-1 dimensions")),
    dtypes=REAL,
    gradient=False,
)
_register(
    "bucketize",
    torch.bucketize,
    cases(
        lambda make: sample(make(2, 3), _sorted[0](make)),
        lambda make: sample(make(), _sorted[0](make), right=True, out_int32=True),
    ),
    errors((lambda make: sample(make(3), make(2, 3)), RuntimeError, "must be 1 dimension")),
    dtypes=REAL,
    gradient=False,
)

register_computed(["getitem"])
