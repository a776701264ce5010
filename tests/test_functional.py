"""The functions forge.trace, forge.vjp, forge.grad and forge.value_and_grad, against torch.func."""

import gc
import linecache
import multiprocessing
import tracemalloc
import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import forge
from forge.api import functional
from forge.api.functional import Direct
from tests.unknown_operator import rounded


def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((x @ w).relu() * 2).sum()


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3, 4, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)


# trace


def test_a_trace_records_torch_calls_and_runs_nothing() -> None:
    trace = forge.trace(loss, *inputs())
    assert [bound.symbol.name for bound in trace.bound_symbols] == ["matmul", "relu", "mul", "sum"]
    assert trace.input_names == ["x", "w"]


def test_python_control_flow_is_followed() -> None:
    def function(x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            x = torch.exp(x)
        return x

    assert len(forge.trace(function, torch.ones(2), 3).bound_symbols) == 3


def test_a_branch_on_a_value_is_an_error() -> None:
    with pytest.raises(TypeError, match="is not known while tracing"):
        forge.trace(lambda x: x if x.sum() > 0 else -x, torch.ones(2))


def test_a_function_that_torchlang_lacks_is_an_error() -> None:
    with pytest.raises(NotImplementedError, match="torchlang does not have"):
        forge.trace(rounded, torch.eye(2))


def test_nested_arguments_and_results_keep_their_structure() -> None:
    def function(tree: dict, *, scale: float) -> dict:
        return {"sum": tree["a"] + tree["b"][0], "rest": [tree["b"][1] * scale, None, 3]}

    tree = {"a": torch.ones(2), "b": (torch.ones(2), torch.full((2,), 5.0))}
    result = Direct(function)(tree, scale=2.0)
    assert torch.equal(result["sum"], torch.full((2,), 2.0))
    assert torch.equal(result["rest"][0], torch.full((2,), 10.0)) and result["rest"][1:] == [None, 3]


# Direct


def test_a_function_is_traced_once_for_each_metadata() -> None:
    calls: list[Any] = []

    def function(x: Any, number: float, key: slice) -> Any:
        calls.append((x, number))
        return x * number

    direct = Direct(function)
    for given, count in [
        ((torch.ones(2), 2, slice(0, 1)), 1),
        ((torch.zeros(2), 2, slice(0, 1)), 1),
        ((torch.ones(2), 2.0, slice(0, 1)), 2),
        ((torch.ones(2), 2, slice(0, 2)), 3),
        ((torch.ones(3), 2, slice(0, 1)), 4),
        ((torch.ones(2, dtype=torch.float64), 2, slice(0, 1)), 5),
        ((torch.ones(4)[::2], 2, slice(0, 1)), 6),
        ((torch.ones(2, requires_grad=True), 2, slice(0, 1)), 7),
        ((torch.ones(2), 0.0, slice(0, 1)), 8),
        ((torch.ones(2), -0.0, slice(0, 1)), 9),
        ((torch.ones(2), float("nan"), slice(0, 1)), 10),
        ((torch.ones(2), float("nan"), slice(0, 1)), 10),
        ((torch.ones(2), True, slice(0, 1)), 11),
    ]:
        direct(*given)
        assert len(calls) == count, given
    assert direct.__name__ == "function"


def test_an_unknown_executor_is_an_error_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="unknown executor 'torhc'; did you mean 'torch'"):
        Direct(loss, executors=["torhc"])


# vjp


def test_vjp_is_torch_funcs() -> None:
    x, w = inputs()
    out, pullback = forge.vjp(lambda x, w: (x @ w, x * 2), x, w)
    expected, expected_pullback = torch.func.vjp(lambda x, w: (x @ w, x * 2), x, w)
    torch.testing.assert_close(out, expected)
    cotangents = tuple(torch.randn_like(value) for value in expected)
    for _ in range(2):  # a pullback may be called again
        torch.testing.assert_close(pullback(*cotangents), expected_pullback(cotangents))
    assert not any(value.requires_grad for value in out)


