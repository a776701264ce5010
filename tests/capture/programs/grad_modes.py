"""Grad modes: no_grad, enable_grad, set_grad_enabled and inference_mode, in a program and around it."""

import contextlib

import torch
from capture.programs.table import no_jit, program
from torch import nn
from torch.utils.checkpoint import checkpoint

import forge


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


@program
def a_whole_graph_under_no_grad(jit):
    teacher = nn.Linear(3, 3)

    @jit
    def run(x):
        with torch.no_grad():
            return teacher(x)

    y = run(leaf(2, 3))
    return y, list(teacher.parameters())


@program
def a_teacher_is_not_trained(jit):
    teacher, student = nn.Linear(3, 3), nn.Linear(3, 3)

    @jit
    def loss(x):
        with torch.no_grad():
            target = teacher(x).relu()
        return (student(x) - target).square().mean()

    value = loss(torch.randn(2, 3))
    value.backward()
    return value, [p.grad for p in (*teacher.parameters(), *student.parameters())]


@program
def results_under_no_grad_before_a_graph_break(jit):
    layer = nn.Linear(3, 3)

    @jit
    def run(x):
        with torch.no_grad():
            y = layer(x)
        torch._dynamo.graph_break()
        return layer(x) + y, y

    out, y = run(leaf(2, 3))
    out.sum().backward()
    return out, y, layer.weight.grad


@program
def a_graph_break_inside_no_grad(jit):
    layer = nn.Linear(3, 3)

    @jit
    def run(x):
        with torch.no_grad():
            y = layer(x)
            torch._dynamo.graph_break()
            z = layer(y)
        return z, z * x

    x = leaf(2, 3)
    z, out = run(x)
    out.sum().backward()
    return z, out, x.grad, layer.weight.grad


@program
def enable_grad_inside_no_grad(jit):
    @jit
    def run(x):
        with torch.no_grad():
            y = x * 2
            with torch.enable_grad():
                z = x * 3
            w = x * 4
        return y, z, w

    x = leaf(3)
    y, z, w = run(x)
    z.sum().backward()
    return y, z, w, x


@program
def enable_grad_while_the_caller_has_no_grad(jit):
    @jit
    def run(x):
        y = x * 2
        with torch.enable_grad():
            z = x.sin()
        return y, z

    x = leaf(3)
    with torch.no_grad():
        y, z = run(x)
    z.sum().backward()
    return y, z, x


@program
def only_enable_grad_while_the_caller_has_no_grad(jit):
    @jit
    def run(x):
        with torch.enable_grad():
            return x.sin()

    x = leaf(3)
    with torch.no_grad():
        z = run(x)
    z.sum().backward()
    return z, x


@program
def set_grad_enabled_that_stays_off(jit):
    @jit
    def run(x):
        y = x * 2
        torch.set_grad_enabled(False)
        return y, x * 3

    return run(leaf(3)), torch.is_grad_enabled()


@program
def set_grad_enabled_that_stays_off_in_every_call(jit):
    @jit
    def run(x):
        torch.set_grad_enabled(False)
        return x * 3

    found = []
    for _ in range(3):
        torch.set_grad_enabled(True)
        found += [run(leaf(3)), torch.is_grad_enabled()]
    return found


@program
def set_grad_enabled_that_stays_on(jit):
    @jit
    def run(x):
        y = x * 2
        torch.set_grad_enabled(True)
        return y, x * 3

    torch.set_grad_enabled(False)
    return run(leaf(3)), torch.is_grad_enabled()


@program
def set_grad_enabled_after_a_graph_break(jit):
    @jit
    def run(x):
        torch.set_grad_enabled(False)
        y = x * 2
        torch._dynamo.graph_break()
        z = x * 3
        torch.set_grad_enabled(True)
        return y, z, x * 4

    return run(leaf(3)), torch.is_grad_enabled()


@program
def set_grad_enabled_by_an_argument(jit):
    @jit
    def run(x, flag):
        with torch.set_grad_enabled(flag):
            y = x.exp()
        return y, y * x

    x = leaf(3)
    return run(x, True), run(x, False), run(x, True)


