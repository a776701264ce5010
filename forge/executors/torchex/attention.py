"""The torch executor's implementations of the attention family.

torch selects the kernel at run time (torch._fused_sdp_choice), from strides, the GPU and
torch.nn.attention.sdpa_kernel. A pair of operators follows its choice: the forward saves the residuals of the selected
kernel's backward. If torch selects its math composition, or first rewrites the arguments (a head size or a mask
that needs padding, a mask with a gradient), torch's autograd runs the call once and its graph is kept.

The file is long because forward, backward and kernel selection have to agree.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from forge import clang, torchlang
from forge.executors.torchex.core import run_torchlang, torchex
from forge.ir import Proxy, Tag, TensorProxy, current_trace, get_grad, needs_grad, put_grad
from forge.ir.bounded import BoundedDict
from forge.ir.proxies import Dim, hint_of
from forge.ir.strides import to_strides
from forge.prims.core import like, statically_true
from forge.torch_internals.attention import (
    get_cudnn_sdp_enabled,
    get_flash_sdp_enabled,
    get_math_sdp_enabled,
    get_mem_efficient_sdp_enabled,
    get_sdp_priority_order,
)
from forge.torch_internals.dispatch import disable_current_modes
from forge.torch_internals.fake_tensors import FakeTensor
from forge.torch_internals.functions import torch_fused_sdp_choice
from forge.transforms.masks_in_rows import ROW_ELEMENTS

aten = torch.ops.aten
_HALVES = (torch.bfloat16, torch.float16)

# torch caches cuDNN's backward plans by query, key, value, mask and options, compared bytewise, but not by the strides
# of the output's gradient, so a plan may run for other strides than it was built for. In forge's calls the gradient has
# the output's strides; a negative zero keeps their cache entries apart from those of the program's own calls.
_NO_DROPOUT = -0.0


class Attention:
    """The options of one call, and which of query, key, value and mask need a gradient."""

    __slots__ = ("dropout_p", "enable_gqa", "grad_input_mask", "is_causal", "scale")

    def __init__(
        self,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
        grad_input_mask: tuple[bool, ...],
    ) -> None:
        self.dropout_p = dropout_p or _NO_DROPOUT
        self.is_causal = is_causal
        self.scale = scale
        self.enable_gqa = enable_gqa
        self.grad_input_mask = grad_input_mask


# Each kernel's forward maps (call, query, key, value, mask) to (out, logsumexp, other residuals); its backward maps
# (call, g, query, key, value, mask, out, logsumexp, other residuals) to the gradients of query, key, value. The shape
# of logsumexp differs by kernel; in the program it is float32 (batch, heads, queries), whichever kernel runs. Seed and
# offset differ in dtype, shape and device, and only a kernel that applies dropout reads them.

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]  # query, key, value, mask
_SeedAndOffset = tuple[torch.Tensor, torch.Tensor] | None


def _seed_and_offset(call: Attention, seed: torch.Tensor, offset: torch.Tensor) -> _SeedAndOffset:
    """Return the seed and offset if the backward reads them."""
    return (seed, offset) if call.dropout_p > 0 else None


def _unread(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return placeholders for seed and offset, which the backward of a call without dropout does not read."""
    unread = q.new_empty((), dtype=torch.int64)
    return unread, unread


def _flash_cpu(call: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> tuple:
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, call.dropout_p, call.is_causal, attn_mask=mask, scale=call.scale
    )
    return out, logsumexp, None


def _flash_cpu_backward(
    call: Attention,
    g: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    rest: None,
) -> tuple[torch.Tensor, ...]:
    g, q, k, v, out = map(_in_rows, (g, q, k, v, out))
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        g, q, k, v, out, logsumexp, call.dropout_p, call.is_causal, attn_mask=mask, scale=call.scale
    )


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose last dim is contiguous. torch's kernel assumes this without a check; an output that a
    region recomputes may have other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _flash(call: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: None) -> tuple:
    out, logsumexp, *sizes, seed, offset, _ = aten._scaled_dot_product_flash_attention(
        q, k, v, call.dropout_p, call.is_causal, False, scale=call.scale
    )
    return out, logsumexp, (sizes, _seed_and_offset(call, seed, offset))


def _flash_backward(
    call: Attention,
    g: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: None,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    rest: tuple[list, _SeedAndOffset],
) -> tuple[torch.Tensor, ...]:
    sizes, rng_state = rest
    seed, offset = rng_state or (q.new_empty((2,), dtype=torch.uint64), q.new_empty((), dtype=torch.uint64))
    return aten._scaled_dot_product_flash_attention_backward(
        g, q, k, v, out, logsumexp, *sizes, call.dropout_p, call.is_causal, seed, offset, scale=call.scale
    )


