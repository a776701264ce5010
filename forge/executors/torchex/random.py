"""The torch executor's random family: bitwise eager's values for a seed, and eager's generator state afterwards."""

import math
from typing import Any

import torch

from forge import clang, prims, torchlang
from forge.executors.torchex.core import run_prim, run_prims, run_torchlang, torchex
from forge.ir import Tag, TensorProxy, get_grad, put_grad, register_grad
from forge.prims.core import like
from forge.torchlang.partial_draws import begin_partial_draw, end_partial_draw
from forge.torchlang.random import noise_dtype
from forge.transforms.double import register_redraw

run_prims({prims.begin_partial_draw: begin_partial_draw, prims.end_partial_draw: end_partial_draw})
run_prims({prims.multinomial: torch.multinomial})


Like = torch.Tensor | None


def _memory(shape: tuple, dtype: torch.dtype, device: torch.device, like: Like) -> torch.Tensor:
    if like is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty_like(like, dtype=dtype, device=device)


@run_prim(prims.bernoulli)
def bernoulli(shape: tuple, p: Any, dtype: torch.dtype, device: torch.device, like: Like = None) -> torch.Tensor:
    """Draw like the mask of eager's dropout."""
    return _memory(shape, dtype, device, like).bernoulli_(p)


@run_prim(prims.exponential)
def exponential(shape: tuple, rate: float, dtype: torch.dtype, device: torch.device, like: Like = None) -> torch.Tensor:
    """Draw like Tensor.exponential_."""
    return _memory(shape, dtype, device, like).exponential_(rate)


@run_prim(prims.normal)
def normal(
    shape: tuple, mean: float, std: float, dtype: torch.dtype, device: torch.device, like: Like = None
) -> torch.Tensor:
    """Draw like torch.randn."""
    return _memory(shape, dtype, device, like).normal_(mean, std)


@run_prim(prims.randint)
def randint(
    shape: tuple, low: int, high: int, dtype: torch.dtype, device: torch.device, like: Like = None
) -> torch.Tensor:
    """Draw like torch.randint."""
    return _memory(shape, dtype, device, like).random_(low, high)


@run_prim(prims.uniform)
def uniform(
    shape: tuple, low: float, high: float, dtype: torch.dtype, device: torch.device, like: Like = None
) -> torch.Tensor:
    """Draw like torch.rand."""
    return _memory(shape, dtype, device, like).uniform_(low, high)


