"""Double backward through forge.jit, against eager: gradients of gradients, as users compute them."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.functional import hessian, hvp, jacobian, jvp, vhp
from torch.utils.checkpoint import checkpoint

import forge
from forge.runtime import autograd
from tests.unknown_operator import rounded

Function = Callable[..., Any]


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def orders(function: Function, x: torch.Tensor, count: int = 2, seed: int = 3) -> list[torch.Tensor]:
    """Return the gradient of the sum of the outputs, that of its squares, and so on."""
    torch.manual_seed(seed)
    outputs = function(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    value = sum(out.sin().sum() for out in outputs if out.requires_grad)
    found = []
    for _ in range(count):
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        found.append(gradient.detach().clone())
        value = (gradient * gradient).sum()
    return [*found, torch.get_rng_state()]


def assert_as_eager(function: Function, x: torch.Tensor, count: int = 2, **options: Any) -> None:
    torch.testing.assert_close(orders(forge.jit(function, **options), x, count), orders(function, x, count))


# torch.autograd.functional


def energy(x: torch.Tensor) -> torch.Tensor:
    return (x.exp() * x.sin() + x.prod()).sum()


@pytest.mark.parametrize("vectorize", [False, True])
def test_hessian(vectorize: bool) -> None:
    x = leaf(4)
    torch.testing.assert_close(hessian(forge.jit(energy), x, vectorize=vectorize), hessian(energy, x))


@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.parametrize("create_graph", [False, True])
def test_jacobian(vectorize: bool, create_graph: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.tanh() * x.flip(0)

    x = leaf(4)
    how = {"vectorize": vectorize, "create_graph": create_graph}
    torch.testing.assert_close(jacobian(forge.jit(function), x, **how), jacobian(function, x, **how))


@pytest.mark.parametrize("product", [hvp, vhp, jvp])
def test_products_with_a_vector(product: Callable) -> None:
    x, v = leaf(4), leaf(4)
    torch.testing.assert_close(product(forge.jit(energy), x, v), product(energy, x, v))


def test_a_hessian_of_several_arguments() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).tanh().square().sum()

    inputs = (leaf(2, 3), leaf(3))
    torch.testing.assert_close(hessian(forge.jit(function), inputs), hessian(function, inputs))


@pytest.mark.slow
def test_any_order() -> None:
    assert_as_eager(energy, leaf(3), count=4)


# training with gradients of gradients


def critic() -> nn.Module:
    layers = (nn.Conv2d(1, 4, 3), nn.LeakyReLU(0.2), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 8), nn.LayerNorm(8))
    return nn.Sequential(*layers, nn.SiLU(), nn.Dropout(0.2), nn.Linear(8, 1)).double()


def test_a_critic_trained_with_a_gradient_penalty() -> None:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Unflatten(1, (1, 8, 8))).double()
    module = critic()
    trained = [(forge.jit(module, fullgraph=True), module), (other := copy.deepcopy(module), other)]
    losses: list[list[float]] = []
    for run, owner in trained:
        torch.manual_seed(1)
        optimizer = torch.optim.Adam(owner.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(4):
            real = torch.randn(6, 1, 8, 8, dtype=torch.float64)
            fake = generator(torch.randn(6, 5, dtype=torch.float64)).detach()
            mixed = torch.lerp(real, fake, torch.rand(6, 1, 1, 1, dtype=torch.float64)).requires_grad_()
            (slope,) = torch.autograd.grad(run(mixed).sum(), mixed, create_graph=True)
            penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
            loss = run(fake).mean() - run(real).mean() + 10 * penalty
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(trained[0][1].state_dict(), trained[1][1].state_dict())


def test_hessian_vector_products_of_a_network() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    x, target = torch.randn(5, 4, dtype=torch.float64), torch.randint(3, (5,))
    parameters = list(net.parameters())
    vectors = [torch.randn_like(p) for p in parameters]
    found = []
    for run in (forge.jit(net), net):
        gradients = torch.autograd.grad(F.cross_entropy(run(x), target), parameters, create_graph=True)
        along = sum((g * v).sum() for g, v in zip(gradients, vectors, strict=True))
        found.append(torch.autograd.grad(along, parameters, allow_unused=True, materialize_grads=True))
    torch.testing.assert_close(found[0], found[1])


def test_maml_with_one_inner_step() -> None:
    def loss(w: torch.Tensor, b: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(torch.tanh(F.linear(x, w, b)), y)

    start = [leaf(2, 3), leaf(2)]
    tasks = [[torch.randn(4, n, dtype=torch.float64) for n in (3, 2, 3, 2)] for _ in range(3)]
    found = []
    for run in (forge.jit(loss), loss):
        w, b = (p.detach().clone().requires_grad_() for p in start)
        optimizer = torch.optim.SGD([w, b], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            for x, y, x_query, y_query in tasks:
                inner = torch.autograd.grad(run(w, b, x, y), (w, b), create_graph=True)
                adapted = [p - 0.5 * g for p, g in zip((w, b), inner, strict=True)]
                run(*adapted, x_query, y_query).backward()
            optimizer.step()
        found.append([w.detach(), b.detach()])
    torch.testing.assert_close(found[0], found[1])


def test_backward_with_create_graph_accumulates() -> None:
    found = []
    for run in (forge.jit(energy), energy):
        x = torch.arange(3, dtype=torch.float64, requires_grad=True)
        run(x).backward(create_graph=True)
        run(x).backward(create_graph=True)
        found += [x.grad.detach().clone(), *torch.autograd.grad(x.grad.sum(), x)]
        x.grad = None
    torch.testing.assert_close(found[:2], found[2:])


# programs of all kinds


def writes(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[0].mul_(x[1])
    return y.exp_()


def quiet(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = x.sin()
    return x.exp() * scale


PROGRAMS = {
    "writes": writes,
    "views": lambda x: (x.exp()[0], x.t(), x * 2),
    "no_grad": quiet,
    "unused and integer outputs": lambda x: (x.exp(), x.detach() * 2, x.argmax()),
    "linear": lambda x: x * 2,
    "scans": lambda x: x.cumprod(0).cumsum(1).logcumsumexp(0),
    "norms": lambda x: F.layer_norm(F.normalize(x), (3,)),
    # of two dims: from torch 2.14 on, eager's kernel for more has no second gradient
    "attention": lambda x: F.scaled_dot_product_attention(x, x.exp(), x),
    "pooling": lambda x: F.max_pool1d(x[None], 2) + F.adaptive_avg_pool1d(x[None], 1),
    "opaque": lambda x: rounded(x) * x,
    "opaque without a gradient": lambda x: x.exp() * rounded(x.detach()),
    "checkpoint": lambda x: checkpoint(lambda y: F.dropout(y.exp(), 0.5).tanh(), x.cos(), use_reentrant=False),
    "a vmap": lambda x: torch.vmap(lambda row: row.exp().sum() * row)(x),
    "dropout": lambda x: F.dropout(x.exp(), 0.4) * x,
    "dropout of channels": lambda x: F.dropout2d(x.exp()[None, :, :, None], 0.4),
    "alpha dropout": lambda x: F.alpha_dropout(x.exp(), 0.4, True),
    "native dropout": lambda x: torch.native_dropout(x.exp(), 0.4, True)[0],
    "noise": lambda x: (x + torch.randn_like(x)).exp(),
    "scaled noise": lambda x: x.exp() * torch.rand(3, dtype=torch.float64),
    "drawn with a probability": lambda x: torch.bernoulli(x.sigmoid()) * x.exp(),
    "drawn around a mean": lambda x: torch.normal(x.exp(), x.sigmoid()) * x,
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.one_in(4)
def test_a_program(name: str) -> None:
    """The results are equal to eager's, and random numbers are drawn once, in the forward."""
    assert_as_eager(PROGRAMS[name], leaf(4, 3))


