"""Attention masks that depend on no input are evaluated: a causal one becomes is_causal, one that hides nothing is
dropped, and a band of positions becomes the window of window_attention if an executor accepts that.

Models build masks from sizes alone while they are traced (transformers then skips its check of a mask's values), and
torch's fastest attention kernels take none.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from forge import clang, torchlang
from forge.ir import BoundSymbol, TensorProxy, Trace, current_trace
from forge.transforms.dce import live_calls
from forge.transforms.fold_constants import independent_calls
from forge.transforms.replacement import rewrite

ATTENTION = torchlang.scaled_dot_product_attention


class Band(NamedTuple):
    """The keys visible to query i: from i - left to i + right; None: all on that side."""

    left: int | None
    right: int | None


_OPEN, _CAUSAL = Band(None, None), Band(None, 0)


def attention_masks(
    trace: Trace,
    run: Callable[[Trace], tuple[torch.Tensor, ...]],
    takes: Callable[[BoundSymbol], bool] = lambda bound: False,
    in_torch: Callable[[BoundSymbol], bool] = lambda bound: True,
) -> Trace:
    """Return the trace without the masks of attention calls that do not need them.

    Calls with dropout keep theirs: another kernel of torch's draws other values.

    Args:
        trace: The program.
        run: Computes the masks.
        takes: Returns whether an executor accepts a call of window_attention; otherwise the call with a mask stays.
        in_torch: Returns whether an attention call runs as torch runs it.
    """
    calls = {
        bound.output.name: ATTENTION.bind(bound.args, bound.kwargs)
        for bound in trace.bound_symbols
        if bound.symbol is ATTENTION
    }
    masks = {
        arguments["attn_mask"].name: arguments["attn_mask"]
        for arguments in calls.values()
        if _has_plain_mask(arguments)
    }
    if not masks:
        return trace
    bands = _bands(trace, masks, run)

    def without_mask(bound: BoundSymbol) -> TensorProxy | None:
        arguments = calls[bound.output.name] if bound.symbol is ATTENTION else None
        return None if arguments is None else _without_mask(bound, arguments, bands, takes, in_torch)

    return rewrite(trace, "attention_masks", without_mask, language=clang.language)


def _has_plain_mask(arguments: dict[str, Any]) -> bool:
    if arguments["attn_mask"] is None or arguments["dropout_p"] or arguments["is_causal"]:
        return False
    # without a mask, kernels hide scores before they scale them, where -inf times such a scale hides nothing
    return arguments["scale"] is None or (isinstance(arguments["scale"], (int, float)) and arguments["scale"] > 0)


def _bands(trace: Trace, masks: dict[str, Any], run: Callable[[Trace], tuple[torch.Tensor, ...]]) -> dict[str, Band]:
    """Return the band of each mask that depends on no input and has one."""
    calls = independent_calls(trace)
    fixed = {name for bound in calls for name in bound.outputs} | trace.constants.keys()
    targets = {name: mask for name, mask in masks.items() if name in fixed}
    if not targets:
        return {}
    output = tuple(targets.values())
    values = run(trace.derive("masks", live_calls(calls, targets), inputs=[], output=output))
    bands = {name: find_band(value) for name, value in zip(targets, values, strict=True)}
    return {name: band for name, band in bands.items() if band is not None}


def find_band(mask: torch.Tensor) -> Band | None:
    """Return the band of positions that a mask leaves visible, equal in all batches and heads; None if it is not
    a band, or hides a query's own position.

    A position is hidden by False or, in an additive mask, by -inf or the lowest number of its dtype: each query sees
    its own position, relative to which the weight of one so much lower is 0.
    """
    mask = mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride()[:-2])]
    taking_part = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not bool((taking_part | (mask <= torch.finfo(mask.dtype).min)).all()):
        return None
    if bool(taking_part.all()):
        return _OPEN
    if mask.ndim < 2 or mask.shape[-1] != mask.shape[-2]:
        return None
    first = taking_part[(0,) * (mask.ndim - 2)]
    below, above = (int(ends.sum()) - 1 for ends in (first[:, 0], first[0]))
    if below < 0 or above < 0:
        return None
    expected = torch.ones_like(first).tril_(above).triu_(-below)
    if not bool((taking_part == expected).all()):
        return None
    last = mask.shape[-1] - 1
    return Band(None if below == last else below, None if above == last else above)


def _without_mask(
    bound: BoundSymbol,
    arguments: dict[str, Any],
    bands: dict[str, Band],
    takes: Callable[[BoundSymbol], bool],
    in_torch: Callable[[BoundSymbol], bool],
) -> TensorProxy | None:
    """Record attention without the mask; None if the mask is needed."""
    if not _has_plain_mask(arguments) or arguments["attn_mask"].name not in bands:
        return None
    band = bands[arguments["attn_mask"].name]
    rows, columns = arguments["query"].shape[-2], arguments["key"].shape[-2]
    is_square = (
        isinstance(rows, int) and rows == columns and tuple(arguments["attn_mask"].shape[-2:]) == (rows, columns)
    )
    if band != _OPEN and not is_square:
        return None
    if band in (_OPEN, _CAUSAL):
        return ATTENTION(**{**arguments, "attn_mask": None, "is_causal": band == _CAUSAL})
    inputs = (arguments["query"], arguments["key"], arguments["value"])
    output: TensorProxy = torchlang.window_attention(*inputs, *band, arguments["scale"], arguments["enable_gqa"])
    call = current_trace().last_call
    return output if call is not None and takes(call) and in_torch(bound) else None
