"""Writes and effects: optimizers, operators that change their arguments, assertions, random and Python's state."""

import random

import torch
import torch.nn.functional as F
from capture.programs.table import program
from torch import nn


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


acme = torch.library.Library("forge_programs", "FRAGMENT")
acme.define("accumulate(Tensor x, Tensor(a!) total) -> Tensor")
acme.impl("accumulate", lambda x, total: (total.add_(x.sum()), x * 2)[1], "CompositeExplicitAutograd")
torch.library.register_fake("forge_programs::accumulate", lambda x, total: torch.empty_like(x), lib=acme)
acme.define("fill_(Tensor(a!) x, float value) -> ()")
acme.impl("fill_", lambda x, value: x.fill_(value) and None, "CompositeExplicitAutograd")
torch.library.register_fake("forge_programs::fill_", lambda x, value: None, lib=acme)
acme.define("two(Tensor(a!) x, Tensor(b!) y) -> ()")
acme.impl("two", lambda x, y: [x.add_(1), y.mul_(2)].clear(), "CompositeExplicitAutograd")
torch.library.register_fake("forge_programs::two", lambda x, y: None, lib=acme)


@torch.library.custom_op("forge_programs::scale_into", mutates_args=("out",))
def scale_into(x: torch.Tensor, out: torch.Tensor, scale: float = 2.0) -> None:
    out.copy_(x * scale)


def optimizing(jit, make, steps=3, **options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = make(model.parameters())

    @jit(**options)
    def step(x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = [step(torch.randn(5, 3), torch.randn(5, 1)).detach() for _ in range(steps)]
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return losses, list(model.parameters()), state


@program
def a_training_step_with_sgd(jit):
    return optimizing(jit, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))


@program
def a_training_step_with_adamw(jit):
    return optimizing(jit, lambda p: torch.optim.AdamW(p, 0.1))


@program
def a_training_step_with_foreach_adamw(jit):
    return optimizing(jit, lambda p: torch.optim.AdamW(p, 0.1, foreach=True))


@program
def an_optimizer_step_alone(jit):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)

    @jit
    def step():
        optimizer.step()

    for _ in range(3):
        model(torch.randn(4, 3)).square().sum().backward()
        step()
        optimizer.zero_grad()
    return list(model.parameters())


@program
def an_sgd_step_alone(jit):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = jit(optimizer.step)
    for _ in range(3):
        model(torch.randn(4, 3)).square().sum().backward()
        step()
        optimizer.zero_grad()
    return list(model.parameters())