def test_symbolic_shapes() -> None:
    jitted = forge.jit(lambda x: x.exp().sum(0) / x.shape[0] * x, dynamic=True)
    for rows in (4, 5):
        x = leaf(rows, 3)
        expected = orders(lambda x: x.exp().sum(0) / x.shape[0] * x, x)
        torch.testing.assert_close(orders(jitted, x), expected)


def test_autocast() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (x @ x.t()).tanh().float()

    x = torch.randn(3, 3, requires_grad=True)
    ours, eager = orders(forge.jit(function), x), orders(function, x)
    torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2)  # bfloat16 has 8 bits


def test_a_program_that_changes_its_input() -> None:
    def change(y: torch.Tensor) -> torch.Tensor:
        return y.mul_(3).exp_() * 2

    x, jitted = leaf(3), forge.jit(change)
    torch.testing.assert_close(orders(lambda x: jitted(x.sin()), x), orders(lambda x: change(x.sin()), x))


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the numbers of inputs that each forward copies because it changes them and a differentiable backward may
    read them."""
    counts: list[int] = []
    copy_inputs = autograd._copy

    def count(inputs: tuple, positions: list[int]) -> list[torch.Tensor]:
        counts.append(len(positions))
        return copy_inputs(inputs, positions)

    monkeypatch.setattr(autograd, "_copy", count)
    return counts


def second_gradients(run: Function, module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of the parameters, those of their squares, and the buffers."""
    parameters = list(module.parameters())
    first = torch.autograd.grad(run(x).sin().sum(), parameters, create_graph=True)
    total = sum((gradient * gradient).sum() for gradient in first)
    second = torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)
    return [*first, *second, *[buffer.clone() for buffer in module.buffers()]]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "layers",
    [
        (nn.Linear(4, 6), nn.GELU(), nn.BatchNorm1d(6), nn.Linear(6, 3)),
        (nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3), nn.Tanh()),  # its result alone is read
    ],
    ids=["between", "first"],
)
@pytest.mark.one_in(2)
def test_a_batch_norm_copies_no_statistics(layers: tuple[nn.Module, ...], training: bool, copied: list[int]) -> None:
    ours = copy.deepcopy(nn.Sequential(*layers)).double().train(training)
    theirs = copy.deepcopy(ours)
    x = torch.randn(5, 4, dtype=torch.float64)
    torch.testing.assert_close(second_gradients(forge.jit(ours), ours, x), second_gradients(theirs, theirs, x))
    assert not copied


