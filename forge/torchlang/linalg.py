"""Products of torch."""

import operator

import torch
import torch.nn.functional as F
from torch import Tensor

from forge import clang
from forge.ir import TensorProxy, get_grad, needs_grad, put_grad, register_grad
from forge.torchlang.core import torchsymbol


@torchsymbol(torch.matmul, Tensor.matmul, operator.matmul, inplace=operator.imatmul)
def matmul(input: TensorProxy, other: TensorProxy) -> TensorProxy:
    """The matrix product; batch dims broadcast."""
    return clang.matmul(input, other)


@torchsymbol(F.linear)
def linear(input: TensorProxy, weight: TensorProxy, bias: TensorProxy | None = None) -> TensorProxy:
    """input @ weight.T + bias.

    Shapes: input (..., in), weight (out, in) or (in,), bias (out,) or (); out is (..., out).
    """
    product = clang.matmul(input, clang.transpose(weight, 0, 1) if weight.ndim == 2 else weight)
    return product if bias is None else clang.add(product, bias)


@register_grad(linear)
def _linear_grad(input: TensorProxy, weight: TensorProxy, bias: TensorProxy | None = None) -> TensorProxy:
    out = linear(input, weight, bias)
    g = get_grad(out)
    put_grad(bias, g)  # summed to the bias's shape
    if weight.ndim == 1:
        put_grad(input, clang.unsqueeze(g, -1) * weight)
        put_grad(weight, clang.unsqueeze(g, -1) * input)
        return out
    if needs_grad(input):
        put_grad(input, clang.matmul(g, weight))
    if needs_grad(weight):
        rows = clang.reshape(g, (-1, weight.shape[0]))
        put_grad(weight, clang.matmul(rows.transpose(0, 1), clang.reshape(input, (-1, weight.shape[1]))))
    return out
