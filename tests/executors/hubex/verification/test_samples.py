"""Samples for a kernel's verification, made from its manifest."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
from forge.executors.hubex.verification.comparison import verify
from forge.executors.hubex.verification.messages import Answer, Question
from forge.executors.hubex.verification.samples import general_cases
from forge.executors.hubex.verification.tensors import difference

FLOAT = [torch.float32]
NORM = {"x": "[..., H]", "weight": "[H]"}
HEADS = {"query": "[B, H, S, D]", "key": "[B, K, L, D]", "value": "[B, K, L, D]"}


def answer(op: Any, function: Callable, dtype: torch.dtype = torch.float32, **options: Any) -> Answer:
    kernel = forge.kernel(op, function, name="k", **options)
    return verify(kernel, Question(torch.device("cpu"), dtype), lambda text: None)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


@pytest.mark.parametrize(
    "where",
    [
        "H % 16 == 0",
        "H % 24 == 0 and 100 < H <= 8192",
        "H == 40",
        ["H % 8 == 0", "x.ndim == 2"],
        "x.numel == 2048",
        ["H >= 128", "x.shape[0] == 5"],
        "not H % 2 == 0",
        "eps == 0.25",
        "eps in (0.5, 1.5)",
    ],
)
def test_lengths_ranks_and_numbers_are_as_the_conditions_say(where: Any) -> None:
    found = answer("pattern:rms_norm", rms, dtypes=FLOAT, shape=NORM, where=where)
    assert found.reason is None and found.accepted > 1


@pytest.mark.parametrize(
    "where",
    ["gate.shape[-1] % 48 == 0", ["gate.ndim == 4", "gate.shape == up.shape"], "gate.numel % 1024 == 0"],
)
def test_tensors_without_a_declared_shape_get_one(where: Any) -> None:
    found = answer("pattern:swiglu", swiglu, dtypes=FLOAT, where=where)
    assert found.reason is None and found.accepted > 1


def test_samples_of_an_operation_are_changed_where_none_of_them_is_allowed() -> None:
    def linear(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(input, weight)

    shape = {"input": "[..., K]", "weight": "[N, K]"}
    where = "K % 128 == 0 and N > K"
    found = answer(F.linear, linear, args=["input", "weight"], dtypes=FLOAT, shape=shape, where=where)
    assert found.reason is None and found.accepted > 1


def test_dims_that_depend_on_each_other_are_found_together() -> None:
    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value)

    where = ["D % 32 == 0 and D <= 256", "S == 2 * L", "H == K"]
    args = ["query", "key", "value"]
    found = answer(F.scaled_dot_product_attention, attention, args=args, dtypes=FLOAT, shape=HEADS, where=where)
    assert found.reason is None and found.accepted > 1


def test_a_dim_order_of_several_is_made() -> None:
    meta = {"arg_meta": {"input": ["float32", "C"]}, "dim_order_alias": {"C": [[0, 2, 3, 1], [0, 3, 1, 2]]}}
    found = answer("torch.nn.functional.gelu", lambda input: F.gelu(input), args=["input"], **meta)
    assert found.reason is None and found.accepted > 1


def test_each_argument_has_its_own_dtype() -> None:
    def wide(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y = x.float()
        return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

    where = ["x.dtype == bfloat16", "weight.dtype == float32", "H % 16 == 0"]
    found = answer("pattern:rms_norm", wide, torch.bfloat16, shape=NORM, where=where)
    assert found.accepted > 1, found


def test_what_no_call_can_fulfil_says_so() -> None:
    found = answer("pattern:rms_norm", rms, dtypes=FLOAT, shape=NORM, where=["H % 16 == 0", "H < 16"])
    assert not found.accepted and found.rejected


def test_a_mistake_at_one_length_of_many_is_found() -> None:
    def forgets(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms(x, weight, eps) * (1 if x.shape[-1] <= 16 else 2)

    found = answer("pattern:rms_norm", forgets, dtypes=FLOAT, shape=NORM, where="H % 16 == 0")
    assert "values differ by up to" in found.reason


# differences between kernels and references


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (torch.relu, None),
        (lambda input: torch.where(input > 0.5, torch.nan, torch.relu(input)), "differ: nan at NUM, but must be NUM"),
        (lambda input: torch.relu(input) / (input < 0.5), "differ.*: (inf|nan) at NUM, but must be NUM"),
    ],
)
def test_a_value_that_is_not_finite_is_named_with_what_it_must_be(function: Callable, says: str | None) -> None:
    found = answer("torch.relu", function, args=["input"], dtypes=FLOAT)
    assert found.reason is None if says is None else re.search(says.replace("NUM", r"\[?[\d.]+\]?"), found.reason)


def test_nan_is_equal_to_nan_alone() -> None:
    nan, inf = float("nan"), float("inf")
    both = torch.tensor([nan, inf, 1.0])
    assert difference(both, both.clone(), (0, 0)) is None
    says = "values differ: 0 at [0], but must be nan"
    assert difference(torch.tensor([0.0, 1.0]), torch.tensor([nan, 1.0]), (0, 1)) == says
    assert difference(torch.tensor([nan, nan]), torch.tensor([1.0, 2.0]), (0, 1)) == (
        "values differ: nan at [0], but must be 1 (2 of 2 values)"
    )
    assert difference(torch.tensor(inf), torch.tensor(-inf), (0, 1)) == "values differ: inf, but must be -inf"


# values and layouts


def other_than(condition: Callable[[torch.Tensor], bool]) -> Callable:
    """Return a kernel that is correct except where the condition holds for a nonempty tensor."""

    def silu(input: torch.Tensor) -> torch.Tensor:
        wrong = input.numel() > 0 and bool(condition(input))
        return F.silu(input) + 1 if wrong else F.silu(input)

    return silu


@pytest.mark.parametrize(
    ("function", "note"),
    [
        (lambda input: torch.nan_to_num(F.silu(input)), "NaN"),
        (other_than(lambda x: x.isinf().any()), "infinities"),
        (other_than(lambda x: x.abs().max() == 100), "huge values"),
        (other_than(lambda x: (x == 0).all()), "zeros"),
        (other_than(lambda x: x.ndim > 1 and x.stride(0) == 0), "expanded"),
    ],
)
def test_a_mistake_for_some_values_or_layouts_is_found(function: Callable, note: str) -> None:
    found = answer("torch.nn.functional.silu", function, grad="composite")
    assert found.reason is not None and f"({note}): " in found.reason


@pytest.mark.parametrize("which", [0, 1])
def test_a_mistake_where_one_of_two_tensors_has_other_strides_is_found(which: int) -> None:
    def mixed(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        dense = [each.is_contiguous() or not each.numel() for each in (gate, up)]
        return swiglu(gate, up) + (not dense[which] and dense[1 - which])

    assert "first transposed" in answer("pattern:swiglu", mixed, dtypes=FLOAT).reason


def test_a_gradient_that_overflows_is_found() -> None:
    def backward(grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        e = torch.exp(-input)
        return grad * (1 / (1 + e) + input * e / (1 + e) ** 2)

    found = answer("torch.nn.functional.silu", F.silu, grad=backward)
    assert "(huge values): the gradient of input: values differ: nan at" in found.reason


def test_a_gradient_that_is_wrong_for_a_transposed_one_is_found() -> None:
    class Silu(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, input: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(input)
            return F.silu(input)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            right = torch.ops.aten.silu_backward(grad, *ctx.saved_tensors)
            return right if grad.is_contiguous() or 0 in grad.stride() else -right

    found = answer("torch.nn.functional.silu", Silu.apply, args=["input"], grad="autograd")
    assert "the gradient of input from a transposed one: values differ" in found.reason


def test_what_an_infinity_less_another_is_may_be_anything() -> None:
    """Blockwise attention searches for a largest score, and has none if all are -inf."""

    def softmax(input: torch.Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> torch.Tensor:
        right = F.softmax(input, dim, dtype=dtype)
        return torch.where(input.isinf().any(dim, keepdim=True) & ~input.isnan(), right.nan_to_num(0), right)

    found = answer("torch.nn.functional.softmax", softmax, where="dim == -1")
    assert found.reason is None


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda dtype: {"inptu": torch.rand(3, dtype=dtype)}, "samples makes 'inptu', which is none of its arguments"),
        (lambda dtype: {}, "samples makes no 'input'; arguments: input"),
        (lambda dtype: [torch.rand(3, dtype=dtype)] * 5, "samples makes 5 values for input"),
    ],
    ids=["unknown", "missing", "too many"],
)  # fmt: skip
def test_samples_that_do_not_fit_the_arguments_are_told(made: Callable, text: str) -> None:
    kernel = forge.kernel(F.silu, lambda input: F.silu(input), name="own", dtypes=[torch.float32], samples=made)
    with pytest.raises(ValueError, match=text):
        list(general_cases(kernel, torch.device("cpu"), torch.float32))
