"""The recurrent layers by cuDNN, with the residuals of its backward as values of the program.

torch.lstm and its siblings are compositions. Where cuDNN takes a call, torch's autograd records one operator, whose
backward reads a buffer of all weights and the reserve, a buffer that the forward fills. Both operators are called here
with the arguments that torch passes, so that a program has no autograd graph and can be captured in CUDA graphs.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.backends.cudnn import CUDNN_TENSOR_DTYPES

from forge import prims
from forge.executors.executor import Declined, decline
from forge.executors.torchex.core import torchex
from forge.ir import BoundSymbol, Dim, Tag, TensorProxy, get_grad, needs_grad, put_grad
from forge.ir.bounded import BoundedDict
from forge.ir.strides import contiguous
from forge.prims.core import like
from forge.torch_internals.autograd import cudnn_rnn_reserve
from forge.torch_internals.dispatch import disable_current_modes
from forge.torch_internals.fake_tensors import FakeTensor
from forge.torch_internals.functions import torch_foreach_copy_
from forge.transforms.makers import innermost

aten = torch.ops.aten
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # cudnnRNNMode_t
_FUNCTIONS: dict[str, Callable] = {kind: getattr(torch, kind) for kind in _MODES}

Sizes = tuple[int, tuple[int, ...], int]
_UNKNOWN: Sizes = (0, (), 0)
_DEVICE = "cuda"  # tests replace the operators by CPU doubles
Proxies = Sequence[TensorProxy]


class Layers(NamedTuple):
    """The options of one call.

    Attributes:
        kind: A key of prims.recurrent.KINDS.
        weights: The number of weights of a layer in one direction.
        num_layers: The number of layers.
        is_batch_first: True for an input (N, steps, features).
        is_bidirectional: True for layers of two directions.
        sizes: The number of elements of the weight buffer, the offset of each weight in it, and the size of the
            reserve in bytes. cuDNN determines all of them.
    """

    kind: str
    weights: int
    num_layers: int
    is_batch_first: bool
    is_bidirectional: bool
    sizes: Sizes


def _arguments(layers: Layers, hx: torch.Tensor, cx: torch.Tensor | None = None) -> tuple[Any, ...]:
    """Return the arguments from `mode` to `dropout_state` that both operators take."""
    is_projected = cx is not None and cx.shape[2] != hx.shape[2]
    hidden, projected = (cx.shape[2], hx.shape[2]) if cx is not None and is_projected else (hx.shape[2], 0)
    how: tuple[Any, ...] = (layers.num_layers, layers.is_batch_first, 0.0, True, layers.is_bidirectional, [], None)
    return _MODES[layers.kind], hidden, projected, *how


def _weight_buffer(params: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
    """Return the buffer of all weights: the storage from nn.RNNBase.flatten_parameters if there is one, else a copy.

    Source: try_get_weight_buf (aten/src/ATen/native/cudnn/RNN.cpp).
    """
    count, places, _ = sizes
    first = params[0]
    storage = first.untyped_storage()
    is_flat = storage.nbytes() >= count * first.element_size() and all(
        each.untyped_storage().data_ptr() == storage.data_ptr()
        and each.storage_offset() == place
        and each.is_contiguous()
        for each, place in zip(params, places, strict=True)
    )
    if is_flat:
        return first.as_strided((count,), (1,), 0)
    return _flatten(params, sizes)


def _flatten(params: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
    """Copy all weights to a new buffer; absent biases are zeros."""
    count, places, _ = sizes
    buffer = params[0].new_zeros(count)
    if isinstance(buffer, FakeTensor):
        return buffer
    pairs = zip(params, places, strict=True)
    views = [buffer.as_strided(each.shape, contiguous(each.shape), place) for each, place in pairs]
    torch_foreach_copy_(views, list(params))
    return buffer


def _as_laid_out(layers: Layers, x: torch.Tensor) -> torch.Tensor:
    """Return a sequence in cuDNN's memory format, in which the steps are the outermost dim."""
    if not layers.is_batch_first:
        return x.contiguous()
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _cudnn_rnn(
    input: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    params: Sequence[torch.Tensor],
    flat: torch.Tensor | None,
    layers: tuple,
) -> tuple[torch.Tensor | None, ...]:
    """Return (out, hy, cy or None, reserve). flat: the buffer of all weights, if it exists already."""
    layers = Layers(*layers)
    if isinstance(input, FakeTensor):
        out = input.new_empty(_output_shape(layers, input.shape, hx.shape[2]))
        reserve = input.new_empty((layers.sizes[2],), dtype=torch.uint8)
        return (_as_laid_out(layers, out), *_empty_like(hx, cx), reserve)
    flat = _weight_buffer(params, layers.sizes) if flat is None else flat
    hx, cx = hx.contiguous(), None if cx is None else cx.contiguous()
    how = _arguments(layers, hx, cx)
    out, hy, cy, reserve, _ = aten._cudnn_rnn(input, list(params), layers.weights, flat, hx, cx, *how)
    return out, hy, None if cx is None else cy, reserve


