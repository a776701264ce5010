"""OpInfos of the elementwise family."""

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from forge.testing.opinfo import (
    ALL,
    BOOL,
    FLOATS,
    INTEGERS,
    REAL,
    ErrorSample,
    OpInfo,
    Sample,
    SampleGenerator,
    make_tensor,
    register_opinfo,
    sample,
)
from forge.torch_internals.versions import TORCH


def method(name: str) -> Callable:
    """x.name(...) as a function of x: a proxy has the method, but is no argument for torch.Tensor.name itself."""

    def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, name)(*args, **kwargs)

    call.__name__ = name
    return call


def unary_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """A vector, a matrix, a 0-d tensor, an empty one, a transposed one."""
    for shape in ((5,), (2, 3), (), (0, 3)):
        yield sample(info.tensor(shape, device, dtype))
    yield sample(info.tensor((3, 4), device, dtype).t())


def unary_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    """A list where a tensor is wanted."""
    yield ErrorSample(sample([1.0]), TypeError, "must be a tensor|must be Tensor")


# name: (lowest, highest) value of its domain
_SMOOTH: dict[str, tuple[float | None, float | None]] = {
    "acos": (-0.9, 0.9),
    "acosh": (1.1, None),
    "asin": (-0.9, 0.9),
    "asinh": (None, None),
    "atan": (None, None),
    "atanh": (-0.9, 0.9),
    "cos": (None, None),
    "cosh": (None, None),
    "digamma": (0.2, None),
    "erf": (None, None),
    "erfc": (None, None),
    "erfinv": (-0.9, 0.9),
    "exp": (None, None),
    "exp2": (None, None),
    "expm1": (None, None),
    "i0": (None, None),
    "lgamma": (0.2, None),
    "log": (0.1, None),
    "log10": (0.1, None),
    "log1p": (-0.8, None),
    "log2": (0.1, None),
    "reciprocal": (0.2, None),
    "rsqrt": (0.1, None),
    "sigmoid": (None, None),
    "sin": (None, None),
    "sinh": (None, None),
    "sqrt": (0.1, None),
    "tan": (-1.2, 1.2),
    "tanh": (None, None),
}

for _name, _domain in _SMOOTH.items():
    register_opinfo(
        OpInfo(_name, getattr(torch, _name), unary_samples, unary_errors, dtypes=(*FLOATS, *INTEGERS), domain=_domain)
    )


def edge_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """As unary_samples, then zeros, ties, infinities and nan."""
    yield from unary_samples(info, device, dtype)
    if dtype.is_floating_point:
        values = [0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -2.5, math.inf, -math.inf, math.nan]
        yield sample(torch.tensor(values, device=device, dtype=dtype))


for _name, _dtypes, _gradient in (
    ("abs", REAL, True),
    ("angle", (*FLOATS[:2], *INTEGERS), True),
    ("ceil", REAL, True),
    ("floor", REAL, True),
    ("frac", FLOATS, True),
    ("neg", REAL, True),
    ("positive", REAL, True),
    ("sgn", ALL, True),
    ("sign", ALL, True),
    ("square", ALL, True),
    ("trunc", REAL, True),
    ("bitwise_not", (*INTEGERS, *BOOL), False),
    ("isfinite", ALL, False),
    ("isinf", ALL, False),
    ("isnan", ALL, False),
    ("isneginf", ALL, False),
    ("isposinf", ALL, False),
    ("isreal", ALL, False),
    ("logical_not", ALL, False),
    ("signbit", ALL, False),
    ("deg2rad", (*FLOATS, *INTEGERS), True),
    ("rad2deg", (*FLOATS, *INTEGERS), True),
):
    register_opinfo(
        OpInfo(_name, getattr(torch, _name), edge_samples, unary_errors, dtypes=_dtypes, gradient=_gradient)
    )


register_opinfo(
    OpInfo(
        "conj_physical",
        torch.conj_physical,
        unary_samples,
        unary_errors,
        dtypes=(torch.complex64, torch.complex128),
    )
)


def _round_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield from edge_samples(info, device, dtype)
    if dtype in (torch.float32, torch.float64):
        for decimals in (1, -1):
            yield sample(info.tensor((5,), device, dtype), decimals=decimals)


