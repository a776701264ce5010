"""The core language: its decorator, promotion and broadcasting."""

import itertools
from typing import Any

import pytest
import torch

from forge import clang
from forge.clang import Promotion, broadcast_shapes, canonical_dims, clangop, compute_dtype, convert, expand_to
from forge.ir import TensorProxy, Trace, recording

CPU = torch.device("cpu")


def proxy(*shape: int, dtype: torch.dtype = torch.float32) -> TensorProxy:
    return TensorProxy("x", shape, dtype, CPU)


def test_a_name_is_defined_once() -> None:
    def mul(a: Any, b: Any) -> Any:
        return a

    with pytest.raises(ValueError, match="clangop: mul is defined twice"):
        clangop()(mul)


def test_a_method_is_defined_once() -> None:
    def something_new(a: Any) -> Any:
        return a

    with pytest.raises(ValueError, match="clangop: method truediv is defined twice"):
        clangop("truediv")(something_new)
    clang.core._symbols.pop("something_new", None)
    clang.language.methods.pop("something_new", None)


DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
OPERANDS = [
    *[torch.ones((), dtype=dtype) for dtype in DTYPES],
    *[torch.ones(2, dtype=dtype) for dtype in DTYPES],
    torch.ones(2, dtype=torch.complex64),
    torch.ones((), dtype=torch.complex128),
    True,
    2,
    2.5,
    1j,
]


def _stands_for(operand: Any) -> Any:
    return proxy(*operand.shape, dtype=operand.dtype) if isinstance(operand, torch.Tensor) else operand


def _name(operand: Any) -> str:
    return f"{operand.dtype}-{operand.ndim}d" if isinstance(operand, torch.Tensor) else repr(operand)


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_promotion_of_every_pair_is_torchs(default: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        for a, b in itertools.product(OPERANDS, repeat=2):
            if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
                found = compute_dtype(_stands_for(a), _stands_for(b))
                assert found == torch.result_type(a, b), f"{_name(a)} with {_name(b)}"
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("operand", [o for o in OPERANDS if isinstance(o, torch.Tensor)], ids=_name)
def test_integers_become_floats_where_an_operation_needs_them(operand: torch.Tensor) -> None:
    assert compute_dtype(_stands_for(operand), kind=Promotion.INT_TO_FLOAT) == torch.exp(operand).dtype


@pytest.mark.parametrize(
    "shapes", [((2, 1), (3,)), ((), (0,)), ((1,), (0, 1)), ((4, 1, 2), (3, 1), (1,)), ((2,), (2,))]
)
def test_broadcasting_is_torchs(shapes: tuple) -> None:
    assert broadcast_shapes("f", *shapes) == torch.broadcast_shapes(*shapes)


def test_shapes_that_do_not_broadcast_are_named() -> None:
    with pytest.raises(RuntimeError, match=r"f: shapes \[2, 3\] and \[4\] do not broadcast.*\(3\).*\(4\).*dimension 1"):
        broadcast_shapes("f", (2, 3), (4,))


def test_expand_to_and_convert_are_identities_where_nothing_changes() -> None:
    x = proxy(2, 3)
    assert expand_to(x, (2, 3)) is x and convert(x, torch.float32) is x and convert(2, torch.float32) == 2
    with recording(Trace(), clang.language):
        assert expand_to(x, (5, 2, 3)).shape == (5, 2, 3)
        assert convert(x, torch.float64).dtype == torch.float64


@pytest.mark.parametrize(
    ("dims", "ndim", "expected"),
    [(None, 2, (0, 1)), ((), 2, (0, 1)), (-1, 2, (1,)), ([0, -1], 2, (0, 1)), (0, 0, ()), (None, 0, ())],
)
def test_dims_of_a_reduction(dims: Any, ndim: int, expected: tuple) -> None:
    assert canonical_dims("f", dims, ndim) == expected


def test_a_dim_out_of_range_is_an_error() -> None:
    with pytest.raises(IndexError, match="sum: Dimension out of range"):
        canonical_dims("sum", 2, 2)
