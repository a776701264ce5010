"""Attention masks and biases are converted to the form that attention's kernels read, once for all users of one.

    scores + bias, of bias = table[positions].permute(2, 0, 1)
           = scores + bias.contiguous()
    attend(mask) = attend(zeros.masked_fill(~mask, -inf)), of a mask of bools

Kernels add masks of the query's dtype, whose rows are contiguous, each row at a multiple of 16 elements. Any other mask
would be converted and copied by each call, and by each call's backward. The copy of a computed mask is fused with its
computation, and the backward reads only the copy.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

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
from forge.transforms.replacement import record_as
from forge.transforms.result_strides import Strides

ATTENTION = torchlang.scaled_dot_product_attention
ROW_ELEMENTS = 16  # of which a mask's rows are multiples
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_ABOUT_BACKWARD = frozenset({Tag.NO_GRAD, Tag.RECOMPUTE})  # which calls must have in common to share a copy
_DETACHED = frozenset({Tag.NO_GRAD, Tag.LEAF_VIEW})


class _Mask(NamedTuple):
    """The mask of an attention call. dtype: the query's."""

    proxy: TensorProxy
    dtype: torch.dtype
    device: str

    @property
    def is_bool(self) -> bool:
        return self.proxy.dtype == torch.bool


def masks_in_rows(
    trace: Trace,
    strides: Callable[[Trace], Strides],
    in_torch: Callable[[BoundSymbol], bool] = lambda bound: True,
    device: str = "cuda",
) -> Trace:
    """Return the trace with attention masks that are additive and, on `device`, row-major.

    strides: torch's strides of the values of a trace, by name. in_torch: whether a call runs as torch runs it.
    """
    candidates = [(bound, mask) for bound in trace.bound_symbols if (mask := _mask(bound, device)) is not None]
    if not candidates:
        return trace
    masks = {mask.proxy.name: mask.proxy for _, mask in candidates}
    calls = live_calls(trace.bound_symbols, masks)
    in_eager = strides(trace.derive("masks", calls, output=tuple(masks.values())))
    refused = {name for name in masks if name in in_eager and _is_refused(in_eager[name])}
    sites = {
        id(bound): mask
        for bound, mask in candidates
        if mask.proxy.name in in_eager and (mask.is_bool or mask.proxy.name in refused) and in_torch(bound)
    }
    return _rewrite(trace, sites, in_eager, device) if sites else trace


def _mask(bound: BoundSymbol, device: str) -> _Mask | None:
    """Return the mask of an attention call for which torch has a kernel: one of bools, or one of floats on `device`."""
    if bound.symbol is not ATTENTION:
        return None
    arguments = ATTENTION.bind(bound.args, bound.kwargs)
    query, mask = arguments["query"], arguments["attn_mask"]
    if mask is None or query.ndim != 4 or query.dtype not in _DTYPES or mask.ndim < 2:
        return None
    result = _Mask(mask, query.dtype, query.device.type)
    if result.is_bool:
        return result
    is_added = mask.dtype == query.dtype and result.device == device
    return None if not is_added or statically_true(mask.shape[-1] == 1) else result


def _is_refused(strides: tuple[Dim, ...]) -> bool:
    """Return whether kernels reject a mask of these strides."""
    if not statically_true(strides[-1] == 1):
        return isinstance(strides[-1], int) and strides[-1] != 0
    return any(isinstance(step, int) and step % ROW_ELEMENTS for step in strides[:-1])


def _rewrite(trace: Trace, masks: dict[int, _Mask], strides: Strides, device: str) -> Trace:
    new = trace.derive("masks_in_rows")
    makers = {name: bound for bound in trace.bound_symbols for name in bound.outputs}
    rows: dict[Any, TensorProxy] = {}
    with recording(new, clang.language):
        for bound in trace.bound_symbols:
            mask = masks.get(id(bound))
            if mask is not None:
                tags = bound.tags & _ABOUT_BACKWARD
                key = mask.proxy.name, mask.dtype, tags
                if key not in rows:
                    is_expanded_before = not mask.is_bool and _is_expanded_before(mask.proxy, makers, strides)
                    with new.set_tags(tags, bound.source):
                        rows[key] = _as_kernels_read_it(
                            mask, strides[mask.proxy.name], makers, device, is_expanded_before
                        )
                _record_again(new, substitute(bound, {mask.proxy.name: rows[key]}))
            else:
                new.record(bound)
    return new


def _record_again(new: Trace, bound: BoundSymbol) -> None:
    """Record an attention call with another mask: its decomposition depends on the mask's dtype."""
    with new.set_tags(bound.tags, bound.source):
        record_as(new, bound.output, lambda: ATTENTION(*bound.args, **bound.kwargs))


def _as_kernels_read_it(
    mask: _Mask, strides: tuple[Dim, ...], makers: dict[str, BoundSymbol], device: str, is_expanded_before: bool
) -> TensorProxy:
    """Record a mask as kernels read it; its expanded dims stay expanded, unless each element has its own
    gradient."""
    each = _before_expand(mask.proxy, makers)
    if each is mask.proxy and not is_expanded_before:
        for dim, step in enumerate(strides[:-1]):
            if isinstance(step, int) and step == 0:
                each = torchlang.narrow(each, dim, 0, 1)
    if mask.is_bool:
        hidden = clang.logical_not(each)
        each = torchlang.masked_fill(torchlang.zeros_like(each, dtype=mask.dtype), hidden, float("-inf"))
    if mask.device == device:
        each = _in_rows(each, is_dense=statically_true(strides[-1] == 1))
    return each if same_shape(each.shape, mask.proxy.shape) else torchlang.expand(each, mask.proxy.shape)


def _in_rows(mask: TensorProxy, is_dense: bool) -> TensorProxy:
    """Record a row-major mask. is_dense: whether its rows are contiguous."""
    length = mask.shape[-1]
    missing = -length % ROW_ELEMENTS if isinstance(length, int) else 0
    if not missing or not is_dense:
        mask = torchlang.contiguous(mask)
    return torchlang.narrow(torchlang.pad(mask, (0, missing)), -1, 0, length) if missing else mask


def _is_expanded_before(mask: TensorProxy, makers: dict[str, BoundSymbol], strides: Strides) -> bool:
    """Return whether a mask is of a differentiable value that no view of the program expanded: of elements that share
    memory, each has its own gradient."""
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
