"""The sliding-window attention by flash attention's kernel, which skips the tiles outside the window.

If torch.nn.attention.sdpa_kernel does not allow it, the kernel that torch selects takes the window as a mask.
"""

from typing import Any

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from forge import torchlang
from forge.executors.torchex.attention import ATTENDING as _ATTENDING
from forge.executors.torchex.attention import Composition
from forge.executors.torchex.attention import attend as attend_by_mask
from forge.executors.torchex.attention import attend_backward as attend_by_mask_backward
from forge.executors.torchex.core import torchex
from forge.executors.torchex.memory import ROW_BYTES
from forge.ir import Proxy, TensorProxy, current_trace, get_grad, needs_grad, put_grad
from forge.prims.core import like
from forge.torch_internals.attention import get_flash_sdp_enabled
from forge.torch_internals.dispatch import disable_current_modes
from forge.torch_internals.fake_tensors import FakeTensor

aten = torch.ops.aten
UNBOUNDED = -1  # an unbounded side of flash attention's window


def _mask(query: torch.Tensor, left: int | None, right: int | None) -> torch.Tensor:
    """Return the window as a mask that is True for visible keys."""
    length = query.shape[-2]
    mask = torch.ones((length, length), dtype=torch.bool, device=query.device)
    if right is not None:
        mask = mask.tril_(right)
    return mask if left is None else mask.triu_(-left)


def _positions_first(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in flash attention's layout: (batch, length, heads, width), with rows that it can load."""
    x = x.transpose(1, 2)
    return x if _has_loadable_rows(x) else x.clone(memory_format=torch.contiguous_format)


def _has_loadable_rows(x: torch.Tensor) -> bool:
    """Return whether rows are contiguous and each begins at a multiple of 16 bytes, the width of a load. torch does not
    check this."""
    *steps, step = x.stride()
    multiple = ROW_BYTES // x.element_size()
    if step != 1 or any(each % multiple for each in steps):
        return False
    return isinstance(x, FakeTensor) or x.is_meta or x.data_ptr() % ROW_BYTES == 0


def _window(left: int | None, right: int | None, scale: float | None) -> dict[str, Any]:
    sides = [UNBOUNDED if side is None else side for side in (left, right)]
    return {"scale": scale, "window_size_left": sides[0], "window_size_right": sides[1]}


def _window_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    left: int | None,
    right: int | None,
    scale: float | None,
    enable_gqa: bool,
    grad_input_mask: tuple[bool, bool, bool],
) -> tuple:
    """Return (out, logsumexp or None, other residuals if another kernel ran)."""
    if not get_flash_sdp_enabled():
        mask = _mask(query, left, right)
        return attend_by_mask(query, key, value, mask, 0.0, False, scale, enable_gqa, (*grad_input_mask, False))
    length = query.shape[-2]
    tensors = [_positions_first(x) for x in (query, key, value)]
    how = (None, None, length, length, 0.0, False, False)
    out, logsumexp, *_ = aten._flash_attention_forward(*tensors, *how, **_window(left, right, scale))
    return out.transpose(1, 2), logsumexp, None


def _window_attention_backward(
    g: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor | None,
    state: Composition | tuple | None,
    left: int | None,
    right: int | None,
    scale: float | None,
    grad_input_mask: tuple[bool, bool, bool],
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of query, key and value."""
    if state is not None:
        mask = _mask(query, left, right)
        inputs = (g, query, key, value, mask, out, logsumexp, state)
        return attend_by_mask_backward(*inputs, (*grad_input_mask, False))[:3]
    length = query.shape[-2]
    tensors = [_positions_first(x) for x in (g, query, key, value, out)]
    seed, offset = (query.new_empty(shape, dtype=torch.uint64) for shape in ((2,), ()))
    how = (logsumexp, None, None, length, length, 0.0, False, seed, offset)
    gradients = aten._flash_attention_backward(*tensors, *how, **_window(left, right, scale))
    return tuple(
        each.transpose(1, 2) if requires_grad else None
        for each, requires_grad in zip(gradients, grad_input_mask, strict=True)
    )


def _meta(query: TensorProxy, *rest: object) -> tuple:
    logsumexp = like(query, shape=query.shape[:-1], dtype=torch.float32)
    return like(query), logsumexp, Proxy(current_trace().fresh_name("attention"))


window_attention = torchex.register_operator("window_attention", meta=_meta, fn=_window_attention)
window_attention_backward = torchex.register_operator(
    "window_attention_backward",
    meta=lambda g, *rest: tuple(
        like(x) if requires_grad else None for x, requires_grad in zip(rest[:3], rest[-1], strict=True)
    ),
    fn=_window_attention_backward,
)


WINDOWED = frozenset({window_attention.id, torchlang.window_attention.id})

_DECODING = frozenset({torchlang.decoding_attention.id, torchlang.attend_to_cache.id})

# the operations for which torch selects a kernel, or flash attention has to be allowed
ATTENDING = _ATTENDING | WINDOWED | _DECODING


def fits_flash(query: TensorProxy, key: TensorProxy, value: TensorProxy, enable_gqa: bool) -> bool:
    """Return whether torch's flash attention is enabled and supports such tensors and their gradients on this GPU."""
    with disable_current_modes():
        q, k, v = [
            torch.empty((1, *x.shape[1:]), dtype=x.dtype, device=x.device, requires_grad=True)
            for x in (query, key, value)
        ]
        return can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, False, enable_gqa))


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    left: int | None,
    right: int | None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute attention within a window, without gradients."""
    return _window_attention(query, key, value, left, right, scale, enable_gqa, (False, False, False))[0]


def gradient_rule(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    left: int | None,
    right: int | None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> TensorProxy:
    """Compute attention within a window, and its gradients by the kernel's backward."""
    inputs = (query, key, value)
    grad_input_mask = (needs_grad(query), needs_grad(key), needs_grad(value))
    out, logsumexp, state = window_attention(*inputs, left, right, scale, enable_gqa, grad_input_mask)
    how = (left, right, scale, grad_input_mask)
    gradients = window_attention_backward(get_grad(out), *inputs, out, logsumexp, state, *how)
    for argument, gradient in zip(inputs, gradients, strict=True):
        put_grad(argument, gradient)
    return out