@run_prim(prims.randperm)
def randperm(n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Call torch.randperm, whose dtype and device are keywords."""
    return torch.randperm(n, dtype=dtype, device=device)


# methods that fill a tensor, run on a new tensor like it


def bernoulli_like(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return a tensor like self, filled by Tensor.bernoulli_."""
    return torch.empty_like(self).bernoulli_(*args, **kwargs)


def exponential_like(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return a tensor like self, filled by Tensor.exponential_."""
    return torch.empty_like(self).exponential_(*args, **kwargs)


def normal_like(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return a tensor like self, filled by Tensor.normal_."""
    return torch.empty_like(self).normal_(*args, **kwargs)


def random_like(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return a tensor like self, filled by Tensor.random_."""
    return torch.empty_like(self).random_(*args, **kwargs)


def uniform_like(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return a tensor like self, filled by Tensor.uniform_."""
    return torch.empty_like(self).uniform_(*args, **kwargs)


run_torchlang(torchlang.fill_bernoulli, bernoulli_like)
run_torchlang(torchlang.exponential, exponential_like)
run_torchlang(torchlang.fill_normal, normal_like)
run_torchlang(torchlang.fill_random, random_like)
run_torchlang(torchlang.uniform, uniform_like)


# dropout: eager saves the scaled mask on a CPU, and the bool mask of a fused kernel on a GPU

Pair = tuple[TensorProxy, TensorProxy]


def _mask_meta(x: TensorProxy, p: float) -> TensorProxy:
    """Return the metadata of the mask by which x is multiplied."""
    return like(x, dtype=noise_dtype(x.dtype))


def _dropout_mask(x: torch.Tensor, p: float) -> torch.Tensor:
    return torch.empty_like(x, dtype=noise_dtype(x.dtype)).bernoulli_(1 - p).div_(1 - p)


def _native_dropout_meta(x: TensorProxy, p: float, train: bool) -> Pair:
    """Return the metadata of (x with dropout, mask of the kept elements)."""
    return like(x), like(x, dtype=torch.bool)


def _alpha_dropout_meta(x: TensorProxy, p: float) -> Pair:
    """Return the metadata of (factor of x, summand)."""
    return _mask_meta(x, p), _mask_meta(x, p)


def _alpha_dropout_mask(x: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.empty_like(x, dtype=noise_dtype(x.dtype)).bernoulli_(1 - p)
    scale = 1 / math.sqrt((torchlang.ALPHA**2 * p + 1) * (1 - p))
    shift = mask.add(-1).mul_(torchlang.ALPHA * scale).add_(torchlang.ALPHA * scale * p)
    return mask.mul_(scale), shift


dropout_mask = torchex.register_operator("dropout_mask", meta=_mask_meta, fn=_dropout_mask, tags=prims.random.RANDOM)
alpha_dropout_mask = torchex.register_operator(
    "alpha_dropout_mask", meta=_alpha_dropout_meta, fn=_alpha_dropout_mask, tags=prims.random.RANDOM
)
native_dropout = torchex.register_operator(
    "native_dropout", meta=_native_dropout_meta, fn=torch.native_dropout, tags=[Tag.RANDOM]
)
native_dropout_backward = torchex.register_operator(
    "native_dropout_backward",
    meta=lambda g, mask, scale: like(g),
    fn=torch.ops.aten.native_dropout_backward.default,
)


@register_grad(native_dropout_backward)
def _native_dropout_backward_grad(g: TensorProxy, mask: TensorProxy, scale: float) -> TensorProxy:
    out = native_dropout_backward(g, mask, scale)
    put_grad(g, native_dropout_backward(get_grad(out), mask, scale))
    return out


@register_redraw(native_dropout)
@register_redraw(torchlang.native_dropout)
def _native_dropout_again(outputs: Pair, input: TensorProxy, p: float, train: bool | None) -> Pair:
    """Recompute the dropout from the mask of the kept elements."""
    scale = (0.0 if p == 1 else 1 / (1 - p)) if train is not False else 1.0
    return native_dropout_backward(input, outputs[1], scale), outputs[1]


def _dropout_grad(input: TensorProxy, p: float, training: bool) -> TensorProxy:
    if p == 1:
        out = torchlang.dropout(input, p, training)
        put_grad(input, get_grad(out) * 0)
        return out
    if input.device.type == "cuda":
        out, mask = native_dropout(input, p, True)
        put_grad(input, native_dropout_backward(get_grad(out), mask, 1 / (1 - p)))
        return out
    return _masked_dropout_grad(input, p)


def _masked_dropout_grad(input: TensorProxy, p: float) -> TensorProxy:
    mask = dropout_mask(input, p)
    out = clang.mul(input, mask)
    put_grad(input, get_grad(out) * mask)
    return out


def _dropout_in_place_grad(input: TensorProxy, p: float, train: bool) -> TensorProxy:
    return _dropout_grad(input, p, train) if p == 1 else _masked_dropout_grad(input, p)


def _functional_dropout_grad(input: TensorProxy, p: float = 0.5, training: bool = True) -> TensorProxy:
    return _dropout_grad(input, p, training)


def _torch_dropout_grad(input: TensorProxy, p: float, train: bool) -> TensorProxy:
    return _dropout_grad(input, p, train)


def _native_dropout_grad(input: TensorProxy, p: float, train: bool | None) -> Pair:
    out, mask = torchlang.native_dropout(input, p, train)
    scale = (0.0 if p == 1 else 1 / (1 - p)) if train is not False else 1.0
    put_grad(input, native_dropout_backward(get_grad(out), mask, scale))
    return out, mask


def _alpha_dropout_grad(input: TensorProxy, p: float) -> TensorProxy:
    if p == 1:
        out = torchlang.alpha_dropout(input, p, True)
        put_grad(input, get_grad(out) * 0)
        return out
    mask, shift = alpha_dropout_mask(input, p)
    out = clang.add(clang.mul(input, mask), shift)
    put_grad(input, get_grad(out) * mask)
    return out


run_torchlang(torchlang.dropout, grad_transform=_functional_dropout_grad)
run_torchlang(torchlang.torch_dropout, grad_transform=_torch_dropout_grad)
run_torchlang(torchlang.dropout_, grad_transform=_dropout_in_place_grad)
run_torchlang(torchlang.native_dropout, grad_transform=_native_dropout_grad)
run_torchlang(
    torchlang.alpha_dropout, grad_transform=lambda input, p=0.5, training=False: _alpha_dropout_grad(input, p)
)
run_torchlang(torchlang.torch_alpha_dropout, grad_transform=lambda input, p, train: _alpha_dropout_grad(input, p))