_EFFICIENT_MULTIPLE = 32  # the memory-efficient kernel pads the queries of logsumexp to this multiple, with infinity


def _efficient_forward(
    call: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> tuple:
    out, logsumexp, seed, offset = aten._scaled_dot_product_efficient_attention(
        q, k, v, mask, True, call.dropout_p, call.is_causal, scale=call.scale
    )
    return out, logsumexp.narrow(-1, 0, q.shape[2]), _seed_and_offset(call, seed, offset)


def _efficient_backward(
    call: Attention,
    g: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    rest: _SeedAndOffset,
) -> tuple[torch.Tensor, ...]:
    missing = -q.shape[2] % _EFFICIENT_MULTIPLE
    padded = F.pad(logsumexp, (0, missing), value=float("inf")) if missing else logsumexp
    how = (call.dropout_p, list(call.grad_input_mask), call.is_causal)
    gradients = aten._scaled_dot_product_efficient_attention_backward(
        g, q, k, v, mask, out, padded, *(rest or _unread(q)), *how, scale=call.scale
    )
    return gradients if call.grad_input_mask[3] else gradients[:3]


def _cudnn(call: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> tuple:
    out, logsumexp, *sizes, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, mask, True, call.dropout_p, call.is_causal, False, scale=call.scale
    )
    return out, logsumexp.squeeze(-1), (sizes, _seed_and_offset(call, seed, offset))


def _cudnn_backward(
    call: Attention,
    g: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    rest: tuple[list, _SeedAndOffset],
) -> tuple[torch.Tensor, ...]:
    sizes, rng_state = rest
    how = (*sizes, call.dropout_p, call.is_causal)
    g = to_strides(g, out.stride())
    return aten._scaled_dot_product_cudnn_attention_backward(
        g, q, k, v, out, logsumexp.unsqueeze(-1), *(rng_state or _unread(q)), mask, *how, scale=call.scale
    )


class Composition:
    """The autograd graph of a call that torch runs as a composition of other operations."""

    __slots__ = ("inputs", "out")

    def __init__(self, inputs: list[torch.Tensor], out: torch.Tensor) -> None:
        self.inputs = inputs
        self.out = out


def _compose(call: Attention, leaves: Inputs) -> tuple:
    query, key, value, mask = leaves
    with torch.enable_grad():
        out = F.scaled_dot_product_attention(
            query, key, value, mask, call.dropout_p, call.is_causal, scale=call.scale, enable_gqa=call.enable_gqa
        )
    inputs = [
        leaf
        for leaf, requires_grad in zip(leaves, call.grad_input_mask, strict=True)
        if requires_grad and leaf is not None
    ]
    return out.detach(), None, Composition(inputs, out)


_KERNELS: dict[tuple[str, int], tuple[Callable, Callable]] = {
    ("cpu", SDPBackend.FLASH_ATTENTION.value): (_flash_cpu, _flash_cpu_backward),
    ("cuda", SDPBackend.FLASH_ATTENTION.value): (_flash, _flash_backward),
    ("cuda", SDPBackend.EFFICIENT_ATTENTION.value): (_efficient_forward, _efficient_backward),
    ("cuda", SDPBackend.CUDNN_ATTENTION.value): (_cudnn, _cudnn_backward),
}
_OF_GROUPS = frozenset({(_flash_cpu, _flash_cpu_backward), (_flash, _flash_backward), (_cudnn, _cudnn_backward)})


_decisions = BoundedDict(4096)


def _decide(inputs: Inputs, options: tuple) -> tuple[Attention, tuple[Callable, Callable] | None]:
    """Return the call with these options and the functions of its kernel. torch's choice is cached by the tensors'
    metadata and by torch's settings."""
    query, key, value, mask = inputs
    if isinstance(query, FakeTensor):
        call = Attention(*options)
        return call, _choose(call, _leaves(inputs, call.grad_input_mask))
    about = (
        *(query.shape, query.stride(), key.shape, key.stride(), value.shape, value.stride()),
        None if mask is None else (mask.shape, mask.stride(), mask.dtype),
        *(query.dtype, query.device, options, torch.are_deterministic_algorithms_enabled(), _settings()),
    )
    decision = _decisions.get(about)
    if decision is None:
        call = Attention(*options)
        decision = _decisions[about] = (call, _choose(call, _leaves(inputs, call.grad_input_mask)))
    return decision


def _leaves(inputs: Inputs, grad_input_mask: tuple[bool, ...]) -> Inputs:
    """Return the tensors, detached into leaves of a new autograd graph where a gradient is needed."""
    query, key, value, mask = inputs
    return (
        query.detach().requires_grad_() if grad_input_mask[0] else query,
        key.detach().requires_grad_() if grad_input_mask[1] else key,
        value.detach().requires_grad_() if grad_input_mask[2] else value,
        mask.detach().requires_grad_() if grad_input_mask[3] and mask is not None else mask,
    )


def _settings() -> tuple:
    """Return the settings of torch.nn.attention.sdpa_kernel."""
    return (_flash_is_on(), _efficient_is_on(), _math_is_on(), _cudnn_is_on(), *_priorities())


_flash_is_on, _efficient_is_on = get_flash_sdp_enabled, get_mem_efficient_sdp_enabled
_math_is_on, _cudnn_is_on = get_math_sdp_enabled, get_cudnn_sdp_enabled
_priorities = get_sdp_priority_order


def _choose(call: Attention, leaves: Inputs) -> tuple[Callable, Callable] | None:
    """Return the functions of the kernel that torch selects for these arguments, or None for its math composition."""
    query, mask = leaves[0], leaves[3]
    if query.ndim != 4:  # torch 2.14 selects a kernel for inputs that it reshapes to four dims
        return None
    if call.grad_input_mask[3]:
        is_allowed = _efficient_is_on() and not torch.are_deterministic_algorithms_enabled()
        is_allowed = is_allowed and all(statically_true(x.stride(-1) == 1) for x in leaves[:3])
        fits = is_allowed and mask is not None and _takes_bias(query, leaves[1], leaves[2], mask)
        return (_efficient_forward, _efficient_backward) if fits else None
    if query.is_cuda and (query.shape[-1] % 8 or leaves[2].shape[-1] % 8):
        return None
    choice = _choice(call, leaves)
    kernel = _KERNELS.get((query.device.type, choice))
    if kernel is not None and kernel[0] is _efficient_forward and leaves[1].shape[1] != query.shape[1]:
        return None  # torch repeats the heads for this kernel
    if kernel is None or mask is None or kernel[0] is _flash_cpu:
        return kernel
    aligned = mask.shape[-1] % ROW_ELEMENTS == 0 or (mask.dtype != torch.bool and _is_aligned(mask))
    return kernel if aligned and mask.ndim == 4 and kernel[0] is _efficient_forward else None


def _takes_bias(query: Any, key: Any, value: Any, mask: Any) -> bool:
    """Return whether the memory-efficient kernel computes the gradient of a mask. torch would run such a call as a
    composition, in float32 and with all scores in memory."""
    if not (query.device.type == "cuda" and query.dtype in _HALVES and mask.dtype == query.dtype):
        return False
    if not query.ndim == key.ndim == value.ndim == mask.ndim == 4:
        return False
    if not all(statically_true(x.shape[dim] == query.shape[dim]) for x in (key, value) for dim in (0, 1)):
        return False
    if not all(statically_true(size != 0) for size in (*query.shape, *key.shape)):
        return False
    return all(statically_true(x.shape[-1] % 8 == 0) for x in (query, value))


def _choice(call: Attention, leaves: Inputs) -> int:
    """Return torch's choice of a kernel; for fake tensors, its choice for real tensors of the same metadata."""
    query, key, value, mask = leaves
    if isinstance(query, FakeTensor):
        with disable_current_modes():
            return _choice(call, (_real(query), _real(key), _real(value), None if mask is None else _real(mask)))
    with torch.enable_grad():
        return torch_fused_sdp_choice(
            query, key, value, mask, call.dropout_p, call.is_causal, scale=call.scale, enable_gqa=call.enable_gqa
        )


def has_no_kernel(arguments: dict[str, Any], grad_input_mask: tuple[bool, ...]) -> bool:
    """Return whether neither torch nor forge has a kernel for a call of these arguments.

    grad_input_mask: for each of query, key, value and mask, whether it needs a gradient.
    """
    query, key, value, mask = (arguments[name] for name in ("query", "key", "value", "attn_mask"))
    if grad_input_mask[3] and _takes_bias(query, key, value, mask):
        return False
    call = Attention(
        arguments["dropout_p"], arguments["is_causal"], arguments["scale"], arguments["enable_gqa"], grad_input_mask
    )
    with disable_current_modes():
        return _choice(call, _leaves(_likes(arguments), grad_input_mask)) == SDPBackend.MATH.value


def takes_groups(query: TensorProxy, times: Dim, arguments: dict[str, Any], requires_grad: bool) -> bool:
    """Return whether torch selects the same fused kernel with enable_gqa if key and value have `times` fewer heads; its
    composition would repeat these heads again."""
    call = Attention(0.0, arguments["is_causal"], arguments["scale"], False, (requires_grad,) * 3 + (False,))
    grouped = Attention(0.0, arguments["is_causal"], arguments["scale"], True, call.grad_input_mask)
    with disable_current_modes():
        q, k, v, mask = _leaves(_likes(arguments), call.grad_input_mask)
        step = hint_of(times)
        choice, of_fewer = _choice(call, (q, k, v, mask)), _choice(grouped, (q, k[:, ::step], v[:, ::step], mask))
        return choice == of_fewer and _KERNELS.get((query.device.type, choice)) in _OF_GROUPS


def takes_broadcast(arguments: dict[str, Any], requires_grad: bool) -> tuple[bool, bool]:
    """Return whether torch selects a fused kernel on a GPU for keys and values of one head or one batch, which its
    composition would broadcast: with enable_gqa, and for expanded tensors."""
    device = arguments["query"].device.type
    if device != "cuda":
        return False, False
    how = (0.0, arguments["is_causal"], arguments["scale"])
    grad_input_mask = (requires_grad,) * 3 + (False,)
    with disable_current_modes():
        q, k, v, mask = _leaves(_likes(arguments), grad_input_mask)
        grouped = _choice(Attention(*how, True, grad_input_mask), (q, k, v, mask))
        k, v = [x.expand(*q.shape[:2], *x.shape[2:]) for x in (k, v)]
        expanded = _choice(Attention(*how, False, grad_input_mask), (q, k, v, mask))
    return _KERNELS.get((device, grouped)) in _OF_GROUPS, (device, expanded) in _KERNELS


def as_chosen_now(function: Callable, otherwise: Callable) -> Callable:
    """Return a callable that runs `function` while the settings of torch.nn.attention.sdpa_kernel are the present
    ones, for which torch selected its kernel, and `otherwise` under other settings."""
    settings = _settings()

    def call(*inputs: Any) -> Any:
        return function(*inputs) if _settings() == settings else otherwise(*inputs)

    return call


def _likes(arguments: dict[str, Any]) -> Inputs:
    """Allocate one batch of the tensors of a call, from its arguments by name."""
    query, key, value, mask = (arguments[name] for name in ("query", "key", "value", "attn_mask"))
    return _like(query), _like(key), _like(value), None if mask is None else _like(mask)


def _like(proxy: TensorProxy) -> torch.Tensor:
    """Allocate one batch of a proxy's tensor."""
    shape = [hint_of(size) for size in proxy.shape]
    if len(shape) == 4:
        shape[0] = 1
    return torch.empty(shape, dtype=proxy.dtype, device=proxy.device)


def _real(fake: torch.Tensor) -> torch.Tensor:
    shape, strides = [[hint_of(size) for size in sizes] for sizes in (fake.shape, fake.stride())]
    real = torch.empty_strided(shape, strides, dtype=fake.dtype, device=fake.device)
    return real.requires_grad_(fake.requires_grad)


def with_rows(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask whose rows are contiguous. torch's kernels take no other masks, and torch would run its composition
    (for example for a relative bias, which is looked up per head and permuted)."""
    if mask.stride(-1) in (0, 1) or mask.shape[-1] == 1:
        return mask
    broadcast = [dim for dim, stride in enumerate(mask.stride()) if stride == 0]
    each = mask[tuple(slice(1) if dim in broadcast else slice(None) for dim in range(mask.ndim))]
    return each.contiguous().expand(mask.shape)


def _additive_mask(mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """Return the mask in the additive form that kernels take: bool as 0 and -inf; on a GPU expanded to the scores'
    shape."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
    if not q.is_cuda:
        return mask
    mask = mask.expand(*q.shape[:3], k.shape[2])
    return mask if _is_aligned(mask) else _aligned(mask)


def _is_aligned(mask: torch.Tensor) -> bool:
    """Return whether each row is aligned for the kernel's widest loads."""
    *steps, step = mask.stride()
    return step == 1 and all(each % ROW_ELEMENTS == 0 for each in steps)


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask with aligned rows; expanded dims stay expanded."""
    length = mask.shape[-1]
    missing = -length % ROW_ELEMENTS
    each = mask[tuple([slice(1 if step == 0 else None) for step in mask.stride()[:-1]])]
    if missing:
        each = F.pad(each.contiguous(), (0, missing))[..., :length]
    else:
        each = each.clone(memory_format=torch.contiguous_format)
    return each.expand(mask.shape)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    grad_input_mask: tuple[bool, ...],
    is_composed: bool = False,
) -> tuple:
    """Return (out, logsumexp or None, other residuals). is_composed: whether the program's backward is the one of
    torch's composition, because it was unknown at compile time that a kernel takes the call."""
    if attn_mask is not None and attn_mask.is_cuda:
        attn_mask = with_rows(attn_mask)
    inputs = (query, key, value, attn_mask)
    options = (dropout_p, is_causal, scale, enable_gqa, grad_input_mask)
    call, kernel = (Attention(*options), None) if is_composed else _decide(inputs, options)
    if kernel is None:
        return _compose(call, _leaves(inputs, grad_input_mask))
    out, logsumexp, rest = kernel[0](call, query, key, value, _additive_mask(attn_mask, query, key))
    return out, logsumexp, (call, kernel[1], rest)


def attend_backward(
    g: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    out: torch.Tensor,
    logsumexp: torch.Tensor | None,
    state: Composition | tuple,
    grad_input_mask: tuple[bool, ...],
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of query, key, value and mask, None where grad_input_mask is False."""
    if isinstance(state, Composition):
        return _composition_backward(g, state, grad_input_mask)
    call, backward, rest = state
    mask = _additive_mask(attn_mask, query, key)
    *gradients, of_mask = (*backward(call, g, query, key, value, mask, out, logsumexp, rest), None)[:4]
    if not grad_input_mask[3] or attn_mask is None:
        return (*gradients, None)
    return (*gradients, of_mask.sum_to_size(attn_mask.shape))


def _composition_backward(
    g: torch.Tensor, state: Composition, shapes: tuple[object, ...]
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of the inputs with a shape in `shapes`, None for the others."""
    g = to_strides(g, state.out.stride())  # the composition may call cuDNN
    # torch returns no gradient for the mask of an empty batch
    gradients = torch.autograd.grad(state.out, state.inputs, g, retain_graph=True, materialize_grads=True)
    iterator = iter(gradients)
    return tuple(next(iterator) if shape else None for shape in shapes)


def _attention_meta(query: TensorProxy, key: TensorProxy, value: TensorProxy, *how: object) -> tuple:
    """Return the metadata of (out, logsumexp, state); logsumexp is None for torch's composition."""
    trace = current_trace()
    logsumexp = like(query, shape=query.shape[:-1], dtype=clang.wider(query.dtype))
    batch = query.shape[:-2]
    out = like(query, shape=(*batch, query.shape[-2], value.shape[-1]))
    return out, logsumexp, Proxy(trace.fresh_name("attention"))


attention = torchex.register_operator("attention", meta=_attention_meta, fn=attend)
attention_backward = torchex.register_operator(
    "attention_backward",
    meta=lambda g, query, key, value, mask, *rest: tuple(
        like(x) if requires_grad else None for x, requires_grad in zip((query, key, value, mask), rest[-1], strict=True)
    ),
    fn=attend_backward,
)
composition_backward = torchex.register_operator(
    "attention_composition_backward",
    meta=lambda g, state, shapes: tuple(like(g, shape=shape) if shape else None for shape in shapes),
    fn=_composition_backward,
)


# the operations for which torch selects a kernel
ATTENDING = frozenset({attention.id, torchlang.scaled_dot_product_attention.id})


def attention_grad(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    attn_mask: TensorProxy | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> TensorProxy:
    """Compute attention, and its gradients by the backward of the kernel that torch selects."""
    inputs = (query, key, value, attn_mask)
    grad_input_mask = tuple(needs_grad(x) for x in inputs)
    trace = current_trace()
    is_composed = grad_input_mask[3] and not _takes_bias(*inputs)
    with trace.set_tags(trace.tags | {Tag.RANDOM} if dropout_p > 0 else trace.tags):
        out, logsumexp, state = attention(
            *inputs, dropout_p, is_causal, scale, enable_gqa, grad_input_mask, is_composed
        )
    if is_composed:  # the graph of torch's composition holds its residuals
        shapes = tuple(
            x.shape if requires_grad and x is not None else None
            for x, requires_grad in zip(inputs, grad_input_mask, strict=True)
        )
        gradients = composition_backward(get_grad(out), state, shapes)
    else:
        gradients = attention_backward(get_grad(out), *inputs, out, logsumexp, state, grad_input_mask)
    for argument, gradient in zip(inputs, gradients, strict=True):
        put_grad(argument, gradient)
    return out


run_torchlang(torchlang.scaled_dot_product_attention, grad_transform=attention_grad)
