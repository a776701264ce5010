"""Layouts of images that forge's own passes choose, and the gradients that a caller sees."""

from collections.abc import Callable

import torch

from forge import prims
from forge.ir import Symbol, TensorProxy, get_grad, put_grad, register_grad
from forge.torchlang.shape import contiguous


def in_channels_last(x: TensorProxy) -> TensorProxy:
    """Return an image whose channels lie beside each other in memory."""
    return contiguous(x, memory_format=torch.channels_last)


def _in_rows(x: TensorProxy) -> TensorProxy:
    return contiguous(x, memory_format=torch.contiguous_format)


def _with_gradient(
    name: str, body: Callable[[TensorProxy], TensorProxy], lay_out: Callable[[TensorProxy], TensorProxy]
) -> Symbol:
    """Return an operation whose gradient is laid out anew."""
    symbol = Symbol(name, f"forge.{name}", body=body)

    @register_grad(symbol)
    def rule(x: TensorProxy) -> TensorProxy:
        out = symbol(x)
        put_grad(x, lay_out(get_grad(out)))
        return out

    return symbol


# on inputs of a program, to whose gradients eager gives this layout
channels_last_input = _with_gradient("channels_last_input", in_channels_last, _in_rows)
alias_of_input = _with_gradient("alias_of_input", prims.alias, _in_rows)
# on what a convolution gives: its backward would copy a gradient in another layout, slowly
channels_last_result = _with_gradient("channels_last_result", prims.alias, in_channels_last)
