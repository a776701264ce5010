"""Functions of users' executors with other arguments, or other results, than their calls."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
from forge import torchlang
from forge.executors import FusionExecutor, OperatorExecutor, claim, resolve_executors
from forge.ir import BoundSymbol, Trace


def program(x: torch.Tensor) -> torch.Tensor:
    return F.silu(F.silu(torch.relu(x))) + 1


def executor(function: Callable | None = None, **how: Any) -> OperatorExecutor:
    mine = OperatorExecutor("mine")
    mine.register_implementation(torchlang.silu, function, **how)
    return mine


CALL = r"torch\.nn\.functional\.silu\(\w+: f32\[2, 3\] cpu\) \(test_expected\.py:\d+  return F\.silu"


def no_arguments() -> torch.Tensor:
    return torch.ones(2, 3)


def another_shape(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return input.t()


def another_dtype(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return input.double()


def nothing(input: torch.Tensor, inplace: bool = False) -> None:
    return None


def a_tuple(input: torch.Tensor, inplace: bool = False) -> tuple[torch.Tensor]:
    return (silu(input),)


def silu(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return input * torch.sigmoid(input)


WRONG = {
    no_arguments: (
        TypeError,
        rf"executor mine: no_arguments.* is to run {CALL}.*does not take these arguments: too many",
    ),
    another_shape: (ValueError, rf"executor mine: another_shape gives f32\[3, 2\] for {CALL}.*must give f32\[2, 3\]"),
    another_dtype: (ValueError, rf"executor mine: another_dtype gives f64\[2, 3\] for {CALL}.*must give f32\[2, 3\]"),
    nothing: (ValueError, rf"executor mine: nothing gives nothing for {CALL}.*must give f32\[2, 3\]"),
    a_tuple: (ValueError, rf"executor mine: a_tuple gives a tuple of f32\[2, 3\] for {CALL}.*must give f32\[2, 3\]"),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("function", WRONG, ids=lambda function: function.__name__)
def test_a_wrong_function_is_an_error_with_the_executor_and_the_call(function: Callable, grad: bool) -> None:
    error, match = WRONG[function]
    jitted = forge.jit(program, executors=[executor(function), "torch"])
    for _ in range(2):
        with pytest.raises(error, match=match):
            jitted(torch.ones(2, 3, requires_grad=grad))


def test_a_function_that_is_wrong_for_its_second_call_alone_is_an_error() -> None:
    def wrong_for_bytes(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:
        return silu(input) if input.ndim == 2 else input[0]

    jitted = forge.jit(lambda x: F.silu(F.silu(x).flatten()), executors=[executor(wrong_for_bytes), "torch"])
    with pytest.raises(ValueError, match=r"gives f32\[\] for .*f32\[6\] cpu.* must give f32\[6\]"):
        jitted(torch.ones(2, 3))


@pytest.mark.parametrize("dynamic", [None, True])
def test_right_functions_are_looked_at_once(dynamic: bool | None) -> None:
    calls = []

    def counted(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:
        calls.append(input.shape)
        return silu(input)

    jitted = forge.jit(program, executors=[executor(counted), "torch"], dynamic=dynamic)
    for count in (2, 2, 3):
        x = torch.randn(count, 3, requires_grad=True)
        ours, theirs = jitted(x), program(x)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(torch.autograd.grad(ours.sum(), x), torch.autograd.grad(theirs.sum(), x))
    assert len(calls) == 6


def test_a_checker_that_raises_is_told_with_its_executor() -> None:
    def checker(x: torch.Tensor, y: torch.Tensor) -> bool:
        return True

    with pytest.raises(TypeError, match="missing 1 required") as raised:
        forge.jit(program, executors=[executor(silu, checker=checker), "torch"])(torch.ones(2, 3))
    assert any(
        note.startswith("raised by executor mine: its checker, for torch.nn.f") for note in raised.value.__notes__
    )


def test_a_checker_that_computes_on_an_argument_is_an_error() -> None:
    def checker(input: torch.Tensor, inplace: bool = False) -> bool:
        return input.sum() is not None

    with pytest.raises(TypeError, match=r"checker computes t\d+ = clang.sum.*reads the shapes, dtypes and devices"):
        forge.jit(program, executors=[executor(silu, checker=checker), "torch"])(torch.ones(2, 3))


def test_a_function_that_raises_is_told_with_its_executor() -> None:
    def lookup(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:
        return {}["missing"]

    with pytest.raises(KeyError, match="missing") as raised:
        forge.jit(program, executors=[executor(lookup), "torch"])(torch.ones(2, 3))
    (note,) = [each for each in raised.value.__notes__ if each.startswith("raised by executor mine")]
    assert "lookup, for torch.nn.functional.silu(" in note and "test_expected.py" in note


def no_results(input: torch.Tensor, inplace: bool = False) -> None:
    return None


def raises_an_index_error(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    raise IndexError("inside")  # which Dynamo treats as the program's own


@pytest.mark.parametrize(
    ("rule", "error", "match"),
    [(no_results, RuntimeError, "returned 0 tensors"), (raises_an_index_error, IndexError, "inside")],
)
def test_a_gradient_rule_that_fails_is_told_with_its_executor(
    rule: Callable, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match) as raised:
        forge.jit(program, executors=[executor(silu, grad_transform=rule), "torch"])(
            torch.ones(2, 3, requires_grad=True)
        )
    assert any(
        note.startswith("raised by executor mine: its grad_transform, for torch.nn.f")
        for note in raised.value.__notes__
    )


operators = OperatorExecutor("mine")
operator = operators.register_operator("op", like=torchlang.silu, fn=silu)
TRANSFORMS: dict[str, tuple[Callable, type[Exception], str]] = {
    "two results": (
        lambda input: (operator(input),) * 2,
        ValueError,
        r"gives f32\[2, 3\], f32\[2, 3\] for .*must give f32",
    ),
    "its input": (lambda input: input, ValueError, "returns its input .*must return new values"),
    "a torch function": (torchlang.relu, TypeError, r"calls torch\.relu, but may call the executor's operators alone"),
    "another shape": (lambda input: operator(torchlang.t(input)), ValueError, r"gives f32\[3, 2\]"),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_wrong_execution_transform_is_an_error_with_the_executor_and_the_call(name: str) -> None:
    transform, error, match = TRANSFORMS[name]
    with pytest.raises(error, match=rf"executor mine: its execution_transform .*{match}"):
        forge.jit(program, executors=[executor(execution_transform=transform), "torch"])(torch.ones(2, 3))


def test_an_executor_that_hides_strides_from_inductor_is_named() -> None:
    jitted = forge.jit(program, executors=["inductor", executor(silu), "torch"])
    jitted(torch.ones(2, 3))
    assert re.search("inductor: the strides .* executor mine runs it", str(forge.explain(jitted)))


class Fuser(FusionExecutor):
    """An executor that sets the functions of regions; if the function is a string, it raises a KeyError with it."""

    def __init__(self, function: Callable | str) -> None:
        super().__init__("fuser")
        self.function = function

    def can_fuse(self, bound: BoundSymbol) -> bool:
        if isinstance(self.function, str):
            raise KeyError(self.function)
        return True

    def fuse(self, region: Trace) -> Callable:
        return self.function or claim(region, resolve_executors(["torch"]))[0].python_callable()


@pytest.mark.usefixtures("compiled_regions")  # under check="regions" a failure is raised
@pytest.mark.parametrize(
    ("function", "gives"), [(lambda x: (x.t(),), r"f32\[3, 2\]"), (lambda x: (1, 2), "1, 2"), (lambda x: (), "nothing")]
)
def test_a_region_of_a_wrong_shape_is_run_by_torch_with_a_warning_and_refused_under_strict(
    function: Callable, gives: str
) -> None:
    match = rf"executor fuser: .* gives {gives} for fuser\.fusion0, a region of \d calls, but must give f32\[2, 3\]"
    x = torch.randn(2, 3)
    with pytest.warns(UserWarning, match=match):
        result = forge.jit(program, executors=[Fuser(function), "torch"])(x)
    torch.testing.assert_close(result, program(x))
    with pytest.raises(ValueError, match=match):
        forge.jit(program, executors=[Fuser(function), "torch"], strict=True)(x)


def test_a_fuser_that_raises_is_told_with_the_call() -> None:
    with pytest.raises(KeyError) as raised:
        forge.jit(program, executors=[Fuser("broken"), "torch"])(torch.ones(2, 3))
    assert any("raised by executor fuser: its can_fuse, for torch.relu" in note for note in raised.value.__notes__)


def overwrites(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return silu(input.neg_())


def overwrites_and_raises(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    raise KeyError(input.neg_())


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("function", [overwrites, overwrites_and_raises])
def test_a_function_that_overwrites_its_argument_is_an_error_on_each_call(function: Callable, mode: Callable) -> None:
    jitted = forge.jit(program, executors=[executor(function), "torch"])
    for _ in range(3):
        with (
            mode(),
            pytest.raises(ValueError, match=rf"executor mine: {function.__name__} overwrites .* input in {CALL}"),
        ):
            jitted(torch.ones(2, 3))


@pytest.mark.parametrize("function", [torch.relu_, torch.Tensor.relu_])
def test_torchs_own_function_that_overwrites_its_argument_is_an_error(function: Callable) -> None:
    mine = OperatorExecutor("mine")
    mine.register_implementation(torchlang.relu, function)
    with pytest.raises(TypeError, match=r"executor mine: torch\..*relu_ is to run torch.relu.* overwrites its arg"):
        forge.jit(torch.relu, executors=[mine, "torch"])(torch.ones(2, 3))


@pytest.mark.parametrize("grad", [False, True])
def test_a_region_that_overwrites_its_argument_is_an_error(grad: bool) -> None:
    jitted = forge.jit(program, executors=[Fuser(lambda x, *others: (x.mul_(2),)), "torch"])
    for _ in range(3):
        with pytest.raises(
            ValueError, match=r"executor fuser: .* overwrites its argument \w+ in fuser\.fusion\d, a region"
        ):
            jitted(torch.ones(2, 3, requires_grad=grad))


@pytest.mark.parametrize("function", [lambda input: input, lambda input: input[:]])
def test_a_function_that_returns_its_argument_is_an_error_where_torch_returns_new_memory(function: Callable) -> None:
    mine = OperatorExecutor("mine")
    mine.register_implementation(torchlang.relu, function)
    with pytest.raises(
        ValueError, match=r"executor mine: <lambda> returns the memory of its argument input for torch\.relu"
    ):
        forge.jit(torch.relu, executors=[mine, "torch"])(torch.ones(2, 3))


def test_a_function_may_return_a_view_where_the_symbol_does() -> None:
    mine = OperatorExecutor("mine")
    mine.register_implementation(torchlang.find(torch.reshape), lambda x, shape: x.view(shape))
    x = torch.ones(2, 3)
    assert forge.jit(lambda x: x.reshape(6), executors=[mine, "torch"])(x).data_ptr() == x.data_ptr()


@pytest.mark.usefixtures("compiled_regions")
def test_a_region_whose_results_are_one_tensor_is_run_by_torch() -> None:
    fuser = Fuser(lambda x: (x * 2,) * 2)
    with pytest.warns(UserWarning, match="returns the memory of another of its results for"):
        one, other = forge.jit(lambda x: (x.exp() + 1, x * 3), executors=[fuser, "torch"])(torch.ones(2))
    one.zero_()
    assert other.tolist() == [3, 3]


@pytest.mark.usefixtures("compiled_regions")
def test_a_region_that_returns_a_tensor_must_return_a_tuple() -> None:
    with pytest.warns(
        UserWarning, match=r"gives a Tensor of f32\[2, 3\] .* must return a tuple of 1 result, f32\[2, 3\]"
    ):
        forge.jit(program, executors=[Fuser(lambda x: x * 2), "torch"])(torch.ones(2, 3))
