"""Activation functions."""

import torch
import torch.nn.functional as F
from torch import Tensor

from forge import clang
from forge.ir import TensorProxy, get_grad, put_grad, register_grad
from forge.torchlang.core import torchsymbol


@torchsymbol(torch.relu, Tensor.relu, F.relu, inplace=(torch.relu_, Tensor.relu_), inplace_position=1)
def relu(input: TensorProxy) -> TensorProxy:
    """max(input, 0)."""
    return clang.maximum(input, 0)


@register_grad(relu)
def _relu_grad(input: TensorProxy) -> TensorProxy:
    out = relu(input)
    put_grad(input, clang.where(out > 0, get_grad(out), 0))
    return out


@torchsymbol(F.silu, inplace_position=1)
def silu(input: TensorProxy) -> TensorProxy:
    """input * sigmoid(input)."""
    return input * clang.sigmoid(input)
