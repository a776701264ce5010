"""Attention masks that depend on no input are looked at: a causal one becomes is_causal, one that hides nothing goes.

Models make masks from lengths alone while they are traced (transformers leaves its check of a mask's values out then),
and torch's fastest attention kernels take none.
"""

from collections.abc import Callable
from typing import Any

import torch

from forge import clang, torchlang
from forge.ir import BoundSymbol, Trace, recording
from forge.ir.symbol import substitute
from forge.transforms.dce import live_calls
from forge.transforms.hoist import independent_calls

ATTENTION = torchlang.scaled_dot_product_attention


def attention_masks(trace: Trace, run: Callable[[Trace], tuple[torch.Tensor, ...]]) -> Trace:
    """Return the trace with attention calls that need no mask given none; `run` computes the masks.

    Calls with dropout keep theirs: another kernel of torch's draws other values.
    """
    calls = {
        bound.output.name: ATTENTION.bind(bound.args, bound.kwargs)
        for bound in trace.bound_symbols
        if bound.symbol is ATTENTION
    }
    masks = {given["attn_mask"].name: given["attn_mask"] for given in calls.values() if _has_plain_mask(given)}
    if not masks:
        return trace
    kinds = _kinds(trace, masks, run)
    changed = {name: given for name, given in calls.items() if _has_plain_mask(given) and _fits(given, kinds)}
    if not changed:
        return trace
    new = trace.derive("attention_masks")
    with recording(new, clang.language):
        for bound in trace.bound_symbols:
            given = changed.get(bound.output.name) if bound.symbol is ATTENTION else None
            if given is None:
                new.record(bound)
            else:
                _record(new, bound, given, kinds[given["attn_mask"].name])
    return new


def _has_plain_mask(given: dict[str, Any]) -> bool:
    return given["attn_mask"] is not None and not given["dropout_p"] and not given["is_causal"]


def _kinds(trace: Trace, masks: dict[str, Any], run: Callable[[Trace], tuple[torch.Tensor, ...]]) -> dict[str, str]:
    """Return "causal" or "open" for each mask of these kinds that depends on no input."""
    calls = independent_calls(trace)
    made = {name for bound in calls for name in bound.outputs} | trace.constants.keys()
    wanted = {name: mask for name, mask in masks.items() if name in made}
    if not wanted:
        return {}
    output = tuple(wanted.values())
    values = run(trace.derive("masks", live_calls(calls, wanted), inputs=[], output=output))
    found = {name: _kind(value) for name, value in zip(wanted, values, strict=True)}
    return {name: kind for name, kind in found.items() if kind is not None}


def _kind(mask: torch.Tensor) -> str | None:
    """Return the kind of a mask: all take part, or for each row the columns up to its own."""
    mask = mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride()[:-2])]
    taking_part = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not bool((taking_part | (mask == float("-inf"))).all()):
        return None
    if bool(taking_part.all()):
        return "open"
    causal = taking_part.new_ones(taking_part.shape[-2:]).tril()
    return "causal" if bool((taking_part == causal).all()) else None


def _fits(given: dict[str, Any], kinds: dict[str, str]) -> bool:
    kind = kinds.get(given["attn_mask"].name)
    rows, columns = given["query"].shape[-2], given["key"].shape[-2]
    sizes = isinstance(rows, int) and rows == columns and tuple(given["attn_mask"].shape[-2:]) == (rows, columns)
    return kind == "open" or (kind == "causal" and sizes)


def _record(new: Trace, bound: BoundSymbol, given: dict[str, Any], kind: str) -> None:
    with new.collecting() as recorded, new.set_tags(bound.tags, bound.source):
        output = ATTENTION(**{**given, "attn_mask": None, "is_causal": kind == "causal"})
    for call in recorded:
        new.record(substitute(call, {output.name: bound.output}))
