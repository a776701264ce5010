"""The torch executor's native normalization operators: their gradients run the normalizations' backward kernels."""

from collections.abc import Sequence

import torch

from forge import torchlang
from forge.executors.torchex import norm
from forge.executors.torchex.core import run_torchlang
from forge.ir import Dim, TensorProxy, get_grad, needs_grad

Parameter = TensorProxy | None
Triple = tuple[TensorProxy, TensorProxy, TensorProxy]


def _native_layer_norm_grad(
    input: TensorProxy, normalized_shape: Sequence[Dim], weight: Parameter, bias: Parameter, eps: float
) -> Triple:
    out, mean, rstd = norm.native_layer_norm(input, normalized_shape, weight, bias, eps)
    inputs = (input, weight, bias)
    how = (normalized_shape, mean, rstd, weight, bias, tuple(map(needs_grad, inputs)))
    norm.put_all(inputs, norm.native_layer_norm_backward(get_grad(out), input, *how))
    return out, mean, rstd


def batch_norm_with_update(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor | None, ...]:
    """Return (out, mean, rstd, new running mean, new running variance), without side effects."""
    out, *new, mean, rstd = norm.aten_batch_norm(x, running_mean, running_var, weight, bias, momentum, eps)
    return out, mean, rstd, *new


def _batch_norm_with_update_grad(
    input: TensorProxy,
    weight: Parameter,
    bias: Parameter,
    running_mean: Parameter,
    running_var: Parameter,
    momentum: float,
    eps: float,
) -> tuple[TensorProxy, TensorProxy, TensorProxy, Parameter, Parameter]:
    out, *new, mean, rstd = norm.native_batch_norm(input, running_mean, running_var, weight, bias, momentum, eps)
    inputs = (input, weight, bias)
    how = ((None, None), (mean, rstd), eps, tuple(map(needs_grad, inputs)))
    norm.put_all(inputs, norm.native_batch_norm_backward(get_grad(out), *inputs, *how))
    return out, mean, rstd, *new


run_torchlang(torchlang.native_layer_norm, grad_transform=_native_layer_norm_grad)
run_torchlang(torchlang.batch_norm_with_update, batch_norm_with_update, grad_transform=_batch_norm_with_update_grad)
