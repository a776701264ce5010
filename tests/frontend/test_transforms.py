"""torch.func and torch.vmap inside a jitted function and around one; torch's own state after a failure."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import forge

func = torch.func
WEIGHT = torch.linspace(-1, 1, 9, dtype=torch.float64).view(3, 3)
LAYER = nn.Linear(3, 2).double()


def cube(x: torch.Tensor) -> torch.Tensor:
    return (x**3).sum()


def swish(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(WEIGHT @ x)


def late_pullback(x: torch.Tensor) -> torch.Tensor:
    out, pullback = func.vjp(swish, x)
    return pullback(out * 3 + 1)[0] + out


def linearized(x: torch.Tensor) -> torch.Tensor:
    out, pushforward = func.linearize(swish, x)
    return pushforward(x) + out


def of_parameters(x: torch.Tensor) -> torch.Tensor:
    values = {name: value.detach() for name, value in LAYER.named_parameters()}
    return func.grad(lambda values: func.functional_call(LAYER, values, (x,)).sin().sum())(values)["weight"]


def between_changes(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    first = func.grad(lambda z: (z * y).sum())(x)
    y.add_(1)
    return first + func.grad(lambda z: (z * y).sin().sum())(x)


FUNCTIONS = {
    "grad": lambda x: func.grad(cube)(x) * 2,
    "value and grad": lambda x: sum(func.grad_and_value(cube)(x)),
    "nested grad": lambda x: func.grad(lambda y: func.grad(cube)(y).sum())(x),
    "jvp": lambda x: func.jvp(swish, (x,), (x,))[1],
    "jvp of grad": lambda x: func.jvp(func.grad(cube), (x,), (x,))[1],
    "vjp": late_pullback,
    "jacrev": lambda x: func.jacrev(swish)(x),
    "jacfwd": lambda x: func.jacfwd(swish)(x),
    "hessian": lambda x: func.hessian(cube)(x),
    "vmap of grad": lambda x: func.vmap(func.grad(cube))(torch.stack([x, x * 2])),
    "linearize": linearized,
    "functional_call": of_parameters,
    "between changes in place": between_changes,
    "dropout": lambda x: func.grad(lambda y: (F.dropout(y, 0.5) * y).sum())(x),
}


def sample() -> torch.Tensor:
    return torch.linspace(0.2, 1.4, 3, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _torch_is_left_as_it_was() -> Any:
    """After each test, saved-tensor hooks work, and no transform is active."""
    yield
    x = torch.ones(3, requires_grad=True)
    checkpoint(lambda x: (x.sin() * x).sum(), x, use_reentrant=False).backward()
    assert x.grad is not None and torch._C._functorch.get_dynamic_layer_stack_depth() == 0
    assert torch.autograd.forward_ad._current_level == -1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_transform_inside_a_jitted_function_gives_what_eager_gives(name: str) -> None:
    function = FUNCTIONS[name]
    torch.manual_seed(1)
    expected = function(sample())
    torch.manual_seed(1)
    jitted = forge.jit(function)
    torch.testing.assert_close(jitted(sample()), expected)
    assert forge.explain(jitted).eager == []


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in ("dropout", "linearize")])
def test_gradients_flow_through_a_transform(name: str) -> None:
    function, x, other = FUNCTIONS[name], sample().requires_grad_(), sample().requires_grad_()
    function(other).pow(2).sum().backward()
    forge.jit(function)(x).pow(2).sum().backward()
    torch.testing.assert_close(x.grad, other.grad)


def test_a_view_that_a_transform_gives_of_its_input_is_one() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        row = func.vmap(lambda y: y[None])(x)
        row.add_(1)
        return x * 2

    jitted, x = forge.jit(function), sample()
    with pytest.warns(UserWarning, match="gives a view of its input"):
        torch.testing.assert_close(jitted(x), (sample() + 1) * 2)
    torch.testing.assert_close(x, sample() + 1)


def test_a_change_that_a_transform_makes_of_its_input_is_seen() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        total = x * 1

        def inside(y: torch.Tensor) -> torch.Tensor:
            total.add_(1)
            return y * 2

        return func.vmap(inside)(x) + total

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(forge.jit(function)(sample()), function(sample()))


@pytest.mark.parametrize(
    "around",
    [
        lambda f, x: func.grad(f)(x),
        lambda f, x: func.vmap(func.grad(f))(torch.stack([x, x])),
        lambda f, x: func.jvp(f, (x,), (x,))[1],
        lambda f, x: func.hessian(f)(x),
        lambda f, x: func.vjp(f, x)[1](torch.ones((), dtype=x.dtype))[0],
    ],
    ids=["grad", "vmap of grad", "jvp", "hessian", "vjp"],
)
@pytest.mark.parametrize("called", [True, False], ids=["compiled before", "not called before"])
def test_a_transform_of_a_jitted_function_gives_what_eager_gives(around: Callable, called: bool) -> None:
    jitted = forge.jit(cube)
    if called:
        jitted(sample())
    torch.testing.assert_close(around(jitted, sample()), around(cube, sample()))


def test_functional_call_of_a_jitted_module_uses_the_given_values() -> None:
    jitted = forge.jit(LAYER)
    values = {name: value.detach() * 2 for name, value in LAYER.named_parameters()}
    expected = func.functional_call(LAYER, values, (sample(),))
    for _ in range(2):
        torch.testing.assert_close(func.functional_call(jitted, values, (sample(),)), expected)
        jitted(sample())


def leave_everything_open(trace: Any) -> Any:
    torch._C._functorch._grad_increment_nesting()
    torch._C._autograd._saved_tensors_hooks_disable("forbidden by a test")
    torch.autograd.forward_ad.enter_dual_level()
    torch.set_grad_enabled(trace.name == "nothing")
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.set_default_dtype(torch.float64)
    torch.rand(3)
    raise ValueError("a transform failed")


def ambient() -> tuple:
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        torch.random.get_rng_state().tolist(),
        torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
    )


def test_a_failure_while_compiling_leaves_torch_as_it_found_it() -> None:
    before = ambient()
    for target in (cube, LAYER):
        with pytest.raises(ValueError, match="a transform failed"):
            forge.jit(target, transforms=[leave_everything_open])(sample())
        assert ambient() == before


def test_a_failure_while_compiling_a_backward_leaves_torch_as_it_found_it(monkeypatch: pytest.MonkeyPatch) -> None:
    jitted = forge.jit(lambda x: (x * 2, cube(x).sum()))  # the loss's backward is compiled with the forward
    value = jitted(sample().requires_grad_())[0].sum()
    monkeypatch.setattr("forge.compile.backward_of_saved", lambda joint, *rest: leave_everything_open(joint.forward))
    before = ambient()
    with pytest.raises(ValueError, match="a transform failed"):
        value.backward()
    assert ambient() == before


def test_a_transform_that_fails_while_it_runs_leaves_no_level_open() -> None:
    jitted = forge.jit(lambda x, index: func.grad(lambda y: y[index].sum())(x))
    torch.testing.assert_close(jitted(sample(), torch.tensor([0, 2])), torch.tensor([1.0, 0, 1], dtype=torch.float64))
    with pytest.raises(IndexError):
        jitted(sample(), torch.tensor([0, 20]))
    assert ambient()[-1] is None
