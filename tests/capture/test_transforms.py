"""The transforms torch.func and torch.vmap inside a jitted function and around one; torch's state after a failure."""

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
    """Check after each test that saved-tensor hooks work, and that no transform is active."""
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
    torch.testing.assert_close(jitted(x), (sample() + 1) * 2)
    torch.testing.assert_close(x, sample() + 1)
    assert forge.explain(jitted).eager == []


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
    monkeypatch.setattr(
        "forge.compiler.backwards.backward_of_saved", lambda joint, *rest: leave_everything_open(joint.forward)
    )
    before = ambient()
    with pytest.raises(ValueError, match="a transform failed"):
        value.backward()
    assert ambient() == before


def test_what_an_operator_of_a_transform_refuses_is_refused_when_the_program_runs() -> None:
    jitted = forge.jit(lambda x: torch.vmap(torch.linalg.inv)(x), fullgraph=True)
    x = torch.eye(3).expand(2, 3, 3)
    torch.testing.assert_close(jitted(x), x)
    with pytest.raises(torch.linalg.LinAlgError, match=r"singular|could not be completed"):
        jitted(torch.zeros(2, 3, 3))
    assert not forge.explain(jitted).opaque_calls


def test_a_transform_that_torch_refuses_is_refused_as_in_eager_and_leaves_no_level_open() -> None:
    lengths = torch.tensor([3]), torch.tensor([1])

    def tangent(x: torch.Tensor) -> torch.Tensor:
        return func.jvp(lambda x: torch.ctc_loss(x, torch.tensor([[1]]), *lengths), (x,), (x,))[1]

    jitted = forge.jit(tangent)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="Trying to use forward AD with _ctc_loss"):
            jitted(torch.rand(3, 1, 2))
    torch.testing.assert_close(func.jvp(torch.sin, (sample(),), (sample(),))[1], sample().cos() * sample())


def test_a_transform_that_fails_while_it_runs_leaves_no_level_open() -> None:
    jitted = forge.jit(lambda x, index: func.grad(lambda y: y[index].sum())(x))
    torch.testing.assert_close(jitted(sample(), torch.tensor([0, 2])), torch.tensor([1.0, 0, 1], dtype=torch.float64))
    with pytest.raises(IndexError):
        jitted(sample(), torch.tensor([0, 20]))
    assert ambient()[-1] is None


# the parts of a transform are recorded


PLACES = torch.tensor([0, 2])
EYE = torch.eye(3, dtype=torch.float64)


def written(row: torch.Tensor) -> torch.Tensor:
    row = row.clone()
    row[0] = 1
    return row.add_(2)


