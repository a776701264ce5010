"""OpInfos of the reduction family."""

import math
from collections.abc import Callable
from typing import Any

import torch

from forge.testing.opinfo import ALL, FLOATS, INTEGERS, REAL
from forge.testing.table import (
    DTYPE,
    Row,
    Value,
    Where,
    floats,
    op,
    sample,
    shared_value,
    t,
    tolerance,
    values,
    wrong,
)
from forge.torch_internals.versions import TORCH

_SHAPES = ((5,), (2, 3), (2, 3, 4), ())
_STEPWISE = tolerance("eager rounds to half precision after each step, and loses the last bits where terms cancel")
_X = shared_value(t(2, 3, 4))


def _over_dims(*options: dict[str, Any], all_by_default: bool = True, empty: bool = True) -> list[Row]:
    """Return rows of no dim, one, several and all, kept or not, and one for each of `options`."""
    return [
        *(sample(t(*shape), *dim) for shape in _SHAPES for dim in ([(), (-1,)] if all_by_default else [(-1,)])),
        *(
            sample(_X, dims, keepdim)
            for dims, keepdim in (((0, 2), False), ((0, -1), True), (1, True), ((0, 1, 2), False))
        ),
        sample(_X, dim=1, keepdim=True),
        sample(_X, axis=1),
        sample(t(3, 4).t(), 0),
        *([sample(t(0, 3), 0)] if empty else []),
        sample(t(0, 3), 1),
        *(sample(_X, **option) for option in options),
    ]


def _over_dim(*options: dict[str, Any], all_by_default: bool = True, axis: bool = True) -> list[Row]:
    """Return rows of one dim, kept or not, and one for each of `options`."""
    return [
        *(sample(t(*shape), *dim) for shape in _SHAPES for dim in ([(), (0,)] if all_by_default else [(0,)])),
        sample(_X, 1, True),
        sample(_X, dim=-1, keepdim=True),
        *([sample(_X, axis=1)] if axis else []),
        sample(t(3, 4).t(), 0),
        *(sample(_X, **option) for option in options),
    ]


_DIM = [wrong(t(2, 3), 3, error=IndexError, match="Dimension out of range")]
_DIMS = [*_DIM, wrong(t(2, 3), (0, 0), match="twice|multiple times")]
_NO_ELEMENTS = wrong(t(0, 3), 0, error=IndexError, match="to have non-zero size")
_DTYPES = ({"dtype": torch.float64}, {"dim": (0, 1), "dtype": torch.float32})
_ALL_DIMS = {"dim": ()}

op("sum", _over_dims(*_DTYPES, _ALL_DIMS), _DIMS, dtypes=ALL)
op("mean", _over_dims(*_DTYPES, _ALL_DIMS), _DIMS, wrong(t(3, dtype=torch.int64), match="could not infer output dtype"))
_NANS = values([[1.0, math.nan, 2.0], [math.nan, 3.0, 4.0]])
_WITH_NANS = [*_over_dims(*_DTYPES), floats(sample(_NANS), sample(_NANS, 0))]
op("nansum", _WITH_NANS, _DIMS, dtypes=REAL)
op("nanmean", _WITH_NANS, _DIMS)
op("amax amin", _over_dims(_ALL_DIMS, empty=False), _DIMS, _NO_ELEMENTS, dtypes=ALL)
op("any all", _over_dims(_ALL_DIMS), _DIMS, dtypes=ALL, gradient=False)
_ZEROS = values([[1, 0, 2], [0, 3, 0], [1, 2, 3]], torch.int64)
op(
    "prod",
    _over_dim({"dtype": torch.float64}, {"dim": 1, "dtype": torch.float32}),
    [sample(_ZEROS.to(DTYPE)), sample(_ZEROS.to(DTYPE), 1), sample(t(0, 3), 0)],
    _DIM,
    dtypes=ALL,
    domain=(-2, 2),
    directives=(_STEPWISE,),
)
_COUNTED = values([[1, 0, 2], [0, 3, 0]], torch.int64).to(DTYPE)
op(
    "count_nonzero",
    *(sample(_COUNTED, dim) for dim in (None, 0, (0, 1))),
    sample(_COUNTED, dim=1),
    _DIMS,
    dtypes=ALL,
    gradient=False,
)
_EXTREMES = values([[math.inf, 1.0], [-math.inf, -math.inf], [1000.0, 1000.0]])
op(
    "logsumexp",
    _over_dims(all_by_default=False),
    floats(sample(_EXTREMES, 1)),
    _DIMS,
    dtypes=(*FLOATS, torch.int64),
    directives=(_STEPWISE,),
)
op(
    "Tensor.sum_to_size",
    [sample(_X, 3, 1), sample(_X, (2, 1, 4)), sample(_X, (1,)), sample(_X * 1, 2, 3, 4), sample(t(), ())],
    wrong(t(2, 3), (2,), match="is not expandable to size"),
)


# variance

