"""How torch runs the random family: under one seed, eager's bits, and eager's state of the generator afterwards."""

import math
from collections.abc import Callable
from typing import Any

import torch

from forge import prims, torchlang
from forge.executors.torchex.core import run_prim, run_prims, run_torchlang, torchex
from forge.ir import Tag, TensorProxy, get_grad, put_grad
from forge.prims.core import like

run_prims({prims.multinomial: torch.multinomial})


def _memory(shape: tuple, dtype: torch.dtype, device: torch.device, like: torch.Tensor | None) -> torch.Tensor:
    if like is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty_like(like, dtype=dtype, device=device)


def _filling(method: Callable) -> Callable:
    """A function that fills new memory by a method of torch.Tensor, as eager does."""

    def fill(shape: tuple, *args: Any, like: torch.Tensor | None = None) -> torch.Tensor:
        *parameters, dtype, device = args
        return method(_memory(shape, dtype, device, like), *parameters)

    fill.__name__ = method.__name__.rstrip("_")
    return fill


run_prims(
    {
        prims.bernoulli: _filling(torch.Tensor.bernoulli_),
        prims.exponential: _filling(torch.Tensor.exponential_),
        prims.normal: _filling(torch.Tensor.normal_),
        prims.randint: _filling(torch.Tensor.random_),
        prims.uniform: _filling(torch.Tensor.uniform_),
    }
)


@run_prim(prims.randperm)
def randperm(n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """torch.randperm names dtype and device."""
    return torch.randperm(n, dtype=dtype, device=device)


# dropout: eager keeps the scaled mask on a CPU, and a bool one of a fused kernel on a GPU

Pair = tuple[TensorProxy, TensorProxy]


def _dropout_meta(x: TensorProxy, p: float) -> Pair:
    """(x dropped out, the scaled mask)."""
    return like(x), like(x)


def _masked_dropout(x: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)
    return x * mask, mask


def _native_dropout_meta(x: TensorProxy, p: float, train: bool) -> Pair:
    """(x dropped out, which elements were kept)."""
    return like(x), like(x, dtype=torch.bool)


def _alpha_dropout(x: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.empty_like(x).bernoulli_(1 - p)
    scale = 1 / math.sqrt((torchlang.ALPHA**2 * p + 1) * (1 - p))
    shift = mask.add(-1).mul_(torchlang.ALPHA * scale).add_(torchlang.ALPHA * scale * p)
    mask.mul_(scale)
    return x * mask + shift, mask


masked_dropout = torchex.register_operator("masked_dropout", meta=_dropout_meta, fn=_masked_dropout, tags=[Tag.RANDOM])
masked_alpha_dropout = torchex.register_operator(
    "masked_alpha_dropout", meta=_dropout_meta, fn=_alpha_dropout, tags=[Tag.RANDOM]
)
native_dropout = torchex.register_operator(
    "native_dropout", meta=_native_dropout_meta, fn=torch.native_dropout, tags=[Tag.RANDOM]
)
native_dropout_backward = torchex.register_operator(
    "native_dropout_backward",
    meta=lambda g, mask, scale: like(g),
    fn=torch.ops.aten.native_dropout_backward.default,
)


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
    out, mask = masked_dropout(input, p)
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
    out, mask = masked_alpha_dropout(input, p)
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