NATIVE = {name: function for name, function in FUNCTIONS.items() if name not in ("dropout", "linearize")} | {
    "vmap": lambda x: torch.vmap(lambda row: row.sin() @ row)(torch.stack([x, x * 2])),
    "vmap of a layer": lambda x: torch.vmap(lambda row: F.layer_norm(row, (3,)).cumsum(0).sort()[0])(x.expand(4, 3)),
    "vmap of an index": lambda x: torch.vmap(lambda row, i: row[i], in_dims=(None, 0))(x, torch.tensor([2, 0])),
    "vmap out_dims": lambda x: torch.vmap(lambda row: (row * 2, row.sum()), out_dims=(1, 0))(x.expand(4, 3))[0],
    "hessian of a loss": lambda x: func.hessian(lambda y: F.softmax(y, -1).square().sum().log())(x),
    "vmap of numbers": lambda x: torch.vmap(lambda row: row * torch.tensor([1.0, 2, 3]))(x.expand(4, 3)),
    "vmap of promoted numbers": lambda x: torch.vmap(lambda row: 2 / ((row.exp().sum() + 1) * 3).log())(x.expand(4, 3)),
    "gradients of samples": lambda x: torch.vmap(func.grad(lambda row: ((row**3).sum() + 1).sin()))(x.expand(4, 3)),
    "vmap of a promoted integer": lambda x: x * torch.vmap(lambda row: (row > 0).sum() + 1.5)(x.expand(4, 3)).sum(),
    "vmap of a change of shape": lambda x: torch.vmap(lambda row: (row * 2).unsqueeze_(0).transpose_(0, 1))(
        x.expand(4, 3)
    ),
    "vmap of places": lambda x: torch.vmap(lambda row: row.index_fill(0, PLACES, 0.5).index_add(0, PLACES, row[:2]))(
        x.expand(4, 3)
    ),
    "vmap of an index_put": lambda x: torch.vmap(lambda row: row.index_put((PLACES,), row[:2]))(x.expand(4, 3)),
    "vmap of inverses": lambda x: torch.vmap(lambda row: torch.linalg.inv(torch.outer(row, row) + EYE))(x.expand(4, 3)),
    "vmap of a spectrum": lambda x: torch.vmap(lambda row: torch.fft.ifft(torch.fft.rfft(row)).abs())(x.expand(4, 3)),
    "jacrev of a solution": lambda x: func.jacrev(lambda y: torch.linalg.solve(torch.outer(y, y) + EYE, y))(x),
    "grad of pooled": lambda x: func.grad(lambda y: F.avg_pool1d(y[None], 2).square().sum())(x),
    "vmap of adaptive pools": lambda x: torch.vmap(lambda row: F.adaptive_avg_pool1d(row[None], 2))(x.expand(4, 3)),
    "grad of a determinant": lambda x: func.grad(lambda y: torch.linalg.slogdet(torch.outer(y, y) + EYE)[1])(x),
    "vmap of a write": lambda x: torch.vmap(written)(x.expand(4, 3)),
    "jacfwd of jacrev": lambda x: func.jacfwd(func.jacrev(lambda y: (y.tanh() * WEIGHT).sum(0)))(x),
}


# torch itself cannot run the other without data
CASES = [(name, dynamic) for name in NATIVE for dynamic in (False, True) if (name, dynamic) != ("jacfwd", True)]


@pytest.mark.parametrize(("name", "dynamic"), CASES)
@pytest.mark.one_in(8)
def test_a_transform_is_recorded(name: str, dynamic: bool) -> None:
    """It is one graph without an opaque call, with eager's values, gradients, and second gradients."""
    function = NATIVE[name]
    jitted = forge.jit(function, dynamic=dynamic, fullgraph=True)
    given = [sample().requires_grad_() for _ in range(2)]
    results = [each(x) for each, x in zip((jitted, function), given, strict=True)]
    torch.testing.assert_close(*results)
    if results[1].requires_grad:
        first = [
            torch.autograd.grad(r.square().sum(), x, create_graph=True)[0] for r, x in zip(results, given, strict=True)
        ]
        torch.testing.assert_close(*first)
        if first[1].requires_grad:
            torch.testing.assert_close(
                *[torch.autograd.grad(g.sin().sum(), x)[0] for g, x in zip(first, given, strict=True)]
            )
    assert not forge.explain(jitted).opaque_calls
    assert not forge.explain(jitted).eager


def pushed(function: Callable) -> Callable:
    return lambda x: sum(func.jvp(function, (x,), (x,)))


TWO_OF_A_KIND = {
    "vmap": [torch.vmap(lambda row: row.exp().sum()), torch.vmap(lambda row: row.sin().sum())],
    "in_dims": [torch.vmap(lambda row: row.cumsum(0)), torch.vmap(lambda row: row.cumsum(0), 1, 1)],
    "grad": [func.grad(lambda y: y.exp().sum()), func.grad(lambda y: y.sin().sum())],
    "aux": [lambda x: func.grad(lambda y: (cube(y), y.cos()), has_aux=True)(x)[1], func.grad(cube)],
    "jvp": [pushed(torch.exp), pushed(torch.sin)],
    "grad and jvp": [func.grad(lambda y: y.exp().sum()), pushed(torch.exp)],
    "vjp": [lambda x: sum(func.vjp(lambda y: (y.exp(), y.sin()), x)[0]), lambda x: func.vjp(torch.sin, x)[0]],
    "jacrev": [func.jacrev(torch.exp), func.jacrev(torch.sin)],
    "jacfwd and hessian": [func.jacfwd(lambda y: y.exp().sum()), func.hessian(lambda y: y.sin().sum())],
}


