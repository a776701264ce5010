"""The torch executor's recurrent layers: eager's functions, whose autograd graph is kept for the backward."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch

from forge import prims, torchlang
from forge.executors.executor import Decision, Declined, decline
from forge.executors.torchex import cudnn_rnn
from forge.executors.torchex.core import run_prim, run_torchlang, torch_prims, torchex
from forge.ir import BoundSymbol, Symbol, Tag, current_trace
from forge.prims.recurrent import input_count
from forge.torchlang import torch_function_of
from forge.torchlang.opaque import keep_graph, run_opaque_forward, track

Tensors = Sequence[torch.Tensor | None]
LayerInputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, *tuple[torch.Tensor | None, ...]]

_FUNCTIONS: dict[str, Callable] = {
    "lstm": torch.lstm,
    "gru": torch.gru,
    "rnn_tanh": torch.rnn_tanh,
    "rnn_relu": torch.rnn_relu,
}


def recurrent_layer(kind: str, reverse: bool, inputs: LayerInputs) -> tuple[torch.Tensor | None, ...]:
    """Call torch's function for one layer; cuDNN differentiates only calls that ran in training mode."""
    x, h, c, *weights = inputs
    params = [each for each in weights if each is not None]
    has_biases, h = weights[2] is not None, h.unsqueeze(0)
    state = h if c is None else (h, c.unsqueeze(0))
    x = x.flip(0) if reverse else x
    out, *last = _FUNCTIONS[kind](x, state, params, has_biases, 1, 0.0, torch.is_grad_enabled(), False, False)
    h, c = (last[0], None) if c is None else last
    return out.flip(0) if reverse else out, h.squeeze(0), c if c is None else c.squeeze(0)


@contextmanager
def _differentiable_kernels() -> Iterator[None]:
    """Make torch select kernels with a double backward inside the context."""
    with torch.backends.cudnn.flags(enabled=False), torch.backends.mkldnn.flags(enabled=False):
        yield


@run_prim(prims.recurrent_gradient)
def recurrent_gradient(order: int, kind: str, reverse: bool, inputs: Tensors) -> tuple[torch.Tensor | None, ...]:
    """Compute the gradients by torch's autograd; the layer runs again."""
    count, again = input_count(order - 1), torch.is_grad_enabled()
    with torch.enable_grad(), _differentiable_kernels() if again or order > 1 else nullcontext():
        leaves = [each if each is None else track(each) for each in inputs[:count]]
        if order == 1:
            results = recurrent_layer(kind, reverse, cast(LayerInputs, leaves))
        else:
            results = recurrent_gradient(order - 1, kind, reverse, leaves)
        pairs = [(out, g) for out, g in zip(results, inputs[count:], strict=True) if out is not None]
        outputs, incoming = zip(*[(out, g) for out, g in pairs if out.requires_grad], strict=True)
        targets = [each for each in leaves if each is not None]
        gradients = iter(
            torch.autograd.grad(
                outputs, targets, incoming, create_graph=again, allow_unused=True, materialize_grads=True
            )
        )
    return tuple(each if each is None else next(gradients) for each in leaves)


def _layer_grad(kind: str, reverse: bool, inputs: tuple) -> tuple:
    with current_trace().collecting():
        output = prims.recurrent_layer(kind, reverse, inputs)
    keep_graph(recurrent_layer, (kind, reverse, inputs), {}, output)
    return output


torchex.register_implementation(prims.recurrent_layer, recurrent_layer, grad_transform=_layer_grad)
torch_prims.register_implementation(prims.recurrent_layer, recurrent_layer)


def _whole(symbol: Symbol) -> tuple[Callable, Callable]:
    """Return the checker of the calls that run as one torch function, and their gradient rule: cuDNN's operator where
    torch selects cuDNN, else torch's autograd.

    With dropout between layers each layer runs separately, so that the random masks are values of the program; except
    on a GPU, where cuDNN draws other numbers.
    """

    def checker(*args: Any, **kwargs: Any) -> Decision:
        arguments = symbol.bind(args, kwargs)
        if (
            arguments["dropout"]
            and arguments["train"]
            and arguments["num_layers"] > 1
            and not arguments["input"].is_cuda
        ):
            return decline("the layers run one by one, with dropout between them")
        return True

    def rule(*args: Any, **kwargs: Any) -> tuple:
        arguments = symbol.bind(args, kwargs)
        layers = cudnn_rnn.takes(symbol.name, arguments)
        if not isinstance(layers, Declined):
            return cudnn_rnn.cudnn_grad(layers, arguments)
        with current_trace().collecting():
            output = symbol(*args, **kwargs)
        keep_graph(torch_function_of(symbol), args, kwargs, output)
        return output

    return checker, rule


_LAYERS = {each.name: each for each in (torchlang.lstm, torchlang.gru, torchlang.rnn_tanh, torchlang.rnn_relu)}
for _symbol in _LAYERS.values():
    _checker, _rule = _whole(_symbol)
    run_torchlang(_symbol, checker=_checker, grad_transform=_rule)


def why_not_recorded(bound: BoundSymbol) -> str | None:
    """Return why a call of recurrent layers must not be captured in a CUDA graph; None for other calls."""
    if bound.symbol.op is run_opaque_forward and bound.args[0] in _FUNCTIONS.values():
        function, args, kwargs, *_ = bound.args
        decision = cudnn_rnn.takes(function.__name__, _LAYERS[function.__name__].bind(args, kwargs))
        return decision.reason if isinstance(decision, Declined) else None
    if bound.symbol.op in _FUNCTIONS.values() and Tag.RANDOM in bound.all_tags:
        return "cuDNN draws the dropout between layers from a state of its own"
    return None