def test_statistics_that_the_gradient_depends_on_are_copied(copied: list[int]) -> None:
    norm = nn.BatchNorm1d(4).double().eval()
    x = torch.randn(5, 4, dtype=torch.float64)
    expected = second_gradients(norm, norm, x)

    def change(x: torch.Tensor) -> torch.Tensor:
        out = norm(x)
        norm.running_mean.add_(1)
        norm.running_var.mul_(2)
        return out

    found = second_gradients(forge.jit(change), norm, x)
    torch.testing.assert_close(found[:4], expected[:4])
    torch.testing.assert_close(found[4:6], [expected[4] + 1, expected[5] * 2])
    assert copied == [2]


def test_an_input_whose_old_value_the_gradient_depends_on_is_copied(copied: list[int]) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out = (x.clone() * w).sin().sum()
        x.mul_(2)
        return out

    found = []
    for function in (forge.jit(program), program):
        torch.manual_seed(0)
        x, w = torch.randn(4, dtype=torch.float64), leaf(4)
        (first,) = torch.autograd.grad(function(x, w), w, create_graph=True)
        found.append([first, *torch.autograd.grad(first.sum(), w), x])
    torch.testing.assert_close(*found)
    assert copied == [1]


def test_a_gradient_that_is_not_needed_is_none() -> None:
    a, b = leaf(3), leaf(3)
    first, _ = forge.jit(lambda a, b: (a.exp(), b * 3))(a, b)
    gradients = torch.autograd.grad(first.sum(), (a, b), create_graph=True, allow_unused=True)
    assert gradients[0] is not None and gradients[1] is None


def test_all_gradients_undefined() -> None:
    x = leaf(3)
    out = torch._C._functions.UndefinedGrad()(forge.jit(lambda x: x.exp())(x))
    for create_graph in (False, True):
        how = {"create_graph": create_graph, "retain_graph": True, "allow_unused": True}
        assert torch.autograd.grad(out.sum(), x, **how) == (None,)


# a user's torch.autograd.Function


class Straight(torch.autograd.Function):
    """A function whose backward reads an intermediate of the forward, and is not the forward's derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        tripled = x * 3
        ctx.save_for_backward(tripled)
        return tripled.round()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (tripled,) = ctx.saved_tensors
        return g * tripled


class Exp(torch.autograd.Function):
    """A function whose backward reads the output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = x.exp()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (out,) = ctx.saved_tensors
        return g * out


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * g


@pytest.mark.parametrize("function", [Straight, Exp])
def test_a_users_function(function: Any) -> None:
    assert_as_eager(lambda x: function.apply(x * 2) * x, leaf(3), count=3)


def test_a_function_marked_once_differentiable() -> None:
    x = leaf(3)
    out = forge.jit(lambda x: Once.apply(x * 2))(x).sum()
    torch.testing.assert_close(torch.autograd.grad(out, x, retain_graph=True)[0], 8 * x.detach())
    with pytest.raises(RuntimeError, match="marked with @once_differentiable"):
        torch.autograd.grad(out, x, create_graph=True)


# functions without a second gradient


def _attend_with_dropout(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda x: F.embedding(torch.tensor([0, 1, 1]), x, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (lambda x: torch._standard_gamma(x.abs() + 1), "gamma.* draws random numbers"),
        (_attend_with_dropout, "draws random numbers"),
    ],
)
def test_it_is_refused_by_name_before_any_number(function: Function, named: str) -> None:
    x = leaf(4, 3)
    options = {"executors": ["torch"]} if function is _attend_with_dropout else {}  # torch's composition
    with pytest.raises(NotImplementedError, match=named):
        gradients = torch.autograd.grad(forge.jit(function, **options)(x).exp().sum(), x, create_graph=True)
        torch.autograd.grad(gradients[0].sum(), x)