_XS, _M = [shared_value(t(*shape)) for shape in _SHAPES[:3]], shared_value(t(3, 4))
op(
    "var std var_mean std_mean",
    *(
        sample(x, *args, **kwargs)
        for x in _XS
        for args, kwargs in (((), {}), ((False,), {}), ((0,), {}), ((), {"dim": -1, "keepdim": True}))
    ),
    sample(_M, 0, False),
    sample(_M, 1, True, True),
    sample(_M, (0, 1), correction=0),
    sample(_M, dim=1, unbiased=False),
    sample(_M, correction=2, dim=0, keepdim=True),
    sample(_M, axis=1),
    sample(_M.t(), 0),
    _DIM,
    wrong(t(3, dtype=torch.int64), match="only support floating point and complex dtypes"),
    directives=(
        tolerance(
            "torch sums half precision in another order; one unit in the last place of bfloat16",
            2e-2,
            1e-2,
            executors=None,
        ),
    ),
)


# extremes with their indices

_Y = shared_value(t(2, 3))
op(
    "max min",
    _over_dim(),
    [sample(_Y, t(3)), sample(_Y, other=t(2, 1)), sample(values([[1, 1, 0], [0, 1, 1]], torch.int64).to(DTYPE))],
    floats(sample(values([[1.0, math.nan], [3.0, 2.0]]), 1)),
    _DIM,
    wrong(t(0), match="Expected reduction dim to be specified"),
    _NO_ELEMENTS,
    dtypes=ALL,
)
_WIDE = t(dtype=torch.float64)
op(
    "aminmax",
    *(sample(t(*shape), **kwargs) for shape in _SHAPES for kwargs in ({}, {"dim": 0})),
    sample(t(2, 3), dim=1, keepdim=True),
    wrong(t(2, 3), dim=3, error=IndexError, match="Dimension out of range"),
    wrong(t(2, 3), out=(_WIDE, _WIDE), match="Expected out tensor to have dtype"),
    dtypes=ALL,
    gradient=TORCH >= (2, 12),
)
op(
    "argmax argmin",
    _over_dim({"keepdim": True}),
    _DIM,
    wrong(t(0), error=IndexError, match="Expected reduction dim to be specified"),
    dtypes=REAL,
    gradient=False,
)


def _of_contiguous(function: Callable) -> Callable:
    """Return a function of a contiguous tensor: torch.median of an expanded one reads unwritten memory (2.13)."""
    return lambda input, *args, **kwargs: function(input.contiguous(), *args, **kwargs)


_MIDDLE = values([[1.0, math.nan, 2.0], [5.0, 3.0, 4.0]])
for _middle in (torch.median, torch.nanmedian):
    op(
        _middle.__name__,
        _over_dim(),
        floats(sample(_MIDDLE), sample(_MIDDLE, 1), sample(values([2.0, 2.0, 2.0, 1.0]))),
        _DIM,
        reference=_of_contiguous(_middle),
    )
op("mode", _over_dim({}, all_by_default=False, axis=False), _DIM)
_K_ERRORS = [
    wrong(t(2, 3), 5, match="out of range"),
    wrong(t(2, 3), 1, 4, error=IndexError, match="Dimension out of range"),
]
op("kthvalue", sample(_M, 2), sample(_M, 1, 0), sample(_M, k=3, dim=1, keepdim=True), sample(t(), 1), _K_ERRORS)


# sorting


def _distinct(*shape: int) -> Value:
    """Return values without ties, whose order is unspecified."""
    return Value(lambda target: torch.randperm(math.prod(shape), device=target.device).reshape(shape).to(target.dtype))


_D = shared_value(_distinct(3, 4))
op(
    "topk",
    *(sample(_D, k) for k in (0, 1, 3)),
    [sample(_D, 2, 0, False), sample(_D, k=4, dim=-1, largest=True, sorted=True), sample(_distinct(), 1)],
    _K_ERRORS,
    dtypes=(*FLOATS, *INTEGERS),
)
_SORTED = [
    sample(_D),
    sample(_D, 0, True),
    sample(_D, dim=1, descending=True),
    sample(t(5), stable=True),
    sample(_distinct()),
    sample(_D.t(), -1),
]
op("sort", _SORTED, _DIM, dtypes=REAL)
op("argsort", _SORTED, _DIM, dtypes=REAL, gradient=False)
op(
    "msort",
    [sample(_distinct(5)), sample(_distinct(3, 4))],
    wrong([1.0], error=TypeError, match="must be Tensor"),
    dtypes=REAL,
)


# scans

_SCANS = [
    *(sample(t(*shape), dim) for shape, dim in (((5,), 0), ((2, 3), 1), ((2, 3), -2), ((), 0), ((0, 3), 0))),
    sample(t(3, 4).t(), dim=1),
]
_IN_DTYPES = Where(  # torch's gradient of a complex cumprod in a real dtype is wrong
    lambda dtype: not dtype.is_complex, [sample(t(2, 3), 1, dtype=dtype) for dtype in (torch.float64, torch.float32)]
)
op("cumsum", _SCANS, _IN_DTYPES, _DIM, dtypes=ALL)
op("cumprod", _SCANS, _IN_DTYPES, _DIM, dtypes=ALL, domain=(-2, 2))
op("logcumsumexp", _SCANS, _DIM)
op("cummax cummin", _SCANS, _DIM, dtypes=ALL)
op(
    "histc",
    [sample(t(20), 5), sample(t(4, 5), bins=4, min=-1, max=2)],
    wrong(t(3), 0, match="bins must be > 0"),
    dtypes=FLOATS[:2],
    gradient=False,
)
