"""The native operators behind the normalizations, which also return the statistics.

Gradients flow through the statistics of native_group_norm only, as in torch.
"""

from collections.abc import Sequence
from typing import Any

import torch

from forge import clang, prims
from forge.ir import Dim, Symbol, TensorProxy, check
from forge.ir.memory import Memory
from forge.prims.core import statically_true, torch_check
from forge.torch_internals.functions import torch_native_batch_norm_legit
from forge.torchlang.core import torchsymbol, write
from forge.torchlang.nn.norm import (
    batch_norm,
    blend,
    check_channels,
    check_normalized,
    per_channel,
    scale_and_shift,
    standardize,
)

aten = torch.ops.aten

Parameter = TensorProxy | None
Triple = tuple[TensorProxy, TensorProxy, TensorProxy]


def statistics_dtype(x: TensorProxy, *parameters: Parameter) -> torch.dtype:
    """Return the dtype of a norm's statistics: wider than half precision on a GPU, and on a CPU if the parameters have
    another dtype than x. torch's kernels for fake tensors differ."""
    narrow = x.device.type == "cpu" and all(each is None or each.dtype == x.dtype for each in parameters)
    return x.dtype if narrow else clang.wider(x.dtype)


def _statistic(value: TensorProxy, shape: Sequence[Dim], dtype: torch.dtype) -> TensorProxy:
    return prims.detach(clang.convert(clang.reshape(value, tuple(shape)), dtype))


@torchsymbol(torch.native_layer_norm, aten.native_layer_norm.default)
def native_layer_norm(
    input: TensorProxy, normalized_shape: Sequence[Dim], weight: Parameter, bias: Parameter, eps: float
) -> Triple:
    """Return (layer_norm, mean, 1 / sqrt(variance + eps)); the last two have length 1 in the dims that layer_norm
    reduces."""
    check_normalized("native_layer_norm", input, normalized_shape, weight=weight, bias=bias)
    first = input.ndim - len(normalized_shape)
    out, mean, _, rstd = standardize(input, tuple(range(first, input.ndim)), eps)
    shape = (*input.shape[:first], *[1] * len(normalized_shape))
    dtype = statistics_dtype(input, weight, bias)
    out = scale_and_shift(out, weight, bias, input.dtype)
    return out, _statistic(mean, shape, dtype), _statistic(rstd, shape, dtype)