def test_attention_with_dropout_in_regions_has_a_second_gradient() -> None:
    def second(function: Function) -> torch.Tensor:
        torch.manual_seed(3)
        gradients = torch.autograd.grad(function(x).exp().sum(), x, create_graph=True)
        return torch.autograd.grad(gradients[0].square().sum(), x)[0]

    x = leaf(4, 3)
    torch.testing.assert_close(second(forge.jit(_attend_with_dropout)), second(_attend_with_dropout))


# memory


def test_an_input_that_changed_since_is_an_error() -> None:
    x, bias = leaf(3), leaf(3)
    out = forge.jit(lambda x, bias: (x + bias).relu().sum())(x, bias)
    with torch.no_grad():
        bias.add_(1)
    torch.autograd.grad(out, x, retain_graph=True)  # the ordinary backward does not read it
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, x, create_graph=True)


@pytest.mark.parametrize("recorded", [True, False])
def test_an_input_that_its_result_is_added_to_does_not_leak(recorded: bool) -> None:
    jitted = forge.jit(lambda x, w: x.relu() + w)
    w = leaf(3)
    x = w * 2 if recorded else torch.ones(3, dtype=torch.float64)
    out = jitted(x, w)
    x.add_(out)
    alive = weakref.ref(x)
    del x, out
    gc.collect()
    assert alive() is None


def test_inputs_are_freed_with_the_graph() -> None:
    x = leaf(3) * 2
    alive = weakref.ref(x)
    out = forge.jit(lambda x: x.relu())(x).sum()
    del x
    assert alive() is not None or out.grad_fn is not None
    out.backward()
    gc.collect()
    assert alive() is None
    with pytest.raises(RuntimeError, match="second time"):
        out.backward(create_graph=True)


# forge.grad, forge.vjp


def test_torchs_autograd_over_forge_grad() -> None:
    x = leaf(3)
    (ours,) = torch.autograd.grad(forge.grad(energy)(x).square().sum(), x)
    (slope,) = torch.autograd.grad(energy(x), x, create_graph=True)
    torch.testing.assert_close(ours, torch.autograd.grad(slope.square().sum(), x)[0])


def test_torchs_autograd_over_forge_vjp() -> None:
    x, cotangent = leaf(3), leaf(3)
    _, pullback = forge.vjp(lambda x: x.exp() * x, x)
    (gradient,) = pullback(cotangent)
    found = torch.autograd.grad(gradient.sum(), (x, cotangent))
    slope = x.exp() * (x + 1)
    expected = torch.autograd.grad((slope * cotangent).sum(), (x, cotangent))
    torch.testing.assert_close(found, expected)


NESTED: dict[str, Callable] = {
    "thrice": lambda grad: grad(grad(grad(lambda x: (x**3).sin()))),
    "of a value closed over": lambda grad: grad(lambda x: grad(lambda y: (y * x).exp() * y)(x) * x),
    "of a nest": lambda grad: grad(lambda x: grad(lambda p: (p["a"] * x).sin() * p["b"])({"a": x, "b": x * 2})["a"]),
    "of several arguments": lambda grad: grad(lambda x: sum(grad(lambda y, z: y.exp() * z, (0, 1))(x, x * x))),
    "of views changed in place": lambda grad: grad(lambda x: grad(_changes)(x.expand(3)).prod()),
    "unused": lambda grad: grad(lambda x: grad(lambda y: x.exp())(x) + x * x),
}


def _changes(y: torch.Tensor) -> torch.Tensor:
    z = y.clone()
    z[0].mul_(2)
    return z.exp().sum()


@pytest.mark.parametrize("name", NESTED)
def test_forge_grad_of_forge_grad(name: str) -> None:
    x = torch.tensor(0.7, dtype=torch.float64)
    torch.testing.assert_close(NESTED[name](forge.grad)(x), NESTED[name](torch.func.grad)(x))


def test_forge_grad_inside_of_a_traced_function_draws_once() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x.exp(), 0.5).sum()

    x = torch.randn(50, dtype=torch.float64)
    torch.manual_seed(0)
    ours = forge.grad(lambda x: forge.grad(loss)(x).sum())(x)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    torch.testing.assert_close(ours, x.exp() * 2 * torch.empty_like(x).bernoulli_(0.5))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_function_inside_that_changes_its_argument_is_an_error() -> None:
    with pytest.raises(NotImplementedError, match="changes its argument"):
        forge.grad(lambda x: forge.grad(lambda y: y.mul_(2).sum())(x * 1).sum())(torch.ones(3))


