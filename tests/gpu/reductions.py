"""The cases of norms in training, whose gradients reduce rows and columns of the same numbers: of few and of many rows,
of heads, and with scales from one table."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import forge
from tests.gpu.cases import DTYPES, Case
from tests.gpu.measure import judge, nudged

SHAPES = ((4096, 256), (16384, 256), (16384, 128), (32768, 1024), (1000, 4096))


def cases() -> dict[str, Case]:
    """Return every case by name."""
    return {
        f"reduction/{name}/{rows}x{width}/{dtype}": Case(partial(_run, function, rows, width, DTYPES[dtype]))
        for name, function in FUNCTIONS.items()
        for rows, width in SHAPES
        for dtype in ("float32", "bfloat16")
    }


def _rms_norm(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], table[0]) * x.sigmoid()


def _layer_norm(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], table[0], table[1]).tanh()


def _modulated(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return two norms, one after the other, with scales from one table."""
    for shift, scale in (table[:2], table[2:]):
        x = x + (F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift)
    return x


def _by_hand(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return norms of heads in float32, for queries of four heads and keys of one, with rotary embeddings of halves."""
    heads = x.unflatten(0, (-1, 4)).transpose(0, 1)
    found = []
    for part, weight in ((heads, table[0]), (heads[:1], table[1])):
        wide = part.float() if x.dtype != torch.float64 else part
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + weight)).to(x.dtype)
        first, second = normed.chunk(2, -1)
        found.append(normed * table[2] + torch.cat((-second, first), -1) * table[3])
    return found[0] + found[1]


FUNCTIONS: dict[str, Callable] = {
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "modulated": _modulated,
    "heads": _by_hand,
}


def _run(function: Callable, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple[str, str]:
    torch.manual_seed(0)
    inputs = [torch.randn(rows, width, dtype=dtype, device=device), torch.rand(4, width, dtype=dtype, device=device)]
    gradient = torch.randn_like(function(*inputs))

    def flow(function: Callable, inputs: list, gradient: torch.Tensor) -> list[Any]:
        leaves = [each.detach().requires_grad_() for each in inputs]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]

    def reference(draw: int | None) -> list[Any]:
        return flow(function, *nudged((inputs, gradient), dtype, draw))

    eager = flow(function, inputs, gradient)
    jitted = forge.jit(function)
    torch.full_like(inputs[0], torch.nan)  # elements that are never written are then not zero by chance
    return judge(flow(jitted, inputs, gradient), eager, reference)
