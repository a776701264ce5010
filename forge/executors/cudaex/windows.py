"""Attention within a window: flash attention's kernel runs it where that is faster than another one with a mask."""

import torch

from forge import torchlang
from forge.executors.executor import Checker, Decision, OperatorExecutor, decline
from forge.executors.torchex.windows import attend, fits_flash, gradient_rule
from forge.ir import TensorProxy
from forge.ir.proxies import hint_of

TILE = 128  # rows and columns of the scores that flash attention computes at once

# Of the tiles of all scores. On an H100, cuDNN's attention with a mask computes all of them, each in half to two thirds
# of the time that flash attention 2 takes.
MOST_TILES = 0.35


def tile_share(length: int, left: int | None, right: int | None) -> float:
    """Return the part of the tiles of all scores that has positions within the window."""
    count = -(-length // TILE)
    tiles = 0
    for row in range(count):
        first = 0 if left is None else max(0, (row * TILE - left) // TILE)
        end = count if right is None else min(count, -(-((row + 1) * TILE + right) // TILE))
        tiles += end - first
    return tiles / count**2 if count else 1.0


def _checker(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    left: int | None,
    right: int | None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Decision:
    if query.device.type != "cuda":
        return decline(f"query is on {query.device.type}, and its kernel runs on CUDA GPUs")
    if torch.version.hip is not None:
        return decline("torch's kernels on AMD GPUs take no window")
    decision = is_profitable(query, key, value, left, right)
    if not decision:
        return decision
    if not fits_flash(query, key, value, enable_gqa):
        return decline("torch's flash attention does not run these tensors here")
    return True


def is_profitable(
    query: TensorProxy, key: TensorProxy, value: TensorProxy, left: int | None, right: int | None
) -> Decision:
    """Return whether flash attention computes few enough tiles for tensors that it takes."""
    tensors = (query, key, value)
    if any(x.ndim != 4 or not all(isinstance(size, int) for size in x.shape) for x in tensors):
        return decline("query, key or value has other than four dims, or a size that is a symbol")
    if 0 in (*query.shape, *key.shape):
        return decline("query or key has no elements, and flash attention takes no empty batch")
    if query.dtype not in (torch.bfloat16, torch.float16):
        return decline(f"query is {query.dtype}, and flash attention takes bfloat16 and float16")
    length, width = query.shape[-2:]
    if value.shape[-1] != width or width % 8:
        return decline("query and value have other than one width that is a multiple of 8")
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return decline("query, key and value have other than one batch")
    if key.shape[-2] != length:
        return decline("query and key have two lengths")
    share = tile_share(hint_of(length), left, right)
    if share > MOST_TILES:
        return decline(f"the window has {share:.0%} of all positions in tiles, and pays up to {MOST_TILES:.0%}")
    return True


def register(executor: OperatorExecutor, checker: Checker = _checker) -> None:
    """Register attention within a window with an executor."""
    executor.register_implementation(
        torchlang.window_attention, attend, checker=checker, grad_transform=gradient_rule, low_priority=True
    )
