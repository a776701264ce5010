"""Functions of torch that move elements."""

from typing import Any

import torch
from torch import Tensor

from forge import clang
from forge.ir import TensorProxy
from forge.torchlang.core import View, torchsymbol


def varargs(first: Any, rest: tuple) -> tuple:
    """x.view(2, 3) and x.view((2, 3)) alike."""
    return tuple(first) if isinstance(first, (tuple, list)) else (first, *rest)


def _reshape_back(x: TensorProxy, new: TensorProxy, *args: Any, **kwargs: Any) -> TensorProxy:
    return clang.reshape(new, x.shape)


@torchsymbol(Tensor.view, view=View.ALWAYS, invert=_reshape_back)
def view(self: TensorProxy, *shape: Any) -> TensorProxy:
    """The same memory with another shape."""
    return clang.reshape(self, varargs(shape[0], shape[1:]))


@torchsymbol(Tensor.transpose, torch.transpose, view=View.ALWAYS, invert=lambda x, new, a, b: clang.transpose(new, a, b))
def transpose(input: TensorProxy, dim0: int, dim1: int) -> TensorProxy:
    """Two dims exchanged."""
    return clang.transpose(input, dim0, dim1)
