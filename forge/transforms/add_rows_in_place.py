"""Gradients of a table's rows are added in place to the rest of the table's gradient.

    rows = embedding_backward(g, indices, n)
    total = product + rows                     ->    total = add_rows_(product, g, indices)

An embedding whose weight is also a head's, or that is called twice, has a gradient of several terms. The rows' term
is a whole table, mostly zeros, which is written, read and added for a few rows. On a CPU alone: a GPU adds equal
rows by atomics, in another order at each call, or sorts them for `embedding_backward`, which sums them in float32.
"""

from collections import Counter
from collections.abc import Callable

import torch

from forge import clang, prims
from forge.ir import BoundSymbol, Symbol, TensorProxy, Trace
from forge.prims.core import same_shape

_FRESH = frozenset({clang.matmul, clang.add, prims.matmul, prims.embedding_backward})  # results have their own memory
_DTYPES = frozenset({torch.float32, torch.float64})  # a sum of many rows in half precision would lose more


def add_rows_in_place(trace: Trace, operator: Symbol, in_torch: Callable[[BoundSymbol], bool]) -> Trace:
    """Return a program with gradients of rows added in place to the term with which they are summed.

    Args:
        trace: The program, with the gradients in it.
        operator: Called with a table, the gradient of its rows, their indices and padding_idx; adds to the table.
        in_torch: Returns whether a call runs as torch runs it; other results may have unknown aliases.
    """
    makers = {name: bound for bound in trace.bound_symbols for name in bound.outputs}
    reads = Counter(name for bound in trace.bound_symbols for name in bound.inputs)
    reads.update(trace.output_names)
    sums: dict[int, BoundSymbol] = {}
    dropped: set[int] = set()

    def maker(x: TensorProxy) -> BoundSymbol | None:
        call = makers.get(x.name)
        is_fresh = call is not None and call.symbol in _FRESH and reads[x.name] == 1 and in_torch(call)
        return call if is_fresh else None

    for bound in filter(_is_sum, trace.bound_symbols):
        terms = [(x, maker(x)) for x in bound.args]
        rows = next((call for _, call in reversed(terms) if call is not None and _is_of_rows(call)), None)
        table = next((x for x, call in terms if call is not None and call is not rows), None)
        if rows is not None and table is not None:
            g, indices, _, padding_idx, _ = rows.args
            arguments = (table, g, indices, padding_idx)
            sums[id(bound)] = BoundSymbol(operator, arguments, {}, bound.output, source=bound.source, tags=bound.tags)
            dropped.add(id(rows))
    if not sums:
        return trace
    calls = [sums.get(id(bound), bound) for bound in trace.bound_symbols if id(bound) not in dropped]
    return trace.derive("add_rows_in_place", calls)


def _is_sum(bound: BoundSymbol) -> bool:
    """Return whether a call is the sum of two tensors of one shape and dtype."""
    if bound.symbol is not clang.add or bound.kwargs:
        return False
    x, y = bound.args
    if not isinstance(x, TensorProxy) or not isinstance(y, TensorProxy):
        return False
    return x.dtype == y.dtype and same_shape(x.shape, y.shape)


def _is_of_rows(bound: BoundSymbol) -> bool:
    if bound.symbol is not prims.embedding_backward:
        return False
    g, *_, scales_by_frequency = bound.args
    return g.device.type == "cpu" and g.dtype in _DTYPES and not scales_by_frequency