class Weighted(torch.autograd.Function):
    """The product g * w, whose backward is not its derivative."""

    @staticmethod
    def forward(ctx: Any, g: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(w)
        return g * w

    @staticmethod
    def backward(ctx: Any, h: torch.Tensor) -> tuple[torch.Tensor, None]:
        (w,) = ctx.saved_tensors
        return 7 * h * w, None


class CallsAnother(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return Weighted.apply(g, 2 * x)


class CallsALayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        ctx.layer = layer
        return x.square()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.layer(g), None


def test_a_backward_that_calls_another_function_is_not_differentiated_without_it() -> None:
    x = leaf(3)
    y = forge.jit(lambda x: CallsAnother.apply(x * 1).sum())(x)
    (once,) = torch.autograd.grad(y, x, retain_graph=True)
    torch.testing.assert_close(once, 2 * x.detach())
    with pytest.raises(RuntimeError, match=r"calls another torch\.autograd\.Function"):
        torch.autograd.grad(y, x, create_graph=True)


def test_a_backward_that_calls_it_in_a_loop_is_not_differentiated_either() -> None:
    class Loops(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            apply = Weighted.apply
            for _ in range(2):
                g = apply(g, g)
            return g

    x = leaf(3)
    y = forge.jit(lambda x: Loops.apply(x.exp()).sum())(x)
    with pytest.raises(RuntimeError, match=r"calls another torch\.autograd\.Function"):
        torch.autograd.grad(y, x, create_graph=True)


def test_a_backward_that_calls_a_module_is_differentiated() -> None:
    layer = nn.Linear(3, 3, bias=False, dtype=torch.float64)

    def second(function: Function) -> torch.Tensor:
        x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
        (g,) = torch.autograd.grad(function(x), x, create_graph=True)
        return torch.autograd.grad(g.sum(), x)[0]

    def function(x: torch.Tensor) -> torch.Tensor:
        return CallsALayer.apply(x * 1, layer).sin().sum()

    torch.testing.assert_close(second(forge.jit(function)), second(function))


def test_an_argument_that_no_gradient_depends_on_has_none() -> None:
    """The bias' memory was recorded: the value passed for its alias is not a gradient, and not zeros."""
    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((3, 4), (2, 4), (2,)))
    out = forge.jit(F.linear)(x, weight * 1, bias * 1)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    found = torch.autograd.grad(gradient.sum(), [x, weight, bias], allow_unused=True)
    assert [each is None for each in found] == [True, False, True]


@pytest.mark.parametrize("norm", ["layer", "group"])
def test_results_that_torch_does_not_differentiate_require_none(norm: str) -> None:
    """These are the statistics that a norm returns besides its result, and values computed from them."""
    call = {
        "layer": lambda x: torch.native_layer_norm(x, [3], None, None, 1e-5),
        "group": lambda x: torch.native_group_norm(x, None, None, 2, 3, 1, 1, 1e-5),
    }[norm]
    x = torch.randn(2, 3, requires_grad=True)
    both = lambda x: (*call(x), call(x)[1] * 2)
    assert [each.requires_grad for each in forge.jit(both)(x)] == [each.requires_grad for each in both(x)]


def test_a_composite_that_does_not_read_all_that_it_is_given() -> None:
    """The pseudoinverse of an empty matrix reads no singular value, and so no tolerance."""
    x, tolerance = torch.randn(0, 3, requires_grad=True), torch.tensor(1e-3)
    run = forge.jit(lambda x, rtol: torch.linalg.pinv(x * 2, rtol=rtol).sum() + (x * x).sum())
    (gradient,) = torch.autograd.grad(run(x, tolerance), x, create_graph=True)
    assert gradient.shape == x.shape


@pytest.mark.parametrize("executors", [["torch"], ["inductor", "torch"]], ids=lambda names: names[0])
@pytest.mark.parametrize("name", ["prod", "cumprod"])
def test_products_of_complex_numbers(name: str, executors: list[str]) -> None:
    """The backward's own calls do not repeat the recomputed part of the forward."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return getattr(x, name)(0)

    found = []
    for run in (function, forge.jit(function, executors=executors)):
        x = torch.tensor([1 + 1j, 2 - 1j, 0.5 + 0.25j], dtype=torch.complex128, requires_grad=True)
        out = run(x)
        (first,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
        found += [first, *torch.autograd.grad(first.abs().sum(), x)]
    torch.testing.assert_close(found[:2], found[2:])