@torchsymbol(torch.native_group_norm, aten.native_group_norm.default)
def native_group_norm(
    input: TensorProxy, weight: Parameter, bias: Parameter, N: Dim, C: Dim, HxW: Dim, group: int, eps: float
) -> Triple:
    """Return (group_norm, mean, 1 / sqrt(variance + eps)) of N * C channels of HxW numbers; the last two are (N,
    group)."""
    op = "native_group_norm"
    torch_check(
        not statically_true(input.numel() != N * C * HxW),
        lambda: f"{op}: expected input to have {N} * {C} * {HxW} elements, but got {input}",
    )
    torch_check(
        group > 0 and not statically_true(C % group != 0),
        lambda: f"{op}: Expected number of channels {C} to be divisible by the number of groups {group}",
    )
    channels = clang.reshape(input, (N, C, HxW))
    check_channels(op, channels, weight=weight, bias=bias)
    x = clang.reshape(clang.convert(channels, clang.wider(input.dtype)), (N, group, (C // group) * HxW))
    mean = clang.mean(x, 2, True)
    distance = x - mean
    rstd = clang.rsqrt(clang.mean(distance * distance, 2, True) + eps)
    out = clang.reshape(distance * rstd, channels.shape)
    out = scale_and_shift(out, per_channel(weight, 3), per_channel(bias, 3), input.dtype)
    dtype = clang.wider(input.dtype) if weight is not None and weight.dtype != input.dtype else input.dtype
    mean, rstd = (clang.convert(clang.reshape(each, (N, group)), dtype) for each in (mean, rstd))
    return clang.reshape(out, input.shape), mean, rstd


# batches


def _handle(symbol: Symbol, args: tuple, kwargs: dict, memory: Memory) -> tuple:
    """Update the running statistics in place in training."""
    arguments = symbol.bind(args, kwargs)
    if not arguments.pop("training", True):
        return symbol(*memory.read_all(args), **memory.read_all(kwargs))
    out, mean, rstd, *new = batch_norm_with_update(*memory.read_all(tuple(arguments.values())))
    for name, value in zip(("running_mean", "running_var"), new, strict=True):
        if value is not None:
            write(arguments[name], value, memory, symbol.name)
    return out, mean, rstd


def _handle_update(symbol: Symbol, args: tuple, kwargs: dict, memory: Memory) -> tuple:
    """Return the results and cuDNN's reserve tensor for the backward (empty on CPUs); update the running statistics."""
    results = _handle(symbol, args, kwargs, memory)
    device = results[0].device
    check(
        device.type == "cpu",
        lambda: f"{symbol.name}: what cuDNN keeps is not known; see forge/torchlang/nn/native_norms.py",
        NotImplementedError,
    )
    return *results, prims.full((0,), 0, torch.uint8, device)


@torchsymbol(aten._batch_norm_with_update.default, handler=_handle_update)
def batch_norm_with_update(
    input: TensorProxy,
    weight: Parameter,
    bias: Parameter,
    running_mean: Parameter,
    running_var: Parameter,
    momentum: float,
    eps: float,
) -> tuple[TensorProxy, TensorProxy, TensorProxy, Parameter, Parameter]:
    """Return (batch_norm in training, mean, 1 / sqrt(variance + eps), new running mean, new running variance).

    This is a pure function: its handler writes the running statistics.
    """
    parameters = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
    check_channels("native_batch_norm", input, **parameters)
    dims = (0, *range(2, input.ndim))
    out, mean, variance, rstd = standardize(input, dims, eps)
    out = scale_and_shift(out, per_channel(weight, input.ndim), per_channel(bias, input.ndim), input.dtype)
    count = clang.count(input, dims)
    unbiased = variance if statically_true(count == 1) else variance * count / (count - 1)
    dtype = statistics_dtype(input, *parameters.values())
    mean_of_batch, rstd = [_statistic(each, (input.shape[1],), dtype) for each in (mean, rstd)]
    new_mean, new_var = blend(running_mean, mean, momentum), blend(running_var, unbiased, momentum)
    return out, mean_of_batch, rstd, new_mean, new_var


@torchsymbol(torch.native_batch_norm, aten.native_batch_norm.default, handler=_handle)
def native_batch_norm(
    input: TensorProxy,
    weight: Parameter,
    bias: Parameter,
    running_mean: Parameter,
    running_var: Parameter,
    training: bool,
    momentum: float,
    eps: float,
) -> Triple:
    """Return (batch_norm, mean, 1 / sqrt(variance + eps)). The last two are the batch's in training; in evaluation,
    they are empty on a CPU and those of the running statistics on a GPU."""
    if training:
        return batch_norm_with_update(input, weight, bias, running_mean, running_var, momentum, eps)[:3]
    out = batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    dtype = statistics_dtype(input, weight, bias, running_mean, running_var)
    if input.device.type == "cpu":
        mean, invstd = (prims.full((0,), 0, dtype, input.device) for _ in range(2))
        return out, mean, invstd
    assert running_mean is not None and running_var is not None  # checked by batch_norm
    shape = (input.shape[1],)
    rstd = clang.rsqrt(clang.convert(running_var, dtype) + eps)
    return out, _statistic(running_mean, shape, dtype), _statistic(rstd, shape, dtype)


def _legit_arguments(
    input: TensorProxy,
    weight: Parameter,
    bias: Parameter,
    running_mean: Any = None,
    running_var: Any = None,
    training: Any = None,
    momentum: float | None = None,
    eps: float | None = None,
) -> dict:
    """Return the arguments by name, for a call of torch's function with or without running statistics."""
    if not isinstance(running_mean, TensorProxy):
        numbers = [each for each in (running_mean, running_var, training, momentum, eps) if each is not None]
        running_mean, running_var, (training, momentum, eps) = None, None, numbers
    parameters = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
    return {"input": input, **parameters, "training": training, "momentum": momentum, "eps": eps}


def _handle_legit(symbol: Symbol, args: tuple, kwargs: dict, memory: Memory) -> tuple:
    return _handle(symbol, (), _legit_arguments(*args, **kwargs), memory)


native_batch_norm_legit = torchsymbol(
    torch_native_batch_norm_legit, aten._native_batch_norm_legit.default, handler=_handle_legit
)(native_batch_norm.definition)


@torchsymbol(aten._native_batch_norm_legit.no_stats)
def native_batch_norm_no_stats(
    input: TensorProxy, weight: Parameter, bias: Parameter, training: bool, momentum: float, eps: float
) -> Triple:
    """Return native_batch_norm without running statistics."""
    return native_batch_norm.definition(input, weight, bias, None, None, training, momentum, eps)