@pytest.mark.parametrize("name", TWO_OF_A_KIND)
def test_two_transforms_of_one_input_are_two(name: str) -> None:
    """This holds even if their results are read in between, and if gradients flow through both."""
    first, second = TWO_OF_A_KIND[name]

    def function(x: torch.Tensor) -> torch.Tensor:
        return (first(x) * 2).sum() + (second(x) * 3).sin().sum()

    jitted, given = forge.jit(function), torch.linspace(0.2, 1.4, 9, dtype=torch.float64).view(3, 3)
    torch.testing.assert_close(jitted(given), function(given))
    gradients = [torch.autograd.grad(each(x := given.clone().requires_grad_()), x)[0] for each in (jitted, function)]
    torch.testing.assert_close(*gradients)
    assert not forge.explain(jitted).eager


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU(), nn.Flatten(), nn.Dropout(0.0), nn.Linear(64, 3)
    ).double()


def test_gradients_of_each_sample() -> None:
    net = network()
    images, classes = torch.randn(5, 1, 4, 4, dtype=torch.float64), torch.randint(3, (5,))

    def loss(weights: dict, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(func.functional_call(net, weights, (image[None],)), label[None])

    def each(images: torch.Tensor, classes: torch.Tensor) -> dict:
        weights = {name: value.detach() for name, value in net.named_parameters()}
        return torch.vmap(func.grad(loss), in_dims=(None, 0, 0))(weights, images, classes)

    jitted = forge.jit(each)
    torch.testing.assert_close(jitted(images, classes), each(images, classes))
    assert not forge.explain(jitted).opaque_calls


def test_an_ensemble_is_trained() -> None:
    nets = [network() for _ in range(3)]
    weights, _ = func.stack_module_state(nets)
    base = network().to("meta")
    x = torch.randn(2, 1, 4, 4, dtype=torch.float64)

    def step(weights: dict, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda weights: func.functional_call(base, weights, (x,)))(weights)

    def gradients(run: Callable) -> list:
        given = {name: value.detach().requires_grad_() for name, value in weights.items()}
        out = run(given, x)
        return [out, *torch.autograd.grad(out.square().sum(), list(given.values()))]

    jitted = forge.jit(step)
    torch.testing.assert_close(gradients(jitted), gradients(step))
    torch.testing.assert_close(jitted(weights, x)[1], nets[1](x))
    assert not forge.explain(jitted).opaque_calls


def test_an_input_that_nothing_depends_on_has_no_gradient() -> None:
    x, y = sample().requires_grad_(), sample().requires_grad_()
    out = forge.jit(lambda x, y: torch.vmap(lambda a, b: a.sin())(x, y))(x, y)
    assert torch.autograd.grad(out.sum(), (x, y), allow_unused=True)[1] is None


def test_what_stays_opaque_says_why() -> None:
    jitted = forge.jit(lambda x: torch.vmap(torch.bernoulli, randomness="different")(x))
    jitted(torch.rand(4, 3))
    assert forge.explain(jitted).opaque_calls == ["torch.vmap (aten.rand.default draws random numbers)"]


def test_a_call_without_a_history_has_none_outside() -> None:
    x = sample().requires_grad_()

    def constant(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return func.grad(cube)(x)

    assert not forge.jit(constant)(x).requires_grad


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.hessian], ids=["grad", "hessian"])
def test_what_torch_differentiates_by_values_is_an_opaque_call(transform: Callable) -> None:
    """torch has two derivatives of a determinant; fake tensors do not determine which one applies."""

    def function(A: torch.Tensor) -> torch.Tensor:
        return transform(torch.linalg.det)(A)

    found, jitted = [], forge.jit(function)
    for run in (function, jitted):
        A = torch.tensor([[2.0, 1.0, 0.5], [1.0, 3.0, 1.0], [0.0, 1.0, 4.0]], dtype=torch.float64, requires_grad=True)
        out = run(A)
        (first,) = torch.autograd.grad(out, A, torch.ones_like(out), create_graph=True)
        found.append((out, first, torch.autograd.grad(first.square().sum(), A)[0]))
    torch.testing.assert_close(*found)
    assert any("determinant" in each for each in forge.explain(jitted).opaque_calls)
