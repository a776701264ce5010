"""Gradients of a table of few rows become masked sums.

    index_put(zeros, (index,), g, accumulate=True)[r]  =  sum(where(index == r, g, 0))

Relative positions, types of tokens and buckets of distances are read thousands of times each. A GPU adds them by
atomics, which serialize and round at each step, or sorts them in a dozen kernels; a region compares an index with each
row, in one kernel, in one order, and adds in float32.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from forge import clang, prims
from forge.ir import BoundSymbol, TensorProxy, Trace, recording
from forge.ir.proxies import hint_of
from forge.prims.core import same_shape
from forge.transforms.dce import live_calls
from forge.transforms.makers import Makers, is_view
from forge.transforms.replacement import record_as

_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
_INDICES = frozenset({torch.int32, torch.int64})
_MOST = 2**27  # comparisons; an H200 makes one in 0.4 to 1.5 ps, and sorts in 40 to 200 us
MANY = 4  # average additions per row, from which on atomics serialize
_ADDITIONS = frozenset({prims.embedding_backward, prims.index_put, clang.index_add})


class _Addition(NamedTuple):
    """Rows of g that are added to zeros at `indices`, along a dim, except for the row `skipped`."""

    g: TensorProxy
    indices: TensorProxy
    dim: int
    skipped: int = -1


def adds_rows(bound: BoundSymbol) -> bool:
    """Return whether a call may add rows by index."""
    return bound.symbol in _ADDITIONS


def sum_few_rows(trace: Trace, is_fused: Callable[[BoundSymbol], bool], *, on_cpu: bool = False) -> Trace:
    """Return the program with masked sums for additions of many rows to few.

    Args:
        trace: The program, with the gradients in it.
        is_fused: Returns whether a call may be in a region.
        on_cpu: Whether tables on a CPU are summed so, too, which adds faster than it compares.
    """
    makers = Makers(trace)
    new = trace.derive("sum_few_rows", [])
    with recording(new, clang.language):
        for bound in trace.bound_symbols:
            addition = _addition(bound, makers)
            if addition is None or not _pays(addition, bound.output, on_cpu):
                new.record(bound)
                continue
            with new.set_tags(bound.tags, bound.source), new.collecting() as calls:
                record_as(new, bound.output, partial(_masked_sum, addition, bound.output))
            is_one_loop = all(is_view(call) or is_fused(call) for call in calls)
            for call in calls if is_one_loop else (bound,):
                new.record(call)
    if len(new.bound_symbols) == len(trace.bound_symbols):
        return trace
    new.bound_symbols[:] = live_calls(new.bound_symbols, new.output_names)
    return new


def _addition(bound: BoundSymbol, makers: Makers) -> _Addition | None:
    """Return the rows that a call adds to zeros, by one index, if it does nothing else."""
    if bound.symbol is prims.embedding_backward:
        g, positions, _, padding_idx, scales_by_frequency = bound.args
        return None if scales_by_frequency else _Addition(g, positions, 0, padding_idx)
    if bound.symbol is clang.index_add:
        x, dim, index, g = bound.args
        indices: tuple[TensorProxy | None, ...] = (*[None] * dim, index)
    elif bound.symbol is prims.index_put and (*bound.args[3:], *bound.kwargs.values()) == (True,):
        x, indices, g = bound.args[:3]
    else:
        return None
    zeros = makers.prim(x.name)
    places = [dim for dim, index in enumerate(indices) if index is not None]
    if zeros is None or zeros.symbol is not prims.full or zeros.args[1] != 0 or len(places) != 1:
        return None
    index_tensor = indices[places[0]]
    if index_tensor is None or index_tensor.dtype not in _INDICES:
        return None
    is_whole = same_shape(g.shape, (*x.shape[: places[0]], *index_tensor.shape, *x.shape[places[0] + 1 :]))
    return _Addition(g, index_tensor, places[0]) if is_whole else None


def _pays(addition: _Addition, table: TensorProxy, on_cpu: bool) -> bool:
    """Return whether each row of a table gets many additions, and there are few comparisons."""
    g, indices, dim, _ = addition
    if g.device.type == "cpu" and not on_cpu:
        return False
    rows, count = table.shape[dim], math.prod(map(hint_of, indices.shape))
    if g.dtype not in _DTYPES or not isinstance(rows, int):
        return False
    return count >= MANY * rows and rows * math.prod(map(hint_of, g.shape)) <= _MOST


def _masked_sum(addition: _Addition, table: TensorProxy) -> TensorProxy:
    g, indices, dim, skipped = addition
    before, count, after = table.shape[:dim], table.shape[dim], table.shape[dim + 1 :]
    rows = clang.reshape(prims.iota(count, 0, 1, indices.dtype, indices.device), (-1, 1))
    read = clang.reshape(indices, (1, -1))
    is_read = clang.where(read < 0, read + count, read) == rows
    if skipped >= 0:
        is_read = is_read & (rows != skipped)
    updates = clang.reshape(g, (*before, 1, read.shape[1], *after))
    is_read = clang.reshape(is_read, (*[1] * dim, count, read.shape[1], *[1] * len(after)))
    return clang.sum(clang.where(is_read, updates, 0), dim + 1)