@program
def grad_mode_is_asked(jit):
    @jit
    def run(x):
        return x * 2 if torch.is_grad_enabled() else x * 3

    x = leaf(3)
    with torch.no_grad():
        first = run(x)
    return first, run(x)


@program
def grad_mode_after_an_exception(jit):
    @jit
    def run(x):
        with torch.no_grad():
            y = x * 2
            raise ValueError("stop")
        return y

    with contextlib.suppress(ValueError):
        run(leaf(3))
    return torch.is_grad_enabled()


@program
def calls_under_no_grad_and_with_grad_in_turn(jit):
    layer = jit(nn.Linear(3, 3))
    x = torch.randn(2, 3)
    with torch.no_grad():
        first = layer(x)
    second = layer(x)
    with torch.no_grad():
        third = layer(x)
    second.sum().backward()
    return first, second, third, layer.weight.grad


@program
def a_function_decorated_with_no_grad(jit):
    layer = nn.Linear(3, 3)

    @torch.no_grad()
    def normalized(x):
        return x / layer(x).norm()

    @jit
    def run(x):
        return normalized(x) * layer(x)

    x = leaf(2, 3)
    y = run(x)
    y.sum().backward()
    return y, x.grad, layer.weight.grad


@program
def a_jitted_function_decorated_with_no_grad(jit):
    layer = nn.Linear(3, 3)

    @jit
    @torch.no_grad()
    def run(x):
        return layer(x)

    return run(leaf(2, 3)), torch.is_grad_enabled()


@program
def no_grad_value_times_its_source(jit):
    @jit
    def run(x):
        with torch.no_grad():
            y = x * 2
        return x * y

    x = leaf(3)
    run(x).sum().backward()
    return x.grad


@program
def a_view_made_under_no_grad(jit):
    @jit
    def run(x):
        with torch.no_grad():
            return x.view(-1)

    return run(leaf(2, 3))


@program
def a_view_made_under_no_grad_of_a_value(jit):
    @jit
    def run(x):
        y = x * 2
        with torch.no_grad():
            z = y.view(-1)
        return y, z

    x = leaf(2, 3)
    y, z = run(x)
    y.sum().backward()
    return y, z, x


@program
def values_of_views_made_under_no_grad(jit):
    @jit
    def run(x, w):
        y = x * 1
        with torch.no_grad():
            views = [x.view(-1), x[0], x.split(2, 1)[0], y.expand(2, 2, 6), y.squeeze(), x.reshape(3, 4)]
            others = [x.detach()[0], x.T.reshape(-1), (x * 2)[0]]
        return [each * 2 for each in (*views, *others)], views[0] * w

    x, w = leaf(2, 6), leaf(12)
    results, product = run(x, w)
    flows = [each.requires_grad for each in results]
    sum(each.sum() for each in (*results, product)).backward()
    return flows, x.grad, w.grad


@program
def an_input_returned_under_no_grad(jit):
    @jit
    def run(x):
        with torch.no_grad():
            return x, x + 1

    x = leaf(2, 3)
    y, z = run(x)
    return y is x, y, z


@program
def a_parameter_changed_under_no_grad(jit):
    weight = leaf(3)

    @jit
    def run(x):
        with torch.no_grad():
            weight.mul_(0.5).add_(x)
        return (weight * x).sum()

    x = torch.randn(3)
    y = run(x)
    y.backward()
    return y, weight


@program
def a_moving_average_of_weights(jit):
    model, average = nn.Linear(3, 3), nn.Linear(3, 3)

    @jit
    def run(x):
        y = model(x)
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)
        return y.sum() + average(x).sum()

    loss = run(torch.randn(2, 3))
    loss.backward()
    return loss, list(model.parameters()), list(average.parameters())


@program
def a_value_changed_under_no_grad(jit):
    @jit
    def run(x):
        y = x.sin()
        with torch.no_grad():
            y.mul_(2)
        return y * x

    x = leaf(3)
    y = run(x)
    y.sum().backward()
    return y, x.grad


@program
def modes_nested_three_deep(jit):
    @jit
    def run(x):
        with torch.no_grad():
            with torch.enable_grad():
                with torch.no_grad():
                    a = x.sin()
                b = x.cos()
            c = x.exp()
        return a, b, c, a * b * c * x

    x = leaf(3)
    results = run(x)
    results[-1].sum().backward()
    return results, x