@program
def a_training_step_with_a_scheduler_and_clipping(jit):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), torch.tensor(0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    @jit
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss, norm

    seen = []
    for _ in range(3):
        seen.append([t.detach() for t in step(torch.randn(5, 3))])
        scheduler.step()
    return seen, list(model.parameters())


@program
def a_backward_in_a_program(jit):
    x = leaf(3)

    @jit
    def run():
        y = x.sin().sum()
        y.backward()
        return x.grad * 2

    return run(), x


@program
def gradients_in_a_program(jit):
    @jit
    def run(x):
        y = x.sin().sum()
        (g,) = torch.autograd.grad(y, x)
        return g * 2

    return run(leaf(3))


@program
def gradients_set_to_none(jit):
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()

    @jit
    def run(x):
        layer.zero_grad()
        return layer(x).sum()

    run(torch.ones(1, 2)).backward()
    return list(layer.parameters())


@program
def an_operator_by_its_packet_changes_an_argument(jit):
    total = torch.zeros(())
    y = jit(lambda x: torch.ops.forge_programs.accumulate(x, total))(torch.randn(3))
    return y, total


@program
def an_operator_by_its_overload_changes_an_argument(jit):
    total = torch.zeros(())
    y = jit(lambda x: torch.ops.forge_programs.accumulate.default(x, total))(torch.randn(3))
    return y, total


@program
def an_operator_changes_an_argument_given_by_name(jit):
    total = torch.zeros(())
    y = jit(lambda x: torch.ops.forge_programs.accumulate(x, total=total))(torch.randn(3))
    return y, total


@program
def an_operator_changes_a_view(jit):
    def run(x):
        total = torch.zeros(3)
        y = torch.ops.forge_programs.accumulate(x, total[1])
        return y + total, total

    return jit(run)(torch.randn(3))


@program
def an_operator_returns_nothing(jit):
    def run(x):
        y = x * 2
        torch.ops.forge_programs.fill_(y[0], 3.0)
        return y

    return jit(run)(torch.randn(3))


@program
def an_operator_changes_two(jit):
    def run(x, y):
        torch.ops.forge_programs.two(x, y)
        return x + y

    x, y = torch.randn(3), torch.randn(3)
    return jit(run)(x, y), x, y


@program
def a_custom_op_writes_its_result(jit):
    def run(x):
        out = torch.empty_like(x)
        scale_into(x, out, scale=3.0)
        return out + 1

    return jit(run)(torch.randn(3))


@program
def a_custom_op_writes_into_an_input(jit):
    out = torch.zeros(3)
    jit(lambda x: scale_into(x, out))(torch.randn(3))
    return out


@program
def an_assertion_that_fails(jit):
    def run(x):
        torch._assert_async((x > 0).all())
        return x * 2

    return jit(run)(torch.tensor([-1.0]))


@program
def an_assertion_with_a_message_that_fails(jit):
    def run(x):
        torch._assert_async((x > 0).all(), "positive")
        return x * 2

    return jit(run)(torch.tensor([-1.0]))


@program
def an_assertion_in_training_that_fails(jit):
    def run(x):
        torch._assert_async((x > 0).all())
        return (x * 2).sum()

    return jit(run)(torch.tensor([-1.0], requires_grad=True))


@program
def an_assertion_that_holds(jit):
    def run(x):
        torch._assert_async((x > 0).all())
        assert x.shape[0] == 1
        return x * 2

    return jit(run)(torch.tensor([1.0]))


@program
def a_seed_set_in_a_program(jit):
    def run(x):
        torch.manual_seed(7)
        return x + torch.rand(3)

    return jit(run)(torch.randn(3))


@program
def a_random_call_whose_result_is_unused(jit):
    def run(x):
        torch.rand(3)
        return x + torch.randn(3)

    return jit(run)(torch.randn(3))


@program
def a_generator_of_ones_own(jit):
    generator = torch.Generator().manual_seed(3)

    def run(x):
        return x + torch.rand(3, generator=generator)

    return jit(run)(torch.randn(3)), torch.rand(2, generator=generator)


@program
def the_random_state_saved_and_restored(jit):
    def run(x):
        state = torch.get_rng_state()
        y = torch.rand(3)
        torch.set_rng_state(state)
        return x + y, torch.rand(3)

    return jit(run)(torch.randn(3))


@program
def a_forked_random_state(jit):
    def run(x):
        with torch.random.fork_rng(devices=[]):
            y = torch.rand(3)
        return x + y, torch.rand(3)

    return jit(run)(torch.randn(3))


@program
def pythons_random_numbers(jit):
    random.seed(0)
    run = jit(lambda x: x * random.random())
    return run(torch.ones(2)), run(torch.ones(2)), random.random()


@program
def a_list_that_grows(jit):
    kept = []

    def run(x):
        y = x * 2
        kept.append(y)
        return y.sin()

    run = jit(run)
    return run(torch.randn(2)), run(torch.randn(2)), kept


@program
def a_dict_and_an_attribute(jit):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0
            self.cache = {}

        def forward(self, x):
            self.calls += 1
            self.cache["last"] = x * self.calls
            return x + self.calls

    layer = Layer()
    run = jit(layer)
    return [run(torch.ones(2)) for _ in range(4)], layer.calls, layer.cache["last"]


counter = {"calls": 0}


@program
def a_global_counter(jit):
    counter["calls"] = 0

    def run(x):
        counter["calls"] += 1
        return x * counter["calls"]

    run = jit(run)
    return [run(torch.ones(2)) for _ in range(3)], counter["calls"]


@program
def a_buffer_replaced(jit):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("average", torch.zeros(2))

        def forward(self, x):
            self.average = self.average * 0.9 + x.detach().mean(0)
            return x - self.average

    layer = Layer()
    run = jit(layer)
    return [run(torch.randn(3, 2)) for _ in range(3)], layer.average


@program
def batch_norm_statistics(jit):
    layer = nn.BatchNorm1d(3)
    run = jit(layer)
    out = [run(torch.randn(4, 3)) for _ in range(2)]
    layer.eval()
    return out, run(torch.randn(4, 3)), layer.running_mean, layer.running_var, layer.num_batches_tracked


@program
def foreach_operations_in_place(jit):
    def run(xs, ys):
        torch._foreach_mul_(xs, 2)
        torch._foreach_add_(xs, ys, alpha=0.5)
        return torch._foreach_norm(xs)

    xs, ys = [torch.ones(2), torch.ones(3)], [torch.randn(2), torch.randn(3)]
    return jit(run)(xs, ys), xs


@program
def weights_initialized_in_a_program(jit):
    layer = nn.Linear(3, 3)

    def run():
        with torch.no_grad():
            nn.init.normal_(layer.weight)
            layer.bias.zero_()

    jit(run)()
    return list(layer.parameters())


@program
def data_changed_through_data(jit):
    weight = leaf(3)

    def run(x):
        weight.data.add_(x)
        return (weight * x).sum()

    y = jit(run)(torch.randn(3))
    y.backward()
    return y, weight


@program
def data_of_a_parameter_changed_through_a_detached_view(jit):
    weight = leaf(2, 3)

    def run(x):
        weight.detach()[0].copy_(x)
        return (weight * x).sum()

    y = jit(run)(torch.randn(3))
    y.backward()
    return y, weight


def _versions(jit, run, *tensors):
    """Return results, and the version counters of tensors, with a gradient that reads them."""
    before = [each._version for each in tensors]
    loss = sum((each * each).sum() for each in tensors if each.requires_grad)
    results = jit(run)(*tensors)
    loss.backward()
    return results, tensors, [each._version - version for each, version in zip(tensors, before, strict=True)]


@program
def data_changed_between_a_forward_and_its_backward(jit):
    def run(weight, x):
        weight.data.add_(x)
        return weight * x

    return _versions(jit, run, leaf(3), torch.randn(3))


@program
def a_view_of_data_changed(jit):
    def run(weight, buffer):
        weight.data[0].copy_(buffer[1])
        weight.data.t().mul_(2)
        buffer.data.add_(1)
        return weight * buffer

    return _versions(jit, run, leaf(2, 2), torch.randn(2, 2))


@program
def a_buffer_and_its_data_changed(jit):
    def run(buffer, other):
        buffer.data.add_(1)
        buffer.mul_(2)
        other.detach().add_(buffer)
        return buffer * other

    return _versions(jit, lambda buffer, other, w: (run(buffer, other), w * 2), *torch.randn(2, 3), leaf(3))


@program(eager="change")  # set_, or shallow_copy_data_
def data_assigned(jit):
    weight = leaf(3)

    def run(x):
        weight.data = x * 2
        return (weight * x).sum()

    y = jit(run)(torch.randn(3))
    y.backward()
    return y, weight


@program
def a_result_written_to_out(jit):
    def run(x, out):
        torch.add(x, 1, out=out)
        torch.mul(x, 2, out=out[0])
        return out * 2

    out = torch.zeros(2, 3)
    return jit(run)(torch.randn(3), out), out


@program
def a_result_written_to_out_of_several(jit):
    def run(x):
        values, indices = torch.empty(0), torch.empty(0, dtype=torch.int64)
        torch.sort(x, out=(values, indices))
        return values, indices

    return jit(run)(torch.randn(3))


@program(eager="set_")
def a_tensor_set_to_another(jit):
    def run(x, y):
        x.set_(y)
        return x * 2

    x, y = torch.zeros(3), torch.randn(3)
    return jit(run)(x, y), x


@program(eager="resize_")
def a_tensor_resized(jit):
    def run(x):
        y = x.clone()
        y.resize_(2)
        return y * 2

    return jit(run)(torch.randn(4))


@program
def a_tensor_transposed_in_place(jit):
    def run(x):
        y = x * 2
        y.t_()
        y.unsqueeze_(0)
        y.add_(1)
        return y

    return jit(run)(torch.randn(2, 3))


@program
def an_input_transposed_in_place(jit):
    def run(x):
        x.t_()
        return x * 2

    x = torch.randn(2, 3)
    return jit(run)(x), x


@program
def two_inputs_are_one(jit):
    def run(x, y):
        x.add_(1)
        return x * y

    x = torch.randn(3)
    return jit(run)(x, x), x


@program
def overlapping_inputs(jit):
    def run(x, y):
        x.add_(1)
        return x.sum() * y

    x = torch.randn(4)
    return jit(run)(x[:3], x[1:]), x


@program
def a_print_in_a_program(jit):
    def run(x):
        y = x * 2
        print("", end="")
        return y + 1

    return jit(run)(torch.randn(2))


@program
def grad_of_an_input_set(jit):
    def run(x):
        x.grad = x.detach() * 2
        return x * 3

    x = leaf(3)
    y = jit(run)(x)
    y.sum().backward()
    return y, x


@program
def a_hook_on_a_value(jit):
    def run(x):
        y = x * 2
        y.register_hook(lambda g: g * 10)
        return y.sum()

    x = leaf(3)
    jit(run)(x).backward()
    return x.grad


@program
def a_hook_sees_what_came_before_it(jit):
    def run(x):
        y = x * 2
        z = y.sin()
        y.register_hook(lambda g: g * 10 + 1)
        return (y + z).sum()

    x = leaf(3)
    jit(run)(x).backward()
    return x.grad


@program
def a_hook_that_changes_nothing(jit):
    seen = []

    def run(x):
        y = x.exp()
        y.register_hook(lambda g: seen.append(g.sum()))
        return (y * y).sum()

    x = leaf(3)
    jit(run)(x).backward()
    return x.grad, seen


@program
def a_value_retains_its_gradient(jit):
    def run(x):
        y = x * 2
        y.retain_grad()
        return y, y.sum()

    x = leaf(3)
    y, total = jit(run)(x)
    total.backward()
    return x.grad, y.grad
