"""Inductor's code for each dtype at lengths beyond one vector, which the samples of OpInfos do not reach."""

from collections.abc import Callable

import pytest
import torch

import forge

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
DTYPES = (torch.bool, *INTEGERS, *FLOATS)
SHAPE = (5, 101)

Results = dict[str, torch.Tensor]


def extrema(x: torch.Tensor) -> Results:
    return {
        "max": x.max(),
        "min of rows": x.min(-1).values,
        "place of max in rows": x.max(-1).indices,
        "amax of rows": x.amax(-1),
        "amin of columns": x.amin(0),
        "argmax": x.argmax(),
        "argmin of rows": x.argmin(-1),
        "argmax of columns": x.argmax(0),
        "aminmax": torch.stack(torch.aminmax(x)),
    }


def sums(x: torch.Tensor) -> Results:
    return {
        "sum": x.sum(),
        "sum of rows": x.sum(-1),
        "sum of columns": x.sum(0),
        "sum in its dtype": x.sum(-1, dtype=x.dtype),
        "prod in its dtype": (x[:, :37] > 0).to(x.dtype).prod(-1, dtype=x.dtype),
        "cumsum": x.cumsum(-1),
        "count": (x > 3).sum(-1),
        "any": (x > 90).any(-1),
        "all": (x > 0).all(0),
        "mean": x.double().mean(-1),
    }


def conversions(x: torch.Tensor) -> Results:
    return {str(dtype): x.to(dtype) for dtype in DTYPES} | {f"half as {dtype}": (x / 2).to(dtype) for dtype in DTYPES}


def arithmetic(x: torch.Tensor) -> Results:
    y = x.flip(-1)
    return {
        "product": x * y,
        "difference": x - y * 2,
        "quotient": x / 3,
        "maximum": torch.maximum(x, y),
        "minimum": torch.minimum(x, y),
        "clamp": x.clamp(3, 50),
        "abs": x.abs(),
        "sign": x.sign(),
        "square": x**2,
        "where": torch.where(x > y, x, -y),
        "remainder": x % 7,
        "comparisons": torch.stack((x > y, x <= y, x == y, x != 3)),
        "root": x.abs().float().sqrt(),
    }


def bits(x: torch.Tensor) -> Results:
    y = x.flip(-1)
    return {"and": x & y, "or": x | 5, "xor": x ^ y, "not": ~x, "left": x << 2, "right": x >> 1}


def drawn(dtype: torch.dtype, low: int, high: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(low, high, SHAPE).to(dtype)


def logical(x: torch.Tensor) -> Results:
    y = x.flip(-1)
    return {
        "amax": x.amax(-1),
        "min": x.min(),
        "max of columns": x.max(0).values,
        "argmax": x.int().argmax(-1),
        "sum": x.sum(-1),
        "any": x.any(0),
        "all": x.all(-1),
        "and": x & y,
        "xor": x ^ y,
        "not": ~x,
        "where": torch.where(x, 2.5, y.float()),
        "product": x * y,
    }


CASES = [
    *[(function, dtype) for function in (extrema, sums, conversions, arithmetic) for dtype in (*INTEGERS, *FLOATS)],
    *[(bits, dtype) for dtype in INTEGERS],
    (logical, torch.bool),
]
IN_CI = [(extrema, torch.uint8), (extrema, torch.int8), (sums, torch.int8), (logical, torch.bool)]


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        pytest.param(*case, id=f"{case[0].__name__}-{case[1]}", marks=[] if case in IN_CI else pytest.mark.slow)
        for case in CASES
    ],
)
@pytest.mark.one_in(2)
def test_long_rows_of_each_dtype(function: Callable[..., Results], dtype: torch.dtype) -> None:
    jitted = forge.jit(lambda x: function(x + 1 if dtype != torch.bool else ~x))
    for low, high in ((2, 100), (-100, -2)) if dtype not in (torch.bool, torch.uint8) else ((2, 100), (0, 2)):
        x = drawn(dtype, low, high)
        expected, actual = function(x + 1 if dtype != torch.bool else ~x), jitted(x)
        for name in expected:
            torch.testing.assert_close(actual[name], expected[name], msg=lambda text, name=name: f"{name}: {text}")
    by_torch = function is extrema and dtype in (torch.int8, torch.uint8)  # Inductor's are wrong
    assert ("inductor" in forge.explain(jitted).executors) is not by_torch