@program
def inference_mode_around_a_call(jit):
    layer = jit(nn.Linear(3, 3))
    with torch.inference_mode():
        y = layer(torch.randn(2, 3))
    z = layer(torch.randn(2, 3))
    return y, z


@program
def inference_mode_in_a_program(jit):
    layer = nn.Linear(3, 3)

    @jit
    def run(x):
        with torch.inference_mode():
            return layer(x)

    y = run(torch.randn(2, 3))
    return y, torch.is_inference_mode_enabled()


@program
def inference_mode_before_other_calls(jit):
    layer = nn.Linear(3, 3)

    @jit
    def run(x, z):
        with torch.inference_mode():
            y = layer(x).argmax()
        return y, layer(z)

    y, out = run(torch.randn(2, 3), torch.randn(2, 3))
    out.sum().backward()
    return y, out, layer.weight.grad


@program
def no_grad_in_a_checkpoint(jit):
    layer = nn.Linear(3, 3)

    def block(x):
        with torch.no_grad():
            scale = layer(x).abs().mean()
        return layer(x).sin() / scale

    @jit
    def run(x):
        return checkpoint(block, x, use_reentrant=False).sum()

    x = leaf(2, 3)
    y = run(x)
    y.backward()
    return y, x.grad, layer.weight.grad


@program
def random_numbers_under_no_grad(jit):
    @jit
    def run(x):
        with torch.no_grad():
            noise = torch.randn_like(x)
        return x * noise, noise

    x = leaf(3)
    y, noise = run(x)
    y.sum().backward()
    return y, noise, x.grad


@program
def forge_grad_sees_no_grad(jit):
    def f(x):
        with torch.no_grad():
            y = 2 * x
        return (x * y).sum()

    gradient = torch.func.grad(f) if jit is no_jit else forge.grad(f)
    return gradient(torch.randn(3))


@program
def forge_grad_sees_enable_grad(jit):
    def f(x):
        with torch.no_grad(), torch.enable_grad():
            y = 2 * x
        return (x * y).sum()

    gradient = torch.func.grad(f) if jit is no_jit else forge.grad(f)
    return gradient(torch.randn(3))


@program
def forge_vjp_sees_set_grad_enabled(jit):
    def f(x):
        torch.set_grad_enabled(False)
        y = x.exp()
        torch.set_grad_enabled(True)
        return x * y

    vjp = torch.func.vjp if jit is no_jit else forge.vjp
    y, pullback = vjp(f, torch.randn(3))
    return y, pullback(torch.ones(3))


@program
def an_input_that_gets_requires_grad(jit):
    @jit
    def run(x):
        y = x * 2
        y.requires_grad_()
        return y * 3

    return run(torch.randn(3))


@program
def a_detached_value_that_gets_requires_grad(jit):
    @jit
    def run(x):
        y = x.sin().detach().requires_grad_()
        z = (y * x).sum()
        return y, z

    x = leaf(3)
    y, z = run(x)
    z.backward()
    return y, z, x.grad, y.grad


@program
def a_frozen_layer_between_trained_ones(jit):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].requires_grad_(False)
    y = jit(model)(torch.randn(2, 3))
    y.sum().backward()
    return y, [p.grad for p in model.parameters()]


@program
def an_in_place_change_of_a_leaf_is_refused(jit):
    @jit
    def run(x):
        x.mul_(2)
        return x

    return run(leaf(3))


@program
def an_in_place_change_of_a_leaf_under_no_grad(jit):
    @jit
    def run(x):
        with torch.no_grad():
            x.mul_(2)
        return x * 3

    x = leaf(3)
    y = run(x)
    y.sum().backward()
    return x, y


@program
def a_write_of_a_tracked_value_into_an_untracked_input(jit):
    @jit
    def run(x, w):
        x.copy_(w * 2)
        return x * 3

    x, w = torch.zeros(3), leaf(3)
    y = run(x, w)
    y.sum().backward()
    return x, y, w.grad


@program
def a_write_of_an_untracked_value_into_a_tracked_one(jit):
    @jit
    def run(w):
        y = w * 2
        with torch.no_grad():
            z = w * 5
        y.copy_(z)
        return y

    return run(leaf(3))