register_opinfo(OpInfo("round", torch.round, _round_samples, unary_errors, dtypes=REAL))


def _nan_to_num_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield from edge_samples(info, device, dtype)
    if dtype.is_floating_point:
        values = torch.tensor([math.inf, -math.inf, math.nan, 1.0], device=device, dtype=dtype)
        yield sample(values, 1.0, 2.0, 3.0)
        yield sample(values, nan=-1.0, posinf=5.0)


register_opinfo(OpInfo("nan_to_num", torch.nan_to_num, _nan_to_num_samples, unary_errors, dtypes=ALL))


# binary


def _one(info: OpInfo, shape: tuple, device: torch.device, dtype: torch.dtype) -> Tensor:
    return info.tensor(shape, device, dtype)


def _not_zero(info: OpInfo, shape: tuple, device: torch.device, dtype: torch.dtype) -> Tensor:
    return make_tensor(shape, device, dtype, low=1, high=6)


def _small(info: OpInfo, shape: tuple, device: torch.device, dtype: torch.dtype) -> Tensor:
    return make_tensor(shape, device, dtype, low=0, high=4)


def binary_samples(*numbers: Any, second: Callable = _one, first: tuple = ()) -> SampleGenerator:
    """Equal shapes, broadcasting, 0-d, empty and transposed operands; `numbers` second, and `first` in front."""

    def samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        for a, b in (
            ((5,), (5,)),
            ((2, 3), (3,)),
            ((2, 1), (1, 3)),
            ((), (4,)),
            ((2, 3), ()),
            ((), ()),
            ((0, 3), (3,)),
        ):
            yield sample(info.tensor(a, device, dtype), second(info, b, device, dtype))
        yield sample(info.tensor((3, 4), device, dtype).t(), second(info, (4, 3), device, dtype))
        for number in numbers:
            yield sample(info.tensor((2, 3), device, dtype), number)
        for number in first:
            yield sample(number, second(info, (2, 3), device, dtype))

    return samples


def binary_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    """Shapes that do not broadcast, and a string where a tensor is wanted."""
    dtype = torch.int64 if torch.float32 not in info.dtypes else torch.float32
    three, four = torch.ones(3, dtype=dtype, device=device), torch.ones(4, dtype=dtype, device=device)
    yield ErrorSample(sample(three, four), RuntimeError, r"size of tensor a \(\d\) must match the size of tensor b")
    yield ErrorSample(sample(three, "a"), TypeError, "must be Tensor|invalid combination|must be a tensor")


def _with_alpha(generator: SampleGenerator) -> SampleGenerator:
    def samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        yield from generator(info, device, dtype)
        if dtype != torch.bool:
            yield sample(info.tensor((2, 3), device, dtype), info.tensor((3,), device, dtype), alpha=2)
        if dtype.is_floating_point:
            other = info.tensor((2, 3), device, torch.float32)
            yield sample(info.tensor((3,), device, dtype), other, alpha=0.5)
            yield sample(info.tensor((3,), device, dtype), torch.arange(3, device=device))

    return samples


def _alpha_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    yield from binary_errors(info, device)
    x = torch.ones(3, dtype=torch.int64, device=device)
    yield ErrorSample(sample(x, x, alpha=0.5), RuntimeError, "alpha must not be a floating point number")


def _subtraction_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    yield from _alpha_errors(info, device)
    x = torch.ones(3, dtype=torch.bool, device=device)
    yield ErrorSample(sample(x, x), RuntimeError, "Subtraction, the `-` operator")


register_opinfo(OpInfo("add", torch.add, _with_alpha(binary_samples(2, 0.5, first=(3,))), _alpha_errors, dtypes=ALL))
register_opinfo(
    OpInfo("sub", torch.sub, _with_alpha(binary_samples(2, 0.5, first=(3,))), _subtraction_errors, dtypes=REAL)
)
register_opinfo(OpInfo("rsub", torch.rsub, _with_alpha(binary_samples(2, 0.5)), _subtraction_errors, dtypes=REAL))
register_opinfo(OpInfo("mul", torch.mul, binary_samples(2, 0.5, first=(3,)), binary_errors, dtypes=ALL))


