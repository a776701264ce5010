"""Exceptions that a program raises, and those that it catches itself."""

import torch
import torch.nn.functional as F
from capture.programs.table import program
from torch import nn


@program
def a_view_that_does_not_fit_is_caught(jit):
    def run(x):
        try:
            return x.view(7)
        except RuntimeError:
            return x * 2

    run = jit(run)
    return run(torch.randn(6)), run(torch.randn(7))


@program
def a_product_that_does_not_fit_is_caught_by_a_helper(jit):
    def product(x, y):
        try:
            return x @ y
        except RuntimeError as error:
            return x.sum() * len(str(type(error).__name__))

    def run(x, y):
        return product(x * 2, y) + 1

    return jit(run)(torch.randn(2, 3), torch.randn(2, 3))


@program
def an_error_after_a_change_in_place_is_caught(jit):
    def run(x):
        x.add_(1)
        try:
            x.view(7)
        except RuntimeError:
            x.mul_(2)
        return x

    x = torch.randn(6)
    return jit(run)(x), x


@program
def an_error_after_a_graph_break_is_caught(jit):
    seen = []

    def run(x):
        seen.append(1)
        x.add_(1)
        torch._dynamo.graph_break()
        try:
            return torch.cat([x, x.view(1, -1)])
        except RuntimeError:
            return x

    x = torch.randn(6)
    return jit(run)(x), x, seen


@program
def a_module_that_tries_another_way(jit):
    class Layer(nn.Module):
        def forward(self, x):
            try:
                return F.conv2d(x, torch.ones(1, 2, 3, 3))
            except RuntimeError:
                return F.conv2d(x, torch.ones(1, x.shape[1], 3, 3))
            finally:
                self.done = True

    layer = Layer()
    return jit(layer)(torch.ones(1, 3, 4, 4)), layer.done


@program
def shapes_that_do_not_broadcast(jit):
    return jit(lambda x, y: x + y)(torch.randn(3), torch.randn(4))


@program
def a_dim_out_of_range(jit):
    return jit(lambda x: x.sum(3))(torch.randn(3))


@program
def a_dtype_that_does_not_fit(jit):
    return jit(lambda x: x.bitwise_and(1))(torch.randn(3))


@program
def an_index_out_of_range(jit):
    return jit(lambda x: x[5])(torch.randn(3))


@program
def an_exception_of_ones_own(jit):
    def run(x):
        if x.shape[0] == 3:
            raise KeyError("three")
        return x

    return jit(run)(torch.randn(3))


@program
def an_exception_of_ones_own_after_a_change(jit):
    def run(x):
        x.mul_(2)
        raise ValueError("after")

    x = torch.ones(2)
    try:
        jit(run)(x)
    except ValueError:
        return x


@program
def a_wrong_argument(jit):
    return jit(lambda x: F.softmax(x, dim="a"))(torch.randn(3))


@program
def a_missing_argument(jit):
    return jit(lambda x, y: x + y)(torch.randn(3))


@program
def an_argument_too_many(jit):
    return jit(nn.Linear(3, 3))(torch.randn(3), torch.randn(3))


@program
def a_linear_of_the_wrong_size(jit):
    return jit(nn.Linear(3, 3))(torch.randn(2, 4))


@program
def a_gradient_of_integers(jit):
    return jit(lambda x: x * 2)(torch.arange(3)).sum().backward()


@program
def a_second_backward(jit):
    x = torch.randn(3, requires_grad=True)
    y = jit(lambda x: x.exp())(x).sum()
    y.backward()
    y.backward()


@program
def a_saved_tensor_changed(jit):
    x = torch.randn(3, requires_grad=True)
    y = x * 2
    z = jit(lambda y: y * y)(y)
    y.add_(1)
    z.sum().backward()


@program
def a_result_that_needs_no_save_changed(jit):
    x = torch.randn(3, requires_grad=True)
    y = x * 2
    z = jit(lambda y: y + 1)(y)
    y.add_(1)
    z.sum().backward()
    return x.grad


def tries(function, exception):
    """Return a program that catches the exception that `function` raises."""

    def run(x):
        try:
            return function(x)
        except exception as error:
            return x * 2, type(error).__name__

    return run


@program
def an_index_out_of_range_is_caught(jit):
    run = jit(tries(lambda x: x[5], IndexError))
    return run(torch.randn(3)), run(torch.randn(3))


@program
def a_dim_out_of_range_is_caught(jit):
    return jit(tries(lambda x: x.sum(4), IndexError))(torch.randn(3))


@program
def a_dim_out_of_range_of_a_transpose_is_caught_in_training(jit):
    x = torch.randn(3, 2, requires_grad=True)
    y, name = jit(tries(lambda x: x.sin().transpose(0, 3), IndexError))(x)
    y.sum().backward()
    return y, name, x.grad


@program
def sizes_of_a_split_that_do_not_fit_are_caught(jit):
    return jit(tries(lambda x: x.split([1, 1]), RuntimeError))(torch.randn(3))


class SameTwice(torch.autograd.Function):
    """A pair of results that are one tensor, which Dynamo cannot capture."""

    @staticmethod
    def forward(ctx, x):
        y = x * 2
        return y, y

    @staticmethod
    def backward(ctx, g, h):
        return g * 2 + h * 20


@program
def a_function_whose_results_are_one(jit):
    x = torch.randn(3, requires_grad=True)
    a, b = jit(lambda x: SameTwice.apply(x * 1))(x)
    (a.sum() + 3 * b.sum()).backward()
    return a, b, x.grad
