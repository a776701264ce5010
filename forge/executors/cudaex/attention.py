"""Attention with a mask whose rows torch's kernels do not take: the mask is laid out anew, once a call, where no
transform did so before (forge/transforms/masks_in_rows.py knows sizes and strides that are no symbols).

A relative position bias is looked up per pair of positions and permuted, so that its heads are innermost in memory;
torch composes attention with it, in float32 and with all scores in memory.
"""

from typing import Any

import torch
from torch.nn import functional as F

from forge import torchlang
from forge.executors.executor import Decision, OperatorExecutor, decline
from forge.executors.torchex.attention import attention_grad, with_rows
from forge.ir import TensorProxy


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor, *rest: Any, **options: Any
) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, with_rows(attn_mask), *rest, **options)


def _checker(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    attn_mask: TensorProxy | None = None,
    *rest: object,
    **options: object,
) -> Decision:
    if query.device.type != "cuda":
        return decline(f"query is on {query.device.type}, and its kernels run on CUDA GPUs")
    if attn_mask is None:
        return decline("there is no mask")
    return True


def register(executor: OperatorExecutor) -> None:
    """Register attention with an executor."""
    symbol = torchlang.scaled_dot_product_attention
    executor.register_implementation(
        symbol, _attention, checker=_checker, grad_transform=attention_grad, low_priority=True
    )
