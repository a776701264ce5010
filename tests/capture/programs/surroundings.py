"""State that Dynamo does not guard: methods' closures, a tensor's autograd state, global settings, forward mode."""

import functools

import torch
import torch.autograd.forward_ad as forward_ad
from capture.programs.table import program
from torch import nn

# methods of objects that the program makes, and of its arguments


@program
def a_number_in_a_methods_closure_changes(jit):
    factor = [2]

    class Scale:
        def scaled(self, x):
            return x * factor[0]

    jitted = jit(lambda x: Scale().scaled(x))
    first = jitted(torch.ones(2))
    factor[0] = 5
    return first, jitted(torch.ones(2))


@program
def a_context_manager_of_the_programs_own_keeps_a_log(jit):
    log = []

    class Logged:
        def __enter__(self):
            log.append("enter")

        def __exit__(self, *raised):
            log.append("exit")

    def run(x):
        with Logged():
            return x * 2

    jitted = jit(run)
    return jitted(torch.ones(2)), jitted(torch.ones(2)), list(log)


@program
def a_decorated_method_counts_its_calls(jit):
    def counted(method):
        calls = []

        @functools.wraps(method)
        def wrapper(*args):
            calls.append(1)
            return method(*args)

        wrapper.calls = calls
        return wrapper

    class Layer:
        @counted
        def run(self, x):
            return x * 2

    jitted = jit(lambda x: Layer().run(x))
    return jitted(torch.ones(2)), jitted(torch.ones(2)), len(Layer.run.calls)


@program
def a_decorated_method_remembers_what_it_drew(jit):
    def remembered(method):
        known = {}

        def wrapper(self, n):
            if n not in known:
                known[n] = method(self, n)
            return known[n]

        return wrapper

    class Table:
        @remembered
        def values(self, n):
            return torch.randn(n)

    jitted = jit(lambda x: x + Table().values(3))
    return jitted(torch.zeros(3)), jitted(torch.zeros(3))


@program
def a_class_method_of_a_changed_closure(jit):
    state = {"factor": 2.0}

    class Layer(nn.Module):
        @classmethod
        def scaled(cls, x):
            return x * state["factor"]

        def forward(self, x):
            return self.scaled(x)

    jitted = jit(Layer())
    first = jitted(torch.ones(2))
    state["factor"] = 3.0
    return first, jitted(torch.ones(2))


# autograd state of an input


def of_several(run):
    leaf = torch.ones(3, requires_grad=True)
    base = torch.ones(3)
    return [run(x).detach() for x in (leaf, leaf * 1, base, base.view(3), leaf, base.view(3)[:2])]


@program
def a_leaf_and_another(jit):
    return of_several(jit(lambda x: x * (5 if x.is_leaf else 7)))


@program
def a_tensor_with_a_history_and_one_without(jit):
    return of_several(jit(lambda x: x * (5 if x.grad_fn is None else 7) + 1))


@program
def a_view_and_its_base(jit):
    return of_several(jit(lambda x: x.exp() * (5 if x._base is None else 7)))


@program
def the_version_of_an_input(jit):
    jitted = jit(lambda x: x * (x._version + 1))
    x = torch.ones(3)
    first = jitted(x)
    x.add_(1)
    return first, jitted(x)


@program
def the_version_of_a_value(jit):
    def run(x):
        y = x * 1
        before = y._version
        y.add_(1)
        return y * (y._version - before)

    x = torch.ones(3, requires_grad=True)
    result = jit(run)(x)
    result.sum().backward()
    return result, x.grad


# settings of the process


@program
def a_default_dtype_inside(jit):
    def run(x):
        torch.set_default_dtype(torch.float64)
        y = torch.ones(3) * x
        torch.set_default_dtype(torch.float32)
        return y

    return jit(run)(torch.ones(3))


@program
def tensors_of_numbers_on_a_default_device(jit):
    def run(x):
        y = x * 2
        return y + torch.tensor(3.0), torch.tensor([1, 2]), torch.as_tensor(True), torch.zeros(2)

    with torch.device("meta"):
        return [(each.device.type, each.shape) for each in jit(run)(torch.ones(3))]


@program
def a_default_dtype_that_is_left(jit):
    def run(x):
        torch.set_default_dtype(torch.float64)
        return x + torch.zeros(3)

    try:
        return jit(run)(torch.ones(3)), str(torch.get_default_dtype())
    finally:
        torch.set_default_dtype(torch.float32)


@program
def deterministic_algorithms_that_are_left(jit):
    def run(x):
        torch.use_deterministic_algorithms(True)
        return x + 1

    try:
        return jit(run)(torch.ones(3)), torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@program
def integers_under_two_default_dtypes(jit):
    jitted = jit(lambda x: (x / 2).sin())
    x = torch.arange(4)
    default = torch.get_default_dtype()
    try:
        results = [jitted(x)]
        torch.set_default_dtype(torch.float64)
        return [*results, jitted(x)]
    finally:
        torch.set_default_dtype(default)


# forward mode


def tangent_of(run, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(run(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


@program
def a_dual_number_without_grad(jit):
    jitted = jit(lambda x: x.sin().exp() * x)
    with torch.no_grad():
        return tangent_of(jitted, torch.ones(3))


@program
def a_dual_number_after_another_call(jit):
    jitted = jit(lambda x: x @ (x.sin().exp() * 2).t())
    return jitted(torch.eye(2)), tangent_of(jitted, torch.eye(2)), jitted(torch.eye(2))


@program
def a_dual_number_through_a_module(jit):
    return tangent_of(jit(nn.Sequential(nn.Linear(3, 3), nn.Tanh())), torch.ones(3)).detach()


@program(eager="forward mode")
def a_dual_level_inside(jit):
    def run(x):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            return forward_ad.unpack_dual(dual.sin() * 2).tangent

    jitted = jit(run)
    return jitted(torch.ones(3)), jitted(torch.zeros(3))
