"""The memory layouts of images that forge's passes choose, and of the gradients that a caller sees."""

from collections.abc import Callable

import torch

from forge import prims
from forge.ir import Symbol, TensorProxy, get_grad, put_grad, register_grad
from forge.torchlang.shape import contiguous


def in_channels_last(x: TensorProxy) -> TensorProxy:
    """Return an image with its channels adjacent in memory."""
    return contiguous(x, memory_format=torch.channels_last)


def _in_rows(x: TensorProxy) -> TensorProxy:
    return contiguous(x, memory_format=torch.contiguous_format)


def _with_gradient(
    name: str, body: Callable[[TensorProxy], TensorProxy], lay_out: Callable[[TensorProxy], TensorProxy]
) -> Symbol:
    """Return an operation whose gradient is laid out again."""
    symbol = Symbol(name, f"forge.{name}", body=body)

    @register_grad(symbol)
    def rule(x: TensorProxy) -> TensorProxy:
        out = symbol(x)
        put_grad(x, lay_out(get_grad(out)))
        return out

    return symbol


# on inputs of a program: eager gives their gradients this layout
channels_last_input = _with_gradient("channels_last_input", in_channels_last, _in_rows)
alias_of_input = _with_gradient("alias_of_input", prims.alias, _in_rows)
# on results of a convolution: its backward would make a slow copy of a gradient in another layout
channels_last_result = _with_gradient("channels_last_result", prims.alias, in_channels_last)