def _cudnn_rnn_backward(
    gradients: Sequence[torch.Tensor],
    input: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    params: Sequence[torch.Tensor],
    flat: torch.Tensor | None,
    out: torch.Tensor,
    reserve: torch.Tensor,
    layers: tuple,
    output_mask: tuple[bool, ...],
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of input, hx, cx and each weight, None where output_mask is False."""
    layers = Layers(*layers)
    results: tuple[torch.Tensor | None, ...]
    if isinstance(input, FakeTensor):
        results = (_as_laid_out(layers, input.new_empty(input.shape)), *_empty_like(hx, cx, *params))
    else:
        hx, cx = hx.contiguous(), None if cx is None else cx.contiguous()
        of_out, of_hy, *of_cy = gradients
        dx, dhx, dcx, of_params = aten._cudnn_rnn_backward(
            input,
            list(params),
            layers.weights,
            _weight_buffer(params, layers.sizes) if flat is None else flat,
            hx,
            cx,
            _as_laid_out(layers, out),
            of_out,
            of_hy,
            of_cy[0] if of_cy else None,
            *_arguments(layers, hx, cx),
            reserve.clone(),  # the kernel overwrites it, and the backward may run again
            (output_mask[0], output_mask[1], output_mask[2], any(output_mask[3:])),
        )
        results = (dx, dhx, dcx, *(of_params or [None] * len(params)))
    return tuple(each if requires_grad else None for each, requires_grad in zip(results, output_mask, strict=True))


def _empty_like(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [each if each is None else each.new_empty(each.shape) for each in tensors]


def _output_shape(layers: Layers, shape: Sequence[Dim], width: Dim) -> tuple[Dim, ...]:
    return (*shape[:2], width * (2 if layers.is_bidirectional else 1))


def _cudnn_rnn_meta(
    input: TensorProxy,
    hx: TensorProxy,
    cx: TensorProxy | None,
    params: Proxies,
    flat: TensorProxy | None,
    layers: tuple,
) -> tuple:
    out = like(input, shape=_output_shape(Layers(*layers), input.shape, hx.shape[2]))
    reserve = like(input, shape=(Layers(*layers).sizes[2],), dtype=torch.uint8)
    return out, like(hx), None if cx is None else like(cx), reserve


def _cudnn_rnn_backward_meta(
    gradients: Proxies,
    input: TensorProxy,
    hx: TensorProxy,
    cx: TensorProxy | None,
    params: Proxies,
    flat: TensorProxy | None,
    out: TensorProxy,
    reserve: TensorProxy,
    layers: tuple,
    output_mask: tuple[bool, ...],
) -> tuple[TensorProxy | None, ...]:
    inputs = (input, hx, cx, *params)
    return tuple(
        like(x) if requires_grad and x is not None else None
        for x, requires_grad in zip(inputs, output_mask, strict=True)
    )


# Excluded from fusion: on fake tensors the operators only allocate, and a fusion executor would compile just that.
cudnn_rnn_weights = torchex.register_operator(
    "cudnn_rnn_weights",
    meta=lambda params, sizes: like(params[0], shape=(sizes[0],)),
    fn=_flatten,
    tags=(Tag.NO_FUSE,),
)
cudnn_rnn = torchex.register_operator("cudnn_rnn", meta=_cudnn_rnn_meta, fn=_cudnn_rnn, tags=(Tag.NO_FUSE,))
cudnn_rnn_backward = torchex.register_operator(
    "cudnn_rnn_backward", meta=_cudnn_rnn_backward_meta, fn=_cudnn_rnn_backward, tags=(Tag.NO_FUSE,)
)


def steps(bound: BoundSymbol) -> int:
    """Return the number of kernel launches of a call: one per step of each recurrent layer, one per layer if the number
    of steps is symbolic, one for other calls."""
    if bound.symbol in (cudnn_rnn, cudnn_rnn_backward):
        is_forward = bound.symbol is cudnn_rnn
        input, layers = bound.args[0 if is_forward else 1], Layers(*bound.args[5 if is_forward else 8])
        lengths = [input.shape[1 if layers.is_batch_first else 0]]
        lengths *= layers.num_layers * (2 if layers.is_bidirectional else 1)
    else:
        lengths = [call.args[2][0].shape[0] for call in innermost(bound) if call.symbol is prims.recurrent_layer]
    return sum(length if isinstance(length, int) else 1 for length in lengths) or 1


# torch's kernel selection and cuDNN's sizes

_measured = BoundedDict(256)


def _sizes(kind: str, arguments: dict[str, Any], states: Proxies) -> Sizes | None:
    """Return the sizes of cuDNN's buffers for a call, or None if torch selects other kernels."""
    input, params = arguments["input"], arguments["params"]
    how = (
        arguments["has_biases"],
        arguments["num_layers"],
        0.0,
        True,
        arguments["bidirectional"],
        arguments["batch_first"],
    )
    shapes = tuple(tuple(each.shape) for each in (input, *states, *params))
    if not torch.backends.cudnn.enabled:
        return None
    key = (kind, how, shapes, len(states), input.dtype, input.device)
    if key not in _measured:
        _measured[key] = (_measure(kind, input, states, params, how),)
    return _measured[key][0]


def _measure(kind: str, input: TensorProxy, states: Proxies, params: Proxies, how: tuple) -> Sizes | None:
    """Run a call on zeros and inspect the residuals of torch's autograd. torch has no other query of cuDNN's sizes."""
    has_biases, count, _, _, is_bidirectional, is_batch_first = how
    layers = Layers(kind, _weights_of_a_layer(has_biases, states), count, is_batch_first, is_bidirectional, _UNKNOWN)
    with disable_current_modes(), torch.inference_mode(False):
        x, *zeros = [torch.zeros(each.shape, dtype=each.dtype, device=each.device) for each in (input, *states)]
        weights = [torch.zeros(each.shape, dtype=each.dtype, device=each.device) for each in params]
        mode, *widths, _, _, _, _, _, _, _ = _arguments(layers, *zeros)
        with torch.no_grad():
            order = (count, is_batch_first, is_bidirectional)
            flat = aten._cudnn_rnn_flatten_weight(weights, layers.weights, x.shape[2], mode, *widths, *order)
        with torch.enable_grad():
            state = tuple(zeros) if len(zeros) > 1 else zeros[0]
            node = _FUNCTIONS[kind](x.requires_grad_(), state, weights, *how)[0].grad_fn
        reserve = cudnn_rnn_reserve(node)
        if reserve is None:
            return None
        return flat.numel(), tuple(int(each.storage_offset()) for each in weights), reserve.numel()


def _weights_of_a_layer(has_biases: bool, states: Sequence[Any]) -> int:
    """Return the number of weights of a layer in one direction; a projection adds one."""
    is_projected = len(states) > 1 and states[0].shape[2] != states[1].shape[2]
    return (4 if has_biases else 2) + is_projected


def takes(kind: str, arguments: dict[str, Any]) -> Layers | Declined:
    """Return the options of a call that cuDNN's pair of operators takes, else the reason for the decline."""
    hx = arguments["hx"]
    states = [hx] if isinstance(hx, TensorProxy) else list(hx)
    tensors = (arguments["input"], *states, *arguments["params"])
    if arguments["input"].device.type != _DEVICE:
        return decline("cuDNN runs on a GPU alone")
    if not arguments["train"]:
        return decline("in eval mode cuDNN has no backward")
    if arguments["dropout"]:
        return decline("cuDNN draws the dropout between layers from a state of its own")
    if not all(isinstance(size, int) for each in tensors for size in each.shape):
        return decline("its sizes are symbolic")
    if len({(each.dtype, each.device) for each in tensors}) > 1:
        return decline("its tensors have several dtypes or devices")
    try:
        sizes = _sizes(kind, arguments, states)
    except RuntimeError as error:  # from cuDNN, or out of memory
        return decline(f"cuDNN does not take it: {error}")
    if sizes is None:
        return decline("torch does not take cuDNN for it")
    count = _weights_of_a_layer(arguments["has_biases"], states)
    return Layers(kind, count, arguments["num_layers"], arguments["batch_first"], arguments["bidirectional"], sizes)


def cudnn_grad(layers: Layers, arguments: dict[str, Any]) -> tuple[TensorProxy, ...]:
    """Compute the layers, and their gradients by cuDNN's backward."""
    input, params = arguments["input"], tuple(arguments["params"])
    hx, cx = (arguments["hx"], None) if isinstance(arguments["hx"], TensorProxy) else arguments["hx"]
    # torch.nn flattens only weights of these dtypes; others are copied into the buffer once
    flat = None if input.dtype in CUDNN_TENSOR_DTYPES else cudnn_rnn_weights(params, layers.sizes)
    out, hy, cy, reserve = cudnn_rnn(input, hx, cx, params, flat, tuple(layers))
    results = (out, hy) if cy is None else (out, hy, cy)
    inputs = (input, hx, cx, *params)
    output_mask = tuple(needs_grad(each) for each in inputs)
    incoming = tuple(get_grad(each) for each in results)
    gradients = cudnn_rnn_backward(incoming, input, hx, cx, params, flat, out, reserve, tuple(layers), output_mask)
    for argument, gradient in zip(inputs, gradients, strict=True):
        put_grad(argument, gradient)
    return results