def test_vjp_of_nested_primals_and_outputs_keeps_their_structure() -> None:
    def function(tree: dict) -> list:
        return [tree["a"] * tree["b"]]

    tree = {"a": torch.ones(2), "b": torch.full((2,), 3.0)}
    ((product,), pullback) = forge.vjp(function, tree)
    (gradient,) = pullback(torch.ones(2))
    assert torch.equal(product, torch.full((2,), 3.0)) and torch.equal(gradient["a"], torch.full((2,), 3.0))


def test_vjp_with_aux_gives_it_beside_the_pullback() -> None:
    x, w = inputs()
    out, pullback, aux = forge.vjp(lambda x, w: (x @ w, {"shape": x * 1}), x, w, has_aux=True)
    expected, _, expected_aux = torch.func.vjp(lambda x, w: (x @ w, {"shape": x * 1}), x, w, has_aux=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(aux, expected_aux)
    assert len(pullback(torch.ones_like(out))) == 2
    assert not aux["shape"].requires_grad


def test_vjp_gives_zeros_for_a_primal_that_no_output_depends_on() -> None:
    x, w = inputs()
    _, pullback = forge.vjp(lambda x, w: x * 2, x, w)
    assert torch.equal(pullback(torch.ones_like(x))[1], torch.zeros_like(w))
    _, pullback = forge.vjp(lambda x: x > 0, x)
    assert torch.equal(pullback(torch.ones(3, 4, dtype=torch.bool))[0], torch.zeros_like(x))


@pytest.mark.parametrize("primal", [torch.ones(2, dtype=torch.int64), 3.0, None])
def test_vjp_of_no_floating_point_tensor_is_an_error(primal: Any) -> None:
    with pytest.raises(TypeError, match=r"forge\.vjp: primal 1 is .*, but must be a floating point tensor"):
        forge.vjp(lambda x, y: x, torch.ones(2), primal)


# grad and value_and_grad


@pytest.mark.parametrize("argnums", [0, 1, -1, (0,), (1, 0), (0, -1)], ids=str)
def test_grad_is_torch_funcs_for_any_argnums(argnums: Any) -> None:
    x, w = inputs()
    ours, theirs = forge.grad(loss, argnums)(x, w), torch.func.grad(loss, argnums)(x, w)
    assert type(ours) is type(theirs)
    torch.testing.assert_close(ours, theirs)


def test_value_and_grad_gives_both() -> None:
    x, w = inputs()
    (value, gradient), (expected, expected_gradient) = (
        forge.value_and_grad(loss)(x, w),
        torch.func.grad_and_value(loss)(x, w)[::-1],
    )
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    assert not value.requires_grad


def test_has_aux_gives_what_the_function_returned_beside_its_value() -> None:
    x, w = inputs()

    def function(x: Any, w: Any) -> Any:
        return loss(x, w), {"product": x @ w}

    gradient, aux = forge.grad(function, has_aux=True)(x, w)
    expected, expected_aux = torch.func.grad(function, has_aux=True)(x, w)
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(aux, expected_aux)
    (value, aux), gradient = forge.value_and_grad(function, has_aux=True)(x, w)
    torch.testing.assert_close(value, loss(x, w))
    assert not aux["product"].requires_grad


def test_gradients_have_the_structure_of_their_argument() -> None:
    def function(parameters: dict, x: torch.Tensor) -> torch.Tensor:
        return (x @ parameters["w"] + parameters["b"][0]).sum()

    parameters = {"w": torch.randn(4, 2), "b": [torch.randn(2)]}
    x = torch.randn(3, 4)
    torch.testing.assert_close(forge.grad(function)(parameters, x), torch.func.grad(function)(parameters, x))


def test_keyword_arguments_and_numbers_are_passed_on() -> None:
    def function(x: torch.Tensor, power: int, *, scale: float) -> torch.Tensor:
        return (x**power * scale).sum()

    x = torch.randn(3)
    torch.testing.assert_close(forge.grad(function)(x, 2, scale=3.0), x * 6)


def test_what_is_not_differentiated_is_left_alone() -> None:
    x, w = inputs()
    w.requires_grad_()
    gradient = forge.grad(loss)(x, w)
    assert w.grad is None and not gradient.requires_grad and not x.requires_grad


def test_grad_works_under_no_grad() -> None:
    x, w = inputs()
    with torch.no_grad():
        gradient = forge.grad(loss)(x, w)
    torch.testing.assert_close(gradient, torch.func.grad(loss)(x, w))


@pytest.mark.parametrize(
    "function", [lambda x: x * 2, lambda x: 3.0, lambda x: (x.sum(), x)], ids=["vector", "number", "tuple"]
)
def test_a_value_that_is_no_scalar_tensor_is_an_error(function: Callable) -> None:
    with pytest.raises(RuntimeError, match=r"forge\.grad: .* must return a 0-d tensor; use forge\.vjp"):
        forge.grad(function)(torch.ones(2))


def test_argnums_out_of_range_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"forge\.grad: argnums names argument 2, but 1 were given"):
        forge.grad(lambda x: x.sum(), 2)(torch.ones(2))