def _div_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield from binary_samples(2, 0.5, second=_not_zero, first=(3,))(info, device, dtype)
    for mode in ("trunc", "floor", None):
        yield sample(info.tensor((8,), device, dtype), _not_zero(info, (8,), device, dtype), rounding_mode=mode)
        yield sample(info.tensor((8,), device, dtype), 3, rounding_mode=mode)


def _div_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    yield from binary_errors(info, device)
    x = torch.ones(3, device=device)
    yield ErrorSample(sample(x, x, rounding_mode="up"), RuntimeError, "expected rounding_mode to be one of")


register_opinfo(OpInfo("div", torch.div, _div_samples, _div_errors, dtypes=REAL))
register_opinfo(
    OpInfo(
        "operator.truediv",
        operator.truediv,
        binary_samples(2, 0.5, second=_not_zero, first=(3, 0.5)),
        binary_errors,
        dtypes=REAL,
    )
)
register_opinfo(
    OpInfo(
        "floor_divide",
        torch.floor_divide,
        binary_samples(2, 0.75, second=_not_zero, first=(3,)),
        binary_errors,
        dtypes=REAL,
        gradient=False,
    )
)
register_opinfo(
    OpInfo("remainder", torch.remainder, binary_samples(2, 1.5, second=_not_zero), binary_errors, dtypes=REAL)
)
register_opinfo(OpInfo("fmod", torch.fmod, binary_samples(2, 1.5, second=_not_zero), binary_errors, dtypes=REAL))


def _pow_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield from binary_samples(0, 1, 2, 3, second=_small, first=(2, 0))(info, device, dtype)
    if dtype.is_floating_point:
        for exponent in (0.5, -1, -0.5, 2.0):
            yield sample(info.tensor((3,), device, dtype), exponent)
        yield sample(torch.zeros(3, device=device, dtype=dtype), torch.tensor([0, 1, 2], device=device, dtype=dtype))


def _pow_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    yield from binary_errors(info, device)
    x = torch.ones(3, dtype=torch.int64, device=device)
    yield ErrorSample(sample(x, -1), RuntimeError, "Integers to negative integer powers are not allowed")


register_opinfo(OpInfo("pow", torch.pow, _pow_samples, _pow_errors, dtypes=REAL, domain=(0.2, 3)))
register_opinfo(
    OpInfo(
        "float_power",
        torch.float_power,
        binary_samples(2, 0.5, second=_small, first=(2,)),
        binary_errors,
        dtypes=REAL,
        domain=(0.2, 3),
    )
)


