"""The torch executor's norm family: eager's forward kernels, which return statistics, and the backward kernels that
read them."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from forge import clang, torchlang
from forge.executors.torchex.core import run_torchlang, torchex
from forge.ir import BoundSymbol, Dim, Symbol, TensorProxy, get_grad, needs_grad, put_grad
from forge.prims.core import like, statically_true
from forge.torch_internals.tensors import suggest_memory_format
from forge.torchlang.nn.norm import batch_norm_train, per_channel, rms_norm_grad, scale_and_shift
from forge.transforms.rematerialize import register_parted

aten = torch.ops.aten

Parameter = TensorProxy | None
Pair = tuple[torch.Tensor | None, torch.Tensor | None]


def put_all(arguments: Sequence[Parameter], gradients: Sequence[Parameter]) -> None:
    """Put the gradient of each argument."""
    for argument, gradient in zip(arguments, gradients, strict=True):
        put_grad(argument, gradient)


def _gradient_mask(*arguments: Parameter) -> tuple[bool, ...]:
    return tuple(needs_grad(argument) for argument in arguments)


def _like_some(mask: Sequence[bool], *of: Parameter) -> tuple:
    return tuple(
        like(value) if requires_grad and value is not None else None
        for value, requires_grad in zip(of, mask, strict=True)
    )


# layer_norm


def _native_layer_norm_meta(
    x: TensorProxy, shape: Sequence[Dim], weight: Parameter, bias: Parameter, eps: float
) -> tuple[TensorProxy, TensorProxy, TensorProxy]:
    """Return the metadata of (out, mean, rstd)."""
    statistics = [*x.shape[: x.ndim - len(shape)], *[1] * len(shape)]
    dtype = torchlang.statistics_dtype(x, weight, bias)
    return like(x), like(x, shape=statistics, dtype=dtype), like(x, shape=statistics, dtype=dtype)


native_layer_norm = torchex.register_operator(
    "native_layer_norm", meta=_native_layer_norm_meta, fn=aten.native_layer_norm.default
)
native_layer_norm_backward = torchex.register_operator(
    "native_layer_norm_backward",
    meta=lambda g, x, shape, mean, rstd, weight, bias, mask: _like_some(mask, x, weight, bias),
    fn=aten.native_layer_norm_backward.default,
)


def _layer_norm_grad(
    input: TensorProxy,
    normalized_shape: Sequence[Dim],
    weight: Parameter = None,
    bias: Parameter = None,
    eps: float = 1e-5,
) -> TensorProxy:
    out, mean, rstd = native_layer_norm(input, normalized_shape, weight, bias, eps)
    mask = _gradient_mask(input, weight, bias)
    gradients = native_layer_norm_backward(get_grad(out), input, normalized_shape, mean, rstd, weight, bias, mask)
    put_all((input, weight, bias), gradients)
    return out


run_torchlang(torchlang.layer_norm, grad_transform=_layer_norm_grad)


# rms_norm: torch has its backward kernel only for GPUs and real dtypes


def _fused_rms_norm_meta(
    x: TensorProxy, shape: Sequence[Dim], weight: Parameter, eps: float | None
) -> tuple[TensorProxy, TensorProxy]:
    """Return the metadata of (out, rstd)."""
    return like(x), like(x, shape=[*x.shape[: x.ndim - len(shape)], *[1] * len(shape)], dtype=clang.wider(x.dtype))


fused_rms_norm = torchex.register_operator("fused_rms_norm", meta=_fused_rms_norm_meta, fn=aten._fused_rms_norm.default)
fused_rms_norm_backward = torchex.register_operator(
    "fused_rms_norm_backward",
    meta=lambda g, x, shape, rstd, weight, mask: _like_some(mask, x, weight),
    fn=aten._fused_rms_norm_backward.default,
)


def _rms_norm_grad(
    input: TensorProxy, normalized_shape: Sequence[Dim], weight: Parameter = None, eps: float | None = None
) -> TensorProxy:
    mixed = weight is not None and weight.dtype != input.dtype
    if not input.is_cuda or input.dtype.is_complex or mixed:
        return rms_norm_grad(input, normalized_shape, weight, eps)
    out, rstd = fused_rms_norm(input, normalized_shape, weight, eps)
    mask = _gradient_mask(input, weight)
    gradients = fused_rms_norm_backward(get_grad(out), input, normalized_shape, rstd, weight, mask)
    put_all((input, weight), gradients)
    return out


run_torchlang(torchlang.rms_norm, grad_transform=_rms_norm_grad)


# group_norm


def _native_group_norm_meta(
    x: TensorProxy, weight: Parameter, bias: Parameter, groups: int, eps: float
) -> tuple[TensorProxy, TensorProxy, TensorProxy]:
    """Return the metadata of (out, mean, rstd)."""
    dtype = clang.wider(x.dtype) if weight is not None and weight.dtype != x.dtype else x.dtype
    shape = (x.shape[0], groups)
    return like(x), like(x, shape=shape, dtype=dtype), like(x, shape=shape, dtype=dtype)


def _sizes(x: torch.Tensor) -> tuple[int, int, int]:
    batch, channels = x.shape[0], x.shape[1]
    return batch, channels, math.prod(x.shape[2:])  # torch.Size.numel specializes symbolic sizes


def _layout(x: torch.Tensor) -> torch.memory_format:
    """Return the memory format that torch.group_norm passes to the kernels, which require it: on a CPU the input's,
    inferred from its strides, including those of dims of size 1."""
    return torch.contiguous_format if x.is_cuda else suggest_memory_format(x)


def _group_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, groups: int, eps: float
) -> tuple[torch.Tensor, ...]:
    x = x.contiguous(memory_format=_layout(x))
    return aten.native_group_norm(x, weight, bias, *_sizes(x), groups, eps)


def _group_norm_backward(
    g: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    groups: int,
    mask: tuple[bool, ...],
) -> tuple[torch.Tensor, ...]:
    layout = _layout(x)
    g, x = g.contiguous(memory_format=layout), x.contiguous(memory_format=layout)
    return aten.native_group_norm_backward(g, x, mean, rstd, weight, *_sizes(x), groups, mask)


native_group_norm = torchex.register_operator("native_group_norm", meta=_native_group_norm_meta, fn=_group_norm)
native_group_norm_backward = torchex.register_operator(
    "native_group_norm_backward",
    meta=lambda g, x, mean, rstd, weight, bias, groups, mask: _like_some(mask, x, weight, bias),
    fn=_group_norm_backward,
)


def _group_norm_grad(
    input: TensorProxy, num_groups: int, weight: Parameter = None, bias: Parameter = None, eps: float = 1e-5
) -> TensorProxy:
    out, mean, rstd = native_group_norm(input, weight, bias, num_groups, eps)
    mask = _gradient_mask(input, weight, bias)
    gradients = native_group_norm_backward(get_grad(out), input, mean, rstd, weight, bias, num_groups, mask)
    put_all((input, weight, bias), gradients)
    return out


run_torchlang(torchlang.group_norm, grad_transform=_group_norm_grad)


def _normalize_groups(
    x: TensorProxy, mean: TensorProxy, rstd: TensorProxy, weight: Parameter, bias: Parameter
) -> TensorProxy:
    """Return (x - mean) * rstd * weight + bias, as Inductor computes a group norm; mean and rstd are (N, groups)."""
    batch, groups = mean.shape
    of_groups = (batch, groups, *[1] * (x.ndim - 1))
    grouped = clang.reshape(x, (batch, groups, x.shape[1] // groups, *x.shape[2:]))
    standardized = (grouped - clang.reshape(mean, of_groups)) * clang.reshape(rstd, of_groups)
    parameters = per_channel(weight, x.ndim), per_channel(bias, x.ndim)
    return scale_and_shift(clang.reshape(standardized, x.shape), *parameters, x.dtype)


normalize_groups = Symbol("group_norm_normalize", "torchex.group_norm_normalize", body=_normalize_groups)


def _normalized_groups(bound: BoundSymbol) -> TensorProxy | None:
    """Record the first result of a group norm as a function of its statistics, unless these are rounded."""
    x, weight, bias, *_ = bound.args
    _, mean, rstd = bound.output
    return normalize_groups(x, mean, rstd, weight, bias) if mean.dtype == clang.wider(x.dtype) else None


register_parted(native_group_norm, _normalized_groups)


# batch_norm


def _native_batch_norm_meta(
    x: TensorProxy,
    running_mean: Parameter,
    running_var: Parameter,
    weight: Parameter,
    bias: Parameter,
    momentum: float,
    eps: float,
) -> tuple[TensorProxy, Parameter, Parameter, TensorProxy, TensorProxy]:
    """Return the metadata of (out, new running mean, new running variance, mean, rstd of the batch)."""
    running = _like_some([value is not None for value in (running_mean, running_var)], running_mean, running_var)
    dtype = torchlang.statistics_dtype(x, weight, bias, running_mean, running_var)
    statistics = [like(x, shape=(x.shape[1],), dtype=dtype) for _ in range(2)]
    return like(x), *running, *statistics


def aten_batch_norm(
    x: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor | None, ...]:
    """Call the functional operator on a GPU, which can be fused with its consumers. Elsewhere torch's kernel updates
    running statistics in place, so it runs on clones."""
    if x.is_cuda and running_mean is not None and running_var is not None:
        out, mean, rstd, new_mean, new_var = aten._native_batch_norm_legit_functional(
            x, weight, bias, running_mean, running_var, True, momentum, eps
        )  # for fake tensors, and in code traced with them, the new statistics are wider than the kernel's
        return out, new_mean.to(running_mean.dtype), new_var.to(running_var.dtype), mean, rstd
    new_mean = None if running_mean is None else running_mean.clone()
    new_var = None if running_var is None else running_var.clone()
    out, mean, rstd = aten.native_batch_norm(x, weight, bias, new_mean, new_var, True, momentum, eps)
    return out, new_mean, new_var, mean, rstd


def _batch_norm_outputs(*args: Any) -> tuple[torch.Tensor | None, ...]:
    return aten_batch_norm(*args)[:3]


native_batch_norm = torchex.register_operator("native_batch_norm", meta=_native_batch_norm_meta, fn=aten_batch_norm)


def _normalize(x: TensorProxy, mean: TensorProxy, rstd: TensorProxy, weight: Parameter, bias: Parameter) -> TensorProxy:
    """Return (x - mean) * rstd * weight + bias, as Inductor computes a batch norm."""
    standardized = (x - per_channel(mean, x.ndim)) * per_channel(rstd, x.ndim)
    return scale_and_shift(standardized, per_channel(weight, x.ndim), per_channel(bias, x.ndim), x.dtype)


normalize = Symbol("batch_norm_normalize", "torchex.batch_norm_normalize", body=_normalize)


def _normalized(bound: BoundSymbol) -> TensorProxy | None:
    """Record the first result of a batch norm as a function of its statistics, unless these are rounded."""
    x, _, _, weight, bias, *_ = bound.args
    *_, mean, rstd = bound.output
    return normalize(x, mean, rstd, weight, bias) if mean.dtype == clang.wider(x.dtype) else None


register_parted(native_batch_norm, _normalized)


def _batch_norm_backward(
    g: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running: Pair,
    saved: Pair,
    eps: float,
    mask: tuple[bool, ...],
) -> tuple[torch.Tensor | None, ...]:
    """Call the kernel. `saved` are the batch's statistics in training; in evaluation the kernel reads `running`, but
    still checks the dtype of `saved`."""
    if running[0] is None:
        return aten.native_batch_norm_backward(g, x, weight, *running, *saved, True, eps, mask)
    unused = x.new_empty(0, dtype=clang.wider(x.dtype) if x.is_cuda else running[0].dtype)
    return aten.native_batch_norm_backward(g, x, weight, *running, unused, unused, False, eps, mask)


native_batch_norm_backward = torchex.register_operator(
    "native_batch_norm_backward",
    meta=lambda g, x, weight, bias, running, saved, eps, mask: _like_some(mask, x, weight, bias),
    fn=_batch_norm_backward,
)


def _batch_norm_train_grad(
    input: TensorProxy,
    running_mean: Parameter,
    running_var: Parameter,
    weight: Parameter,
    bias: Parameter,
    momentum: float,
    eps: float,
) -> tuple[TensorProxy, Parameter, Parameter]:
    out, new_mean, new_var, mean, rstd = native_batch_norm(
        input, running_mean, running_var, weight, bias, momentum, eps
    )
    mask = _gradient_mask(input, weight, bias)
    gradients = native_batch_norm_backward(get_grad(out), input, weight, bias, (None, None), (mean, rstd), eps, mask)
    put_all((input, weight, bias), gradients)
    return out, new_mean, new_var


run_torchlang(batch_norm_train, _batch_norm_outputs, grad_transform=_batch_norm_train_grad)


def _batch_norm_grad(
    input: TensorProxy,
    running_mean: Parameter,
    running_var: Parameter,
    weight: Parameter = None,
    bias: Parameter = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> TensorProxy:
    if statically_true(input.numel() == 0):  # torch has a separate path for these, on which its kernels crash
        return NotImplemented
    out = torchlang.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    mask = _gradient_mask(input, weight, bias)
    running = (running_mean, running_var)
    gradients = native_batch_norm_backward(get_grad(out), input, weight, bias, running, (None, None), eps, mask)
    put_all((input, weight, bias), gradients)
    return out


run_torchlang(torchlang.batch_norm, grad_transform=_batch_norm_grad)