def test_a_gradient_of_an_integer_is_an_error() -> None:
    with pytest.raises((TypeError, RuntimeError), match="floating point"):
        forge.grad(lambda x: x.sum())(torch.ones(2, dtype=torch.int64))


# values that a function reads besides its arguments


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the programs that forge.grad and forge.vjp compile."""
    seen: list[Any] = []
    compile_program = functional.pipeline.compile

    def spy(program: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(program)
        return compile_program(program, *args, **kwargs)

    monkeypatch.setattr(functional.pipeline, "compile", spy)
    monkeypatch.setattr(functional, "_programs", functional.Programs(8))
    return seen


def test_a_function_is_compiled_once_for_many_steps(compilations: list[Any]) -> None:
    step = forge.value_and_grad(lambda x: (x * x).sum())
    for _ in range(3):
        x = torch.randn(3)
        torch.testing.assert_close(step(x)[1], x * 2)
    assert len(compilations) == 1


def test_a_function_made_again_is_not_compiled_again(compilations: list[Any]) -> None:
    x = torch.randn(3)
    for scale in (torch.tensor(2.0), torch.tensor(5.0)):
        torch.testing.assert_close(forge.grad(lambda x, scale=scale: (x * scale).sum())(x), scale.expand(3))
        torch.testing.assert_close(forge.vjp(lambda x, scale=scale: x * scale, x)[0], x * scale)
    assert len(compilations) == 2


def test_grad_sees_a_modules_mode() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.BatchNorm1d(3)).double()
    net[2].track_running_stats = False
    x = torch.randn(4, 3, dtype=torch.float64)
    ours = forge.grad(lambda x: net(x).pow(2).sum())
    theirs = torch.func.grad(lambda x: net(x).pow(2).sum())
    for training in (True, False, True):
        net.train(training)
        torch.manual_seed(1)
        expected = theirs(x)
        torch.manual_seed(1)
        torch.testing.assert_close(ours(x), expected)


def test_grad_sees_a_changed_closure_and_a_changed_global() -> None:
    power, scope = 2, {"torch": torch, "scale": 1.0}
    exec("def scaled(x):\n    return (x.sin() * scale).sum()", scope)
    ours = forge.grad(lambda x: (x**power).sum() + scope["scaled"](x))
    x = torch.rand(3)
    for power, scope["scale"] in ((2, 1.0), (3, 1.0), (3, -2.0)):
        torch.testing.assert_close(ours(x), power * x ** (power - 1) + x.cos() * scope["scale"])


def test_grad_sees_parameters_that_an_optimizer_changed_or_a_user_replaced() -> None:
    net, x = nn.Linear(3, 2), torch.randn(4, 3)
    ours = forge.grad(lambda x: net(x).t().pow(2).sum())
    for change in (lambda: None, lambda: net.weight.data.mul_(2), lambda: setattr(net, "weight", nn.Parameter(x[:2]))):
        change()
        torch.testing.assert_close(ours(x), 2 * net(x).detach() @ net.weight.detach())


def test_what_a_function_returns_beside_tensors_is_this_calls() -> None:
    calls: list[int] = []

    def function(x: torch.Tensor) -> Any:
        calls.append(len(calls))
        return (x * x).sum(), {"step": calls[-1], "x": x * 2, "calls": calls}

    step = forge.value_and_grad(function, has_aux=True)
    for number in range(3):
        (_, aux), _ = step(torch.ones(2))
        assert aux["step"] == number and torch.equal(aux["x"], torch.full((2,), 2.0))


def test_a_buffer_that_a_function_changes_is_changed_each_time() -> None:
    total = torch.zeros(3)

    def function(x: torch.Tensor) -> torch.Tensor:
        total.add_(x.detach())
        return (x * total).sum()

    step, x = forge.grad(function), torch.ones(3)
    for number in (1.0, 2.0, 3.0):
        torch.testing.assert_close(step(x), torch.full((3,), number))
        assert torch.equal(total, torch.full((3,), number))


def test_what_was_random_is_drawn_again() -> None:
    step, x = forge.grad(lambda x: (torch.nn.functional.dropout(x, 0.5) * torch.rand(64)).sum()), torch.ones(64)
    assert not torch.equal(step(x), step(x))


# memory


def _sizes() -> tuple[int, int, int]:
    gc.collect()
    gc.collect()
    return len(gc.get_objects()), len(linecache.cache), tracemalloc.get_traced_memory()[0]


def _sizes_after_vjps() -> list[tuple[int, int, int]]:
    """Return the sizes after five hundred calls, and after five hundred more."""
    x = torch.randn(3)

    def run(times: int) -> None:
        for i in range(times):
            scale = torch.full((3,), float(i))
            out, pullback = forge.vjp(lambda x, scale=scale: (x * scale).sin(), x)
            pullback(out)
            forge.grad(lambda x, scale=scale: (x * scale).sum())(x)

    tracemalloc.start()
    run(500)  # the interpreter's free lists fill, too
    before = _sizes()
    run(500)
    return [before, _sizes()]


@pytest.mark.slow
def test_a_thousand_vjps_leave_nothing_behind() -> None:
    """It runs in a separate process: in one filled by other tests, a table of the interpreter may be resized."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        before, after = process.submit(_sizes_after_vjps).result()
    assert after[0] - before[0] < 200 and after[1] == before[1] and after[2] - before[2] < 60_000


