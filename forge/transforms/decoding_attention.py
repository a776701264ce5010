"""Attention of few queries to many keys, as in decoding, runs in special kernels, which also write the new keys and
values to a static cache.

    keys.index_copy_(2, position, key)
    values.index_copy_(2, position, value)      ->  out = attend_to_cache((keys, values), position, key, value, query)
    out = attend(query, keys, values, mask)

Each of these calls has few elements, so that three kernel launches dominate their time.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from forge import clang, torchlang
from forge.ir import BoundSymbol, Symbol, TensorProxy, Trace, recording
from forge.ir.symbol import substitute

ATTENTION = torchlang.scaled_dot_product_attention


def decoding_attention(
    trace: Trace,
    index_copy: Symbol | None,
    takes: Callable[[BoundSymbol], bool],
    in_torch: Callable[[BoundSymbol], bool] = lambda bound: True,
) -> Trace:
    """Return a program without gradients with few-query attention calls in the form that an executor accepts.

    Args:
        trace: The program, whose caches are updated in place (forge/transforms/write_in_place.py).
        index_copy: The operator that updates the caches.
        takes: Returns whether an executor accepts a call of decoding_attention or attend_to_cache.
        in_torch: Returns whether a call runs as torch runs it.
    """
    sites = [bound for bound in trace.bound_symbols if bound.symbol is ATTENTION and _is_weighted_sum(bound)]
    sites = [bound for bound in sites if in_torch(bound)]
    if not sites:
        return trace
    updates = {name: bound for bound in trace.bound_symbols for name in bound.outputs if bound.symbol is index_copy}
    readers = dict.fromkeys(trace.output_names, 1)
    for bound in trace.bound_symbols if updates else ():
        for name in bound.inputs:
            readers[name] = readers.get(name, 0) + 1
    new = trace.derive("decoding_attention", [])
    replaced: dict[int, BoundSymbol] = {}
    removed: set[int] = set()
    with recording(new, clang.language):
        for bound in sites:
            arguments = ATTENTION.bind(bound.args, bound.kwargs)
            options = arguments["attn_mask"], arguments["scale"], arguments["enable_gqa"]
            update = _update_before(arguments, updates, readers)
            if update is not None:
                call = _call(new, bound, torchlang.attend_to_cache, *update.arguments, arguments["query"], *options)
                if takes(call):
                    replaced[id(bound)] = call
                    removed |= {id(each) for each in update.calls}
                    continue
            call = _call(
                new,
                bound,
                torchlang.decoding_attention,
                arguments["query"],
                arguments["key"],
                arguments["value"],
                *options,
            )
            if takes(call):
                replaced[id(bound)] = call
    if not replaced:
        return trace
    new.bound_symbols[:] = [replaced.get(id(bound), bound) for bound in trace.bound_symbols if id(bound) not in removed]
    return new


def _is_weighted_sum(bound: BoundSymbol) -> bool:
    arguments = ATTENTION.bind(bound.args, bound.kwargs)
    return not arguments["dropout_p"] and not arguments["is_causal"]


class _Update(NamedTuple):
    """The update of a cache of keys and one of values: its calls, and the first arguments of attend_to_cache."""

    calls: tuple[BoundSymbol, BoundSymbol]
    arguments: tuple[tuple[TensorProxy, TensorProxy], TensorProxy, TensorProxy, TensorProxy]


def _update_before(
    arguments: dict[str, Any], updates: dict[str, BoundSymbol], readers: dict[str, int]
) -> _Update | None:
    """Return the update of an attention call's keys and values, which have no other user; both are at the same
    position of each query."""
    key, value = arguments["key"], arguments["value"]
    if key.name == value.name or not {key.name, value.name} <= updates.keys():
        return None
    if readers[key.name] > 1 or readers[value.name] > 1:
        return None
    calls = updates[key.name], updates[value.name]
    first, second = (torchlang.index_copy.bind(each.args, each.kwargs) for each in calls)
    if first["index"].name != second["index"].name:
        return None
    if not all(_is_of_positions(each, arguments["query"]) for each in (first, second)):
        return None
    return _Update(calls, ((first["input"], second["input"]), first["index"], first["source"], second["source"]))


def _is_of_positions(write: dict[str, Any], query: TensorProxy) -> bool:
    """Return whether a cache of four dims is written at one position per query."""
    cache, new = write["input"], write["source"]
    return cache.ndim == new.ndim == query.ndim == 4 and write["dim"] in (2, -2) and new.shape[2] == query.shape[2]


def _call(new: Trace, bound: BoundSymbol, symbol: Symbol, *args: Any) -> BoundSymbol:
    with new.collecting() as recorded, new.set_tags(bound.tags, bound.source):
        output = symbol(*args)
    (call,) = recorded
    return substitute(call, {output.name: bound.output})
