"""Softmax of scores beside attention sinks, of which the sinks' columns are dropped, is computed without joining them.

    softmax(cat((scores, sinks), -1), -1)[..., :-1] = sink_softmax(scores, sinks)

The joined rows would be written to memory, twice in training, and have one element more than kernels of products read
at once. The largest value of each row may be subtracted before, as in GPT-OSS.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from forge import clang, prims, torchlang
from forge.ir import BoundSymbol, TensorProxy, Trace
from forge.ir.pytree import tensors
from forge.prims.core import same_shape, statically_true
from forge.transforms.makers import Makers, count_reads, only_prim
from forge.transforms.replacement import rewrite
from forge.transforms.result_strides import Strides, results_to_restore

SOFTMAX = frozenset({torchlang.softmax, torchlang.functional_softmax})
_MAXIMA = frozenset({prims.amax, prims.max_dim})


class _Sinks(NamedTuple):
    """The operands of a joined softmax."""

    scores: TensorProxy
    sinks: TensorProxy


def separate_sinks(
    trace: Trace, strides: Callable[[Trace], Strides], in_torch: Callable[[BoundSymbol], bool] = lambda bound: True
) -> Trace:
    """Return the trace with softmax of scores and sinks apart.

    Args:
        trace: The program.
        strides: Returns torch's strides of the values of a trace, by name.
        in_torch: Returns whether a call runs as torch runs it.
    """
    if SOFTMAX.isdisjoint(bound.symbol for bound in trace.bound_symbols):
        return trace
    makers = Makers(trace)
    reads = count_reads(trace)
    sites: dict[str, _Sinks] = {}
    for bound in trace.bound_symbols:
        joined = _joined_scores(bound, makers, reads, in_torch)
        if joined is not None:
            sites[bound.output.name] = joined
    if not sites or results_to_restore(trace, lambda bound: not sites.keys().isdisjoint(bound.outputs), strides) != {}:
        return trace

    def separate(bound: BoundSymbol) -> TensorProxy | None:
        site = sites.get(bound.output.name) if isinstance(bound.output, TensorProxy) else None
        return None if site is None else clang.sink_softmax(*(clang.convert(x, bound.output.dtype) for x in site))

    return rewrite(trace, "separate_sinks", separate, language=clang.language)


def _joined_scores(
    bound: BoundSymbol, makers: Makers, reads: Counter[str], in_torch: Callable[[BoundSymbol], bool]
) -> _Sinks | None:
    """Return the scores and sinks whose softmax this call slices, and nothing else reads."""
    prim = only_prim(bound)
    if prim is None or prim.symbol is not prims.slice:
        return None
    weights, dim, start, _, step = prim.args
    softmax = makers.calls.get(weights.name)
    if softmax is None or softmax.symbol not in SOFTMAX or reads[weights.name] != 1 or not in_torch(softmax):
        return None
    arguments = softmax.symbol.bind(softmax.args, softmax.kwargs)
    x = _without_maximum(arguments["input"], makers, reads)
    last = weights.ndim - 1
    cat = makers.calls.get(x.name) if x is not None else None
    if cat is None or x is None or cat.symbol is not torchlang.cat or arguments["dim"] not in (-1, last):
        return None
    operands = list(tensors(cat.args))
    if len(operands) != 2 or _joined_dim(cat) != last or cat.mode != bound.mode or softmax.mode != bound.mode:
        return None
    scores, sinks = operands
    is_whole = (dim, start, step) == (last, 0, 1) and same_shape(bound.output.shape, scores.shape)
    is_alike = scores.dtype == sinks.dtype and statically_true(sinks.shape[-1] == 1)
    is_empty = statically_true(scores.shape[-1] == 0)  # no row has a largest value
    is_taken = is_whole and is_alike and not is_empty and scores.dtype.is_floating_point
    return _Sinks(scores, sinks) if is_taken else None


def _without_maximum(x: TensorProxy, makers: Makers, reads: Counter[str]) -> TensorProxy | None:
    """Return the values of which x is the difference to the largest in each row, or x; None if others read them."""
    call = makers.calls.get(x.name)
    if call is None or call.symbol is not torchlang.sub:
        return x if reads[x.name] == 1 else None
    source, largest = list(call.symbol.bind(call.args, call.kwargs).values())[:2]
    maker = makers.prim(largest.name) if isinstance(largest, TensorProxy) else None
    while maker is not None and maker.symbol is prims.broadcast_in_dim:
        maker = makers.prim(maker.args[0].name)
    is_maximum = maker is not None and maker.symbol in _MAXIMA and maker.args[0] is source
    dims = None if maker is None else maker.args[1]
    is_of_rows = dims in (source.ndim - 1, (source.ndim - 1,))
    is_own = reads[x.name] == 1 and reads[source.name] == 2 and reads[largest.name] == 1
    return source if is_maximum and is_of_rows and is_own else None


def _joined_dim(cat: BoundSymbol) -> int | None:
    prim = only_prim(cat)
    return None if prim is None else prim.args[1]