@pytest.mark.slow
def test_a_thousand_different_functions_leave_a_number_of_programs_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = functional.Programs(4)
    monkeypatch.setattr(functional, "_programs", programs)
    texts = len([path for path in linecache.cache if path.startswith("<forge")])
    for i in range(20):
        forge.grad(lambda x, i=i: (x * i).sum())(torch.ones(2))
    gc.collect()
    assert len(programs) == 4
    assert len([path for path in linecache.cache if path.startswith("<forge")]) <= texts + 2 * 4


def test_what_a_differentiated_function_closed_over_is_freed() -> None:
    def use() -> weakref.ref:
        weight = torch.randn(3)
        forge.grad(lambda x: (x * weight).sum())(torch.ones(3))
        forge.vjp(lambda x: x * weight, torch.ones(3))[1](torch.ones(3))
        return weakref.ref(weight)

    seen = use()
    gc.collect()
    assert seen() is None


def test_a_direct_functions_programs_are_kept_up_to_a_number() -> None:
    direct = Direct(lambda x: x * 2, size=3)
    for length in range(1, 8):
        assert torch.equal(direct(torch.ones(length)), torch.full((length,), 2.0))
    assert len(direct.compiled) == 3


@pytest.mark.parametrize("function", [lambda x: x.detach().sum(), lambda x: torch.tensor(1.0)], ids=["cut", "constant"])
def test_the_gradient_of_what_depends_on_nothing_is_zero(function: Callable) -> None:
    x = torch.ones(3)
    assert torch.equal(forge.grad(function)(x), torch.func.grad(function)(x))


def test_a_transform_of_torchs_inside_names_the_function_and_what_compiles_it() -> None:
    def mapped(x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(torch.sin)(x).sum()

    for run in (forge.grad(mapped), lambda x: forge.trace(mapped, x)):
        with pytest.raises(ValueError, match="TensorProxy") as caught:
            run(torch.ones(3))
        (note,) = caught.value.__notes__
        assert "mapped" in note
        assert "forge.jit" in note
