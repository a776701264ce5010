"""Scatters that add by an index that all heads share are sums of segments, which kernels compute as products.

    scatter_reduce(zeros, 2, index.expand(heads, -1, -1), g, "sum")  ->  segment_sums(g, index, length)

Scores that are gathered by distance, as in DeBERTa, have such gradients. Their values are added to each place one by
one otherwise, by atomics of half precision.
"""

from collections.abc import Callable
from functools import partial

import torch

from forge import clang, prims
from forge.ir import BoundSymbol, TensorProxy, Trace, recording
from forge.prims.core import same_shape, statically_true
from forge.transforms.dce import live_calls
from forge.transforms.makers import Makers
from forge.transforms.replacement import record_as
from forge.transforms.result_strides import Strides

_DTYPES = frozenset({torch.bfloat16, torch.float16})


def adds_segments(bound: BoundSymbol) -> bool:
    """Return whether a call adds values of half precision by an index along their last dim."""
    if bound.symbol is not prims.scatter_reduce or bound.kwargs or bound.args[4:] != ("sum",):
        return False
    x, dim, index, g = bound.args[:4]
    return x.dtype in _DTYPES and dim == x.ndim - 1 > 0 and same_shape(index.shape, g.shape)


def sum_segments(trace: Trace, takes: Callable[[BoundSymbol], bool], strides: Callable[[Trace], Strides]) -> Trace:
    """Return the program with sums of segments in the place of scatters into zeros by an index that is expanded.

    Args:
        trace: The program, with the gradients in it.
        takes: Returns whether an executor runs a call of segment_sums.
        strides: Returns those that torch gives the values of a trace, by name.
    """
    makers = Makers(trace)
    found = {id(bound) for bound in trace.bound_symbols if adds_segments(bound) and _adds_to_zeros(bound, makers)}
    if not found:
        return trace
    known = strides(trace)
    new = trace.derive("sum_segments", [])
    with recording(new, clang.language):
        for bound in trace.bound_symbols:
            shared = _shared_dims(bound, known) if id(bound) in found else 0
            with new.set_tags(bound.tags, bound.source), new.collecting() as calls:
                if shared:
                    record_as(new, bound.output, partial(_segment_sums, bound, shared))
            for call in calls if calls and takes(calls[-1]) else (bound,):
                new.record(call)
    if len(new.bound_symbols) == len(trace.bound_symbols):
        return trace
    new.bound_symbols[:] = live_calls(new.bound_symbols, new.output_names)
    return new


def _adds_to_zeros(bound: BoundSymbol, makers: Makers) -> bool:
    zeros = makers.prim(bound.args[0].name)
    is_whole = same_shape(bound.args[0].shape[:-1], bound.args[3].shape[:-1])
    return zeros is not None and zeros.symbol is prims.full and zeros.args[1] == 0 and is_whole


def _shared_dims(bound: BoundSymbol, strides: Strides) -> int:
    """Return how many first dims of an index are expanded."""
    index = bound.args[2]
    steps = strides.get(index.name, ())
    count = 0
    for size, step in zip(index.shape[:-1], steps, strict=False):
        if not (statically_true(size == 1) or statically_true(step == 0)):
            break
        count += 1
    return count


def _segment_sums(bound: BoundSymbol, shared: int) -> TensorProxy:
    x, _, index, g = bound.args[:4]
    for dim in range(shared):
        index = prims.slice(index, dim, 0, 1, 1)
    return clang.segment_sums(g, prims.squeeze(index, tuple(range(shared))), x.shape[-1])
