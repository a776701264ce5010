"""Attention of few queries to many keys, as in decoding: a Triton kernel splits the keys among programs."""

import importlib.util
from typing import Any

import torch
from torch.nn import functional as F

from forge import torchlang
from forge.executors.executor import Decision, OperatorExecutor, decline
from forge.ir import TensorProxy
from forge.ir.proxies import hint_of
from forge.torch_internals.attention import get_flash_sdp_enabled

Update = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # position, new keys, new values
_DTYPES = (torch.bfloat16, torch.float16)
_WIDTHS = (16, 32, 64, 128, 256)
MOST_ROWS = 64  # of one tile: the queries of all heads that share a head of keys
_MANY = 64  # heads of keys in a batch: torch's kernels, which read what a mask hides, keep a GPU busy by themselves
_LONG = 2048  # keys, from which the kernel gains more than its launch may cost where no CUDA graph replays it


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    update: Update | None = None,
) -> torch.Tensor:
    if all(_is_in_rows(each) for each in (query, key, value, *(update or ())[1:])):
        from forge.executors.cudaex.decoding_kernels import attend  # Triton is imported where a program runs it

        return attend(query, key, value, attn_mask, query.shape[-1] ** -0.5 if scale is None else scale, update)
    if update is not None:
        position, new_key, new_value = update
        key.index_copy_(2, position, new_key)
        value.index_copy_(2, position, new_value)
    return F.scaled_dot_product_attention(query, key, value, attn_mask, scale=scale, enable_gqa=enable_gqa)


def _attend_to_cache(
    caches: tuple[torch.Tensor, torch.Tensor],
    position: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    query: torch.Tensor,
    *options: Any,
    **kwargs: Any,
) -> torch.Tensor:
    return _attend(query, *caches, *options, **kwargs, update=(position, new_key, new_value))


def _is_in_rows(x: torch.Tensor) -> bool:
    return x.stride(-1) == 1


def _checker(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    attn_mask: TensorProxy | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Decision:
    if query.device.type != "cuda":
        return decline(f"query is on {query.device.type}, and its kernel runs on CUDA GPUs")
    if torch.version.hip is not None or not importlib.util.find_spec("triton"):
        return decline("the kernel needs an NVIDIA GPU and Triton")
    if not get_flash_sdp_enabled():
        return decline("torch.nn.attention.sdpa_kernel allows no flash attention, of which the kernel is a kind")
    if any(x.ndim != 4 for x in (query, key, value)) or query.dtype not in _DTYPES:
        return decline("the kernel takes four dims of bfloat16 or float16")
    if query.shape[-1] not in _WIDTHS or value.shape[-1] != query.shape[-1]:
        return decline(f"the kernel takes queries and values of one width, of {_WIDTHS}")
    sizes = query.shape[1], query.shape[2], key.shape[1]
    if not all(isinstance(size, int) for size in sizes) or 0 in query.shape:
        return decline("the number of heads or queries is a symbol or 0")
    heads, queries, key_heads = map(int, sizes)
    if value.shape[1] != key_heads or heads % key_heads or not query.shape[0] == key.shape[0] == value.shape[0]:
        return decline("query, key and value have other than one batch, or heads that do not fit")
    if attn_mask is None and hint_of(query.shape[0]) * key_heads > _MANY:
        return decline("there are many heads of keys and no mask, for which torch's kernels are as fast")
    if heads // key_heads * queries > MOST_ROWS:
        return decline(f"more than {MOST_ROWS} queries share a head of keys")
    if not isinstance(key.shape[2], int) and hint_of(key.shape[2]) < _LONG:
        return decline(f"the keys grow, and are fewer than {_LONG}")
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, query.dtype, torch.float32):
        return decline(f"the mask is {attn_mask.dtype}")
    return True


def _checker_of_cache(
    caches: tuple[TensorProxy, TensorProxy],
    position: TensorProxy,
    new_key: TensorProxy,
    new_value: TensorProxy,
    query: TensorProxy,
    *options: Any,
    **kwargs: Any,
) -> Decision:
    decision = _checker(query, *caches, *options, **kwargs)
    if not decision:
        return decision
    keys, values = caches
    if position.shape != (query.shape[2],) or position.device != query.device:
        return decline("there is other than one position of each query, on its device")
    for cache, new in ((keys, new_key), (values, new_value)):
        if tuple(new.shape) != (*cache.shape[:2], query.shape[2], cache.shape[3]) or new.dtype != cache.dtype:
            return decline("new keys and values are not those of all heads")
    return True


def register(executor: OperatorExecutor) -> None:
    """Register attention of few queries with an executor."""
    executor.register_implementation(torchlang.decoding_attention, _attend, checker=_checker, grad="none")
    executor.register_implementation(torchlang.attend_to_cache, _attend_to_cache, checker=_checker_of_cache)