def extremum_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Two tensors, also equal ones and ones with nan."""
    yield from binary_samples()(info, device, dtype)
    x = info.tensor((5,), device, dtype)
    yield sample(x, x.clone())
    if dtype.is_floating_point:
        nan = torch.tensor([math.nan, 1.0, math.nan, 2.0], device=device, dtype=dtype)
        yield sample(nan, torch.tensor([1.0, math.nan, math.nan, 2.0], device=device, dtype=dtype))


for _name in ("maximum", "minimum"):
    register_opinfo(OpInfo(_name, getattr(torch, _name), extremum_samples, binary_errors, dtypes=ALL))

for _name, _domain in (("atan2", (0.1, None)), ("hypot", (0.1, None)), ("copysign", (0.1, None))):
    register_opinfo(OpInfo(_name, getattr(torch, _name), binary_samples(), binary_errors, domain=_domain))
register_opinfo(  # torch's derivative came with 2.13
    OpInfo("nextafter", torch.nextafter, binary_samples(), binary_errors, gradient=TORCH >= (2, 13))
)
register_opinfo(OpInfo("ldexp", torch.ldexp, binary_samples(second=_small), binary_errors))


def _heaviside_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    """Dtypes that differ."""
    yield from binary_errors(info, device)
    wrong = sample(torch.ones(2, device=device), torch.ones(2, device=device, dtype=torch.float64))
    yield ErrorSample(wrong, RuntimeError, "different dtypes")


register_opinfo(OpInfo("heaviside", torch.heaviside, binary_samples(), _heaviside_errors, dtypes=REAL, gradient=False))

for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    register_opinfo(
        OpInfo(_name, getattr(torch, _name), binary_samples(1, 0.5), binary_errors, dtypes=ALL, gradient=False)
    )
register_opinfo(
    OpInfo("operator.lt", operator.lt, binary_samples(1, first=(1,)), binary_errors, dtypes=REAL, gradient=False)
)
for _name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    register_opinfo(
        OpInfo(
            _name,
            getattr(torch, _name),
            binary_samples(1, first=(3,)),
            binary_errors,
            dtypes=(*INTEGERS, *BOOL),
            gradient=False,
        )
    )
for _name in ("bitwise_left_shift", "bitwise_right_shift"):
    register_opinfo(
        OpInfo(
            _name,
            getattr(torch, _name),
            binary_samples(1, second=_small),
            binary_errors,
            dtypes=INTEGERS,
            gradient=False,
        )
    )
for _name in ("logical_and", "logical_or", "logical_xor"):
    register_opinfo(OpInfo(_name, getattr(torch, _name), binary_samples(), binary_errors, dtypes=ALL, gradient=False))


def _isclose_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield from binary_samples()(info, device, dtype)
    x = info.tensor((5,), device, dtype)
    yield sample(x, x.clone(), rtol=0.0, atol=0.0)
    yield sample(x, x + 1, 0.5, 1.0)
    if dtype.is_floating_point:
        values = torch.tensor([math.nan, math.inf, -math.inf, 1.0], device=device, dtype=dtype)
        yield sample(values, values.clone(), equal_nan=True)
        yield sample(values, values.clone())


def _isclose_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    x = torch.ones(3, device=device)
    yield ErrorSample(sample(x, x.double()), RuntimeError, "did not match")


register_opinfo(
    OpInfo("isclose", torch.isclose, _isclose_samples, _isclose_errors, dtypes=(*FLOATS, torch.int64), gradient=False)
)


# where and limits


def _where_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for shapes in (((5,), (5,), (5,)), ((2, 1), (3,), (2, 3)), ((), (2,), ()), ((0, 3), (3,), (3,))):
        condition, a, b = (
            make_tensor(shapes[0], device, torch.bool),
            *(info.tensor(s, device, dtype) for s in shapes[1:]),
        )
        yield sample(condition, a, b)
    condition = make_tensor((2, 3), device, torch.bool)
    yield sample(condition, info.tensor((2, 3), device, dtype), 2)
    yield sample(condition, 0.5, info.tensor((3,), device, dtype))
    yield sample(condition, 1, 2)
    yield sample(condition, info.tensor((3,), device, dtype), info.tensor((3,), device, torch.float32))


def _where_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    x = torch.ones(3, device=device)
    yield ErrorSample(sample(x, x, x), RuntimeError, "expected condition to be a boolean tensor")
    yield ErrorSample(sample(x > 0, x, torch.ones(4, device=device)), RuntimeError, "must match the size")


register_opinfo(OpInfo("where", torch.where, _where_samples, _where_errors, dtypes=ALL))
register_opinfo(
    OpInfo(
        "Tensor.where",
        lambda condition, x, other: x.where(condition, other),
        lambda info, device, dtype: (s for s in _where_samples(info, device, dtype) if isinstance(s.args[1], Tensor)),
        _where_errors,
        dtypes=ALL,
        symbols=("torch.Tensor.where",),
    )
)


# operators and in-place forms reach the same symbols


def _inplace_samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield sample(info.tensor((2, 3), device, dtype), info.tensor((3,), device, dtype))
    yield sample(info.tensor((2, 3), device, dtype), 2)


def _inplace_errors(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
    yield ErrorSample(
        sample(torch.ones(3, device=device), torch.ones(2, 3, device=device)),
        RuntimeError,
        "doesn't match the broadcast",
    )


for _name in ("add_", "sub_", "mul_", "div_", "pow_", "clamp_min_"):
    register_opinfo(OpInfo(f"Tensor.{_name}", method(_name), _inplace_samples, _inplace_errors, domain=(0.5, 3)))
for _name in ("iadd", "isub", "imul", "itruediv"):
    register_opinfo(
        OpInfo(f"operator.{_name}", getattr(operator, _name), _inplace_samples, _inplace_errors, domain=(0.5, 3))
    )
