"""Convolutions in channels-last memory format.

    conv2d(x, weight, ...) = conv2d(x.contiguous(memory_format=channels_last), weight.contiguous(...), ...)

cuDNN computes half-precision convolutions in this format, and oneDNN all: they convert images of another layout before
each convolution, and its result after it. Later calls preserve the layout of their inputs, so that few conversions
remain. The caller's results have eager's strides.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from forge import clang, torchlang
from forge.ir import BoundSymbol, TensorProxy, Trace, recording
from forge.ir.proxies import hint_of
from forge.ir.symbol import substitute
from forge.prims.core import statically_true
from forge.torchlang.channels_last import alias_of_input, channels_last_input, channels_last_result, in_channels_last
from forge.transforms.grad import active_names
from forge.transforms.replacement import record_as
from forge.transforms.result_strides import StandIns, Strides, asks_for_strides, results_to_restore

CONVOLUTIONS = frozenset({torchlang.conv2d, torchlang.conv_transpose2d})
_IN_ONEDNN = frozenset({torch.float32, torch.bfloat16, torch.float16})
# whose sums over rows of an image read one channel of each element: loops of a CPU take three times as long
_NORMS_OF_ROWS = frozenset(
    {torchlang.group_norm, torchlang.torch_group_norm, torchlang.instance_norm, torchlang.torch_instance_norm}
)
_FEWEST_CHANNELS = 32  # the fewest for which a convolution uses tensor cores well


def channels_last(
    trace: Trace,
    strides: Callable[[Trace], Strides],
    in_torch: Callable[[BoundSymbol], bool] = lambda bound: True,
    device: str | None = None,
) -> Trace:
    """Return the trace with its two-dimensional convolutions in torch.channels_last, if that pays: on a GPU, most of
    them have many channels, and none has groups of several channels; on a CPU, their images are larger than the weights
    whose layout changes at each call, and no norm sums over rows of an image.

    strides: torch's strides of the values of a trace, by name. in_torch: whether a call runs as torch runs it: if the
    user selected another kernel for one, or one may depend on strides, the trace is unchanged. device: the device type
    whose rule decides, by default that of all tensors.
    """
    convolutions = [bound for bound in trace.bound_symbols if bound.symbol in CONVOLUTIONS]
    if not convolutions or not _pays(trace, convolutions, device) or not all(map(in_torch, convolutions)):
        return trace
    if asks_for_strides(trace):
        return trace
    restored = results_to_restore(trace, lambda bound: bound.symbol in CONVOLUTIONS, strides)
    return trace if restored is None else _rewrite(trace, restored)


def _pays(trace: Trace, convolutions: list[BoundSymbol], device: str | None) -> bool:
    calls = [bound.symbol.bind(bound.args, bound.kwargs) for bound in convolutions]
    devices = {call["input"].device.type for call in calls}
    if len(devices) > 1 or any(call["input"].ndim != 4 for call in calls):
        return False
    device = device or devices.pop()
    if device == "cuda":
        return _pays_in_cudnn(calls)
    if device != "cpu" or any(map(_sums_rows, trace.bound_symbols)):
        return False
    return _pays_in_onednn(calls, [bound.output for bound in convolutions])


def _sums_rows(bound: BoundSymbol) -> bool:
    """Return whether a call is a norm whose statistics are sums over rows of an image."""
    if bound.symbol in (torchlang.layer_norm, torchlang.torch_layer_norm):
        return len(bound.symbol.bind(bound.args, bound.kwargs)["normalized_shape"]) > 2
    return bound.symbol in _NORMS_OF_ROWS


def _pays_in_cudnn(calls: list[dict[str, Any]]) -> bool:
    wide = 0
    for call in calls:
        x, weight = call["input"], call["weight"]
        if x.dtype not in (torch.float16, torch.bfloat16):
            return False
        if call["groups"] == 1:
            channels = weight.shape[:2]
        elif statically_true(weight.shape[0] == call["groups"]) and statically_true(weight.shape[1] == 1):
            channels = weight.shape[:1]  # cuDNN's depthwise kernels read channels-last
        else:
            return False
        wide += all(statically_true(each >= _FEWEST_CHANNELS) for each in channels)
    return 2 * wide > len(calls)


def _pays_in_onednn(calls: list[dict[str, Any]], outputs: list[TensorProxy]) -> bool:
    if not torch.backends.mkldnn.is_available() or any(call["input"].dtype not in _IN_ONEDNN for call in calls):
        return False
    weights = [call["weight"] for call in calls if math.prod(call["weight"].shape[2:]) > 1]  # others are in both
    images = [call["input"] for call in calls] + outputs
    return _elements(weights) <= _elements(images)


def _elements(tensors: Iterable[TensorProxy]) -> int:
    return sum(math.prod(map(hint_of, each.shape)) for each in tensors)


def _rewrite(trace: Trace, restored: Mapping[str, TensorProxy]) -> Trace:
    """Rewrite a call; a result that the caller sees keeps its name."""
    new = trace.derive("channels_last")
    images, active = StandIns(new, restored), active_names(trace)
    with recording(new, clang.language):
        inputs = {x.name: alias_of_input(x) for x in _indirect_inputs(trace)}
        for bound in trace.bound_symbols:
            call = images.substitute(substitute(bound, inputs))
            if bound.symbol in CONVOLUTIONS:
                _convert(new, call, flows=not active.isdisjoint(bound.outputs))
            else:
                new.record(call)
        images.restore()
    return new


def _indirect_inputs(trace: Trace) -> list[TensorProxy]:
    """Return the inputs whose gradient flows from convolutions through other calls."""
    read: set[str] = set()  # by convolutions, and by others whose results reach one
    through: set[str] = set()
    for bound in reversed(trace.bound_symbols):
        if bound.symbol in CONVOLUTIONS:
            read.update(bound.inputs)
        elif not read.isdisjoint(bound.outputs):
            read.update(bound.inputs)
            through.update(bound.inputs)
    return [x for x in trace.differentiable_inputs if x.ndim > 2 and x.name in through]


def _convert(new: Trace, bound: BoundSymbol, *, flows: bool) -> None:
    """Record the call on images, and their layout conversions before it; the gradient of its result, if one flows, is
    converted likewise."""
    arguments, inputs = bound.symbol.bind(bound.args, bound.kwargs), set(new.input_names)
    with new.set_tags(bound.tags, bound.source):
        images = {
            x.name: channels_last_input(x) if x.name in inputs else in_channels_last(x)
            for x in (arguments["input"], arguments["weight"])
        }
        out = bound.output
        result = new.tensor(out.shape, out.dtype, out.device) if flows else out
        new.record(substitute(bound, {**images, out.name: result}))
        if flows:
            record_as(new, out, partial(channels_last_result, result))
