"""Modules and torch.autograd.Functions as they are found: slices, tied and renormed tables, autocast, transforms."""

import torch
import torch.nn.functional as F
from capture.programs.table import program
from torch import nn
from torch.autograd import Function


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def trained(run, *inputs):
    """Return a call's result and the gradients of its inputs."""
    result = run(*inputs)
    result.float().square().sum().backward()
    return result, [x.grad for x in inputs]


@program
def a_slice_of_a_jitted_sequential(jit):
    model = jit(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)))
    x = leaf(2, 3)
    return model(x), model[1:](model[0](x)), model[:1](x), len(model[1:]), model[1:][-1] is model[-1]


@program
def a_jitted_module_makes_another_of_its_class(jit):
    class Doubling(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor

        def forward(self, x):
            return x * self.factor

        def doubled(self):
            return type(self)(2 * self.factor)

    model = jit(Doubling(3.0))
    x = torch.ones(2)
    return model(x), model.doubled()(x), model.doubled().doubled()(x)


@program
def a_slice_of_a_jitted_list(jit):
    class Layers(nn.ModuleList):
        def forward(self, x):
            for layer in self:
                x = layer(x)
            return x

    layers = jit(Layers([nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)]))
    x = leaf(2, 3)
    return layers(x), layers[:2](x), layers[1:](layers[0](x))


@program
def a_table_whose_rows_are_renormed(jit):
    table = nn.Embedding(5, 3, max_norm=0.5)
    y = jit(table)(torch.tensor([1, 2, 1]))
    y.sum().backward()
    return y, table.weight, table.weight.grad


@program
def a_bag_whose_rows_are_renormed(jit):
    table = nn.EmbeddingBag(5, 3, max_norm=0.5, mode="sum")
    y = jit(lambda ids: table(ids) * 2)(torch.tensor([[1, 2], [4, 1]]))
    y.sum().backward()
    return y, table.weight, table.weight.grad


@program
def a_renorm_under_no_grad_before_its_use(jit):
    weight = leaf(5, 3)

    @jit
    def run(ids):
        with torch.no_grad():
            torch.embedding_renorm_(weight, ids, 0.5, 2.0)
        return F.embedding(ids, weight) * weight.sum()

    y = run(torch.tensor([0, 3]))
    y.sum().backward()
    return y, weight


class Product(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return (g @ w.t()).to(x.dtype), (x.t().to(g.dtype) @ g).to(w.dtype)


@program
def a_product_of_ones_own_in_autocast(jit):
    def run(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return Product.apply(x, w)

    return trained(jit(run), leaf(2, 3), leaf(3, 4))


@program
def a_product_of_ones_own_while_the_caller_has_autocast(jit):
    run = jit(lambda x, w: Product.apply(x, w) * 2)

    def around(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return run(x, w)

    return trained(around, leaf(2, 3), leaf(3, 4))


@program
def a_product_of_ones_own_outside_of_autocast(jit):
    def run(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            h = x @ w
        return Product.apply(x, w) + h

    return trained(jit(run), leaf(2, 3), leaf(3, 4))


@program
def a_short_time_spectrum(jit):
    window = torch.hann_window(8)

    def run(x):
        spectrum = torch.stft(x, 8, 4, window=window, return_complex=True)
        return torch.istft(spectrum * spectrum.abs(), 8, 4, window=window)

    return trained(jit(run), leaf(32))


@program
def attention_without_features_or_rows(jit):
    run, found = jit(lambda q: F.scaled_dot_product_attention(q, q, q)), []
    for shape in ((1, 2, 3, 0), (1, 2, 0, 4), (0, 2, 3, 4), (1, 2, 3, 4)):
        found.append(trained(run, leaf(*shape)))
    return found
