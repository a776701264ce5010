"""OpInfos of the elementwise family."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from forge.testing.opinfo import ALL, BOOL, FLOATS, INTEGERS, REAL, Sample
from forge.testing.table import Row, Value, Where, floats, ints, op, sample, shared_value, t, unary, values, wrong
from forge.torch_internals.versions import TORCH

UNARY = unary((5,), (2, 3), (), (0, 3))
UNARY_ERRORS = [wrong([1.0], error=TypeError, match="must be a tensor|must be Tensor")]
_EDGES = [0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -2.5, math.inf, -math.inf, math.nan]
EDGES: list[Row] = [*UNARY, floats(sample(values(_EDGES)))]

_smooth = partial(op, family=(UNARY, UNARY_ERRORS), dtypes=(*FLOATS, *INTEGERS))
_smooth("asinh atan cos cosh erf erfc exp exp2 expm1 i0 sigmoid sin sinh tanh")
_smooth("acos asin atanh erfinv", domain=(-0.9, 0.9))
_smooth("acosh", domain=(1.1, None))
_smooth("digamma lgamma reciprocal", domain=(0.2, None))
_smooth("log log10 log2 rsqrt sqrt", domain=(0.1, None))
_smooth("log1p", domain=(-0.8, None))
_smooth("tan", domain=(-1.2, 1.2))

_stepped = partial(op, family=(EDGES, UNARY_ERRORS))
_stepped("abs ceil floor neg positive trunc", dtypes=REAL)
_stepped("angle", dtypes=(*FLOATS[:2], *INTEGERS))
_stepped("frac", dtypes=FLOATS)
_stepped("sgn sign square", dtypes=ALL)
_stepped("deg2rad rad2deg", dtypes=(*FLOATS, *INTEGERS))
_stepped("bitwise_not", dtypes=(*INTEGERS, *BOOL), gradient=False)
_stepped("isfinite isinf isnan isneginf isposinf isreal logical_not signbit", dtypes=ALL, gradient=False)
op("conj_physical", UNARY, UNARY_ERRORS, dtypes=(torch.complex64, torch.complex128))
_DECIMALS = [sample(t(5), decimals=decimals) for decimals in (1, -1)]
op("round", EDGES, Where(FLOATS[:2].__contains__, _DECIMALS), UNARY_ERRORS, dtypes=REAL)
_NOT_FINITE = values([math.inf, -math.inf, math.nan, 1.0])
op(
    "nan_to_num",
    EDGES,
    floats(sample(_NOT_FINITE, 1.0, 2.0, 3.0), sample(_NOT_FINITE, nan=-1.0, posinf=5.0)),
    UNARY_ERRORS,
    dtypes=ALL,
)


# binary

_not_zero = partial(t, low=1, high=6)
_small = partial(t, low=0, high=4)


def binary(*numbers: Any, second: Callable[..., Value] = t, first: tuple = ()) -> list[Row]:
    """Return rows of equal, broadcast, empty and transposed shapes; of `numbers` second, and of `first` in front."""
    return [
        sample(t(5), second(5)),
        sample(t(2, 3), second(3)),
        sample(t(2, 1), second(1, 3)),
        sample(t(), second(4)),
        sample(t(2, 3), second()),
        sample(t(), second()),
        sample(t(0, 3), second(3)),
        sample(t(3, 4).t(), second(4, 3)),
        *(sample(t(2, 3), number) for number in numbers),
        *(sample(number, second(2, 3)) for number in first),
    ]


def _ones(length: int) -> Value:
    """Return ones in float32, or in int64 if the op does not take it."""
    return Value(
        lambda target: torch.ones(
            length, device=target.device, dtype=torch.float32 if torch.float32 in target.info.dtypes else torch.int64
        )
    )


BINARY_ERRORS = [
    wrong(_ones(3), _ones(4), match=r"size of tensor a \(\d\) must match the size of tensor b"),
    wrong(_ones(3), "a", error=TypeError, match="must be Tensor|invalid combination|must be a tensor"),
]
_ALPHA = [
    Where(lambda dtype: dtype != torch.bool, [sample(t(2, 3), t(3), alpha=2)]),
    floats(sample(t(3), t(2, 3, dtype=torch.float32), alpha=0.5), sample(t(3), ints(0, 1, 2))),
]
_INTEGERS = t(3, dtype=torch.int64)
_ALPHA_ERRORS = [
    *BINARY_ERRORS,
    wrong(_INTEGERS, _INTEGERS, alpha=0.5, match="alpha must not be a floating point number"),
]
_BOOLS = t(3, dtype=torch.bool)
_SUB_ERRORS = [*_ALPHA_ERRORS, wrong(_BOOLS, _BOOLS, match="Subtraction, the `-` operator")]
op("add", binary(2, 0.5, first=(3,)), _ALPHA, _ALPHA_ERRORS, dtypes=ALL)
op("sub", binary(2, 0.5, first=(3,)), _ALPHA, _SUB_ERRORS, dtypes=REAL)
op("rsub", binary(2, 0.5), _ALPHA, _SUB_ERRORS, dtypes=REAL)
op("mul", binary(2, 0.5, first=(3,)), BINARY_ERRORS, dtypes=ALL)
op(
    "div",
    binary(2, 0.5, second=_not_zero, first=(3,)),
    *(sample(t(8), other, rounding_mode=mode) for mode in ("trunc", "floor", None) for other in (_not_zero(8), 3)),
    BINARY_ERRORS,
    wrong(t(3), t(3), rounding_mode="up", match="expected rounding_mode to be one of"),
    dtypes=REAL,
)
op("operator.truediv", binary(2, 0.5, second=_not_zero, first=(3, 0.5)), BINARY_ERRORS, dtypes=REAL)
op("floor_divide", binary(2, 0.75, second=_not_zero, first=(3,)), BINARY_ERRORS, dtypes=REAL, gradient=False)
op("remainder fmod", binary(2, 1.5, second=_not_zero), BINARY_ERRORS, dtypes=REAL)
op(
    "pow",
    binary(0, 1, 2, 3, second=_small, first=(2, 0)),
    floats(
        *(sample(t(3), exponent) for exponent in (0.5, -1, -0.5, 2.0)), sample(values([0, 0, 0]), values([0, 1, 2]))
    ),
    BINARY_ERRORS,
    wrong(_INTEGERS, -1, match="Integers to negative integer powers are not allowed"),
    dtypes=REAL,
    domain=(0.2, 3),
)
op("float_power", binary(2, 0.5, second=_small, first=(2,)), BINARY_ERRORS, dtypes=REAL, domain=(0.2, 3))
_X = shared_value(t(5))
EXTREMA = [
    *binary(),
    sample(_X, _X.clone()),
    floats(sample(values([math.nan, 1.0, math.nan, 2.0]), values([1.0, math.nan, math.nan, 2.0]))),
]
op("maximum minimum", EXTREMA, BINARY_ERRORS, dtypes=ALL)
op("atan2 hypot copysign", binary(), BINARY_ERRORS, domain=(0.1, None))
op("nextafter", binary(), BINARY_ERRORS, gradient=TORCH >= (2, 13))  # torch's derivative came then
op("ldexp", binary(second=_small), BINARY_ERRORS)
_DTYPES_DIFFER = wrong(t(2), t(2, dtype=torch.float64), match="different dtypes")
op("heaviside", binary(), BINARY_ERRORS, _DTYPES_DIFFER, dtypes=REAL, gradient=False)
op("eq ne lt le gt ge", binary(1, 0.5), BINARY_ERRORS, dtypes=ALL, gradient=False)
op("operator.lt", binary(1, first=(1,)), BINARY_ERRORS, dtypes=REAL, gradient=False)
_bitwise = partial(op, family=BINARY_ERRORS, gradient=False)
_bitwise("bitwise_and bitwise_or bitwise_xor", binary(1, first=(3,)), dtypes=(*INTEGERS, *BOOL))
_bitwise("bitwise_left_shift bitwise_right_shift", binary(1, second=_small), dtypes=INTEGERS)
_bitwise("logical_and logical_or logical_xor", binary(), dtypes=ALL)
_SPECIAL = values([math.nan, math.inf, -math.inf, 1.0])
op(
    "isclose",
    binary(),
    [sample(_X, _X.clone(), rtol=0.0, atol=0.0), sample(_X, _X + 1, 0.5, 1.0)],
    floats(sample(_SPECIAL, _SPECIAL.clone(), equal_nan=True), sample(_SPECIAL, _SPECIAL.clone())),
    wrong(t(3), t(3).double(), match="did not match"),
    dtypes=(*FLOATS, torch.int64),
    gradient=False,
)


# where

_CONDITION = shared_value(t(2, 3, dtype=torch.bool))
_WHERE = [
    sample(t(5, dtype=torch.bool), t(5), t(5)),
    sample(t(2, 1, dtype=torch.bool), t(3), t(2, 3)),
    sample(t(dtype=torch.bool), t(2), t()),
    sample(t(0, 3, dtype=torch.bool), t(3), t(3)),
    sample(_CONDITION, t(2, 3), 2),
    sample(_CONDITION, 0.5, t(3)),
    sample(_CONDITION, 1, 2),
    sample(_CONDITION, t(3), t(3, dtype=torch.float32)),
]
_WHERE_ERRORS = [
    wrong(t(3), t(3), t(3), match="expected condition to be a boolean tensor"),
    wrong(_BOOLS, t(3), t(4), match="must match the size"),
]
op("where", _WHERE, _WHERE_ERRORS, dtypes=ALL)
op(
    "Tensor.where",
    [row for row in _WHERE if isinstance(row.args[1], Value)],
    _WHERE_ERRORS,
    op=lambda condition, x, other: x.where(condition, other),
    dtypes=ALL,
)


# operators and in-place forms reach the same symbols

_IN_PLACE: list[Sample] = [sample(t(2, 3), t(3)), sample(t(2, 3), 2)]
op(
    "Tensor.add_ Tensor.sub_ Tensor.mul_ Tensor.div_ Tensor.pow_ Tensor.clamp_min_ "
    "operator.iadd operator.isub operator.imul operator.itruediv",
    _IN_PLACE,
    wrong(t(3), t(2, 3), match="doesn't match the broadcast"),
    symbols=(),
    domain=(0.5, 3),
)
