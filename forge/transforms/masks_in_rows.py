"""Attention masks and biases are laid out as attention's kernels read them, once for all calls that share one.

    scores + bias, of bias = table[positions].permute(2, 0, 1)
           = scores + bias.contiguous()

Kernels take masks whose rows lie in memory element by element, each row at a multiple of 16 elements. A mask in another
layout would be copied by each call, and by each call's backward. The copy of one that is computed is fused with what
computes it, and the backward reads the copy alone.
"""

from collections.abc import Callable
from typing import Any

import torch

from forge import clang, torchlang
from forge.ir import BoundSymbol, Tag, TensorProxy, Trace, recording
from forge.ir.proxies import Dim
from forge.ir.pytree import tensors
from forge.ir.strides import has_expanded_dim
from forge.ir.symbol import substitute
from forge.prims.core import same_shape, statically_true
from forge.transforms.dce import live_calls
from forge.transforms.makers import is_view
from forge.transforms.result_strides import Strides

ATTENTION = torchlang.scaled_dot_product_attention
ROW_ELEMENTS = 16  # of which a mask's rows are multiples
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_ABOUT_BACKWARD = frozenset({Tag.NO_GRAD, Tag.RECOMPUTE})  # which calls must have in common to share a copy
_DETACHED = frozenset({Tag.NO_GRAD, Tag.LEAF_VIEW})


def masks_in_rows(
    trace: Trace,
    strides: Callable[[Trace], Strides],
    plain: Callable[[BoundSymbol], bool] = lambda bound: True,
    device: str = "cuda",
) -> Trace:
    """Return the trace with attention calls given masks of floats in rows.

    strides: those that torch gives the values of a trace, by name. plain: whether a call runs as torch runs it.
    """
    found = [(bound, mask) for bound in trace.bound_symbols if (mask := _mask(bound, device)) is not None]
    if not found:
        return trace
    masks = {mask.name: mask for _, mask in found}
    calls = live_calls(trace.bound_symbols, masks)
    known = strides(trace.derive("masks", calls, output=tuple(masks.values())))
    refused = {name for name in masks if name in known and _is_refused(known[name])}
    chosen = {id(bound): mask for bound, mask in found if mask.name in refused and plain(bound)}
    return _rewrite(trace, chosen, known) if chosen else trace


def _mask(bound: BoundSymbol, device: str) -> TensorProxy | None:
    """Return the mask of floats of an attention call for which torch has a kernel. With dropout it stays: another
    kernel of torch's draws other values."""
    if bound.symbol is not ATTENTION:
        return None
    given = ATTENTION.bind(bound.args, bound.kwargs)
    query, mask = given["query"], given["attn_mask"]
    if mask is None or given["dropout_p"] or query.device.type != device or query.ndim != 4:
        return None
    if query.dtype not in _DTYPES or mask.dtype != query.dtype or mask.ndim < 2:
        return None
    return None if statically_true(mask.shape[-1] == 1) else mask


def _is_refused(strides: tuple[Dim, ...]) -> bool:
    """Return whether kernels do not take a mask of these strides."""
    if not statically_true(strides[-1] == 1):
        return isinstance(strides[-1], int) and strides[-1] != 0
    return any(isinstance(step, int) and step % ROW_ELEMENTS for step in strides[:-1])


def _rewrite(trace: Trace, masks: dict[int, TensorProxy], strides: Strides) -> Trace:
    new = trace.derive("masks_in_rows")
    makers = {name: bound for bound in trace.bound_symbols for name in bound.outputs}
    rows: dict[Any, TensorProxy] = {}
    with recording(new, clang.language):
        for bound in trace.bound_symbols:
            mask = masks.get(id(bound))
            if mask is not None:
                tags = bound.tags & _ABOUT_BACKWARD
                key = mask.name, tags
                if key not in rows:
                    is_expanded_before = _is_expanded_before(mask, makers, strides)
                    with new.set_tags(tags, bound.source):
                        rows[key] = _in_rows(mask, strides[mask.name], makers, is_expanded_before)
                bound = substitute(bound, {mask.name: rows[key]})
            new.record(bound)
    return new


def _in_rows(
    mask: TensorProxy, strides: tuple[Dim, ...], makers: dict[str, BoundSymbol], is_expanded_before: bool
) -> TensorProxy:
    """Record a mask in rows; its expanded dims stay expanded, unless each element has a gradient of its own."""
    each = _before_expand(mask, makers)
    if each is mask and not is_expanded_before:
        for dim, step in enumerate(strides[:-1]):
            if isinstance(step, int) and step == 0:
                each = torchlang.narrow(each, dim, 0, 1)
    length = each.shape[-1]
    missing = -length % ROW_ELEMENTS if isinstance(length, int) else 0
    if not missing or not statically_true(strides[-1] == 1):
        each = torchlang.contiguous(each)
    if missing:
        each = torchlang.narrow(torchlang.pad(each, (0, missing)), -1, 0, length)
    return each if same_shape(each.shape, mask.shape) else torchlang.expand(each, mask.shape)


def _is_expanded_before(mask: TensorProxy, makers: dict[str, BoundSymbol], strides: Strides) -> bool:
    """Return whether a mask shows a value with a gradient that no view of the program expanded: of elements that share
    memory, each has a gradient of its own."""
    base = mask
    while (maker := makers.get(base.name)) is not None and is_view(maker):
        base = tensors(maker.args)[0]
    has_gradient = base.name in makers or bool(base.requires_grad)
    return has_gradient and has_expanded_dim(strides.get(base.name, ()))


def _before_expand(mask: TensorProxy, makers: dict[str, BoundSymbol]) -> TensorProxy:
    """Return the tensor that was expanded to a mask, through which its gradient flows."""
    while (maker := makers.get(mask.name)) is not None and maker.symbol is torchlang.expand:
        if not maker.tags.isdisjoint(_DETACHED):
            break
        mask = torchlang.expand.bind(maker.args, maker.kwargs)["self"]
    return mask
