"""Layouts of images that forge's own passes choose, and the gradients that a caller sees."""

from collections.abc import Callable

import torch

from forge import prims
from forge.ir import Symbol, TensorProxy, get_grad, put_grad, register_grad
from forge.torchlang.shape import contiguous


def in_channels_last(x: TensorProxy) -> TensorProxy:
    """Return an image whose channels lie beside each other in memory."""
    return contiguous(x, memory_format=torch.channels_last)


def _with_contiguous_gradient(name: str, body: Callable[[TensorProxy], TensorProxy]) -> Symbol:
    """Return an operation on an input of a program, whose gradient has the layout in which eager gives it back."""
    symbol = Symbol(name, f"forge.{name}", body=body)

    @register_grad(symbol)
    def rule(x: TensorProxy) -> TensorProxy:
        out = symbol(x)
        put_grad(x, contiguous(get_grad(out), memory_format=torch.contiguous_format))
        return out

    return symbol


channels_last_input = _with_contiguous_gradient("channels_last_input", in_channels_last)
alias_of_input = _with_contiguous_gradient("alias_of_input", prims.alias)
