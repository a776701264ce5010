"""Attention keys and values repeated for each group of queries are passed unrepeated, with enable_gqa.

    key = key[:, :, None].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)

(or repeat_interleave, or the same before heads and positions are transposed) is what torch's kernels can read without a
copy, if they support groups of queries. Keys and values of one head, which torch would broadcast in its composition,
are passed to its kernels in the same way, or expanded.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from forge import prims, torchlang
from forge.clang import language
from forge.ir import BoundSymbol, TensorProxy, Trace
from forge.ir.proxies import Dim
from forge.transforms.makers import Makers
from forge.transforms.replacement import rewrite

ATTENTION = torchlang.scaled_dot_product_attention
_ATTENDING = frozenset({ATTENTION, torchlang.window_attention})


class _Repetition(NamedTuple):
    """A tensor whose heads are each repeated; `order` permutes it to (batch, heads, length, width)."""

    source: TensorProxy
    order: tuple[int, ...]
    times: Dim


class _Expansion(NamedTuple):
    """A tensor whose batch and heads are expanded to these sizes."""

    source: TensorProxy
    sizes: tuple[Dim, ...]


def grouped_queries(
    trace: Trace,
    takes: Callable[[TensorProxy, Dim, dict[str, Any]], bool],
    takes_broadcast: Callable[[dict[str, Any]], tuple[bool, bool]],
    in_torch: Callable[[BoundSymbol], bool] = lambda bound: True,
) -> Trace:
    """Return the trace with unrepeated keys and values in attention calls.

    takes: whether the kernel of a call supports groups of queries, from the query, the repetitions of a head, and the
    call's arguments; a window's does. takes_broadcast: the same of a call's arguments if keys and values have one head
    or one batch, and whether a kernel runs them expanded. Calls with dropout stay (another kernel draws other values),
    and those that do not run as torch runs them (`in_torch`).
    """
    if all(bound.symbol not in _ATTENDING for bound in trace.bound_symbols):
        return trace
    makers = Makers(trace)
    sites: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for bound in trace.bound_symbols:
        if bound.symbol not in _ATTENDING:
            continue
        arguments = bound.symbol.bind(bound.args, bound.kwargs)
        if arguments.get("dropout_p") or arguments["enable_gqa"]:
            continue
        if bound.symbol is ATTENTION:
            change = _shared_heads(arguments, takes_broadcast) or _repeated_heads(arguments, makers, bound, takes)
        else:
            change = _repeated_heads(arguments, makers, bound, lambda *call: True)
        if change is not None and in_torch(bound):
            sites[bound.output.name] = arguments, change
    return _rewrite(trace, sites) if sites else trace


def _repeated_heads(
    arguments: dict[str, Any],
    makers: Makers,
    bound: BoundSymbol,
    takes: Callable[[TensorProxy, Dim, dict[str, Any]], bool],
) -> dict[str, Any] | None:
    """Return the arguments that change if a kernel takes the unrepeated keys and values."""
    if not _alike(arguments["query"], arguments["key"], arguments["value"]):
        return None
    key, value = [_find_repetition(arguments[name], makers, bound) for name in ("key", "value")]
    if key is None or value is None or not prims.statically_true(key.times == value.times):
        return None
    return {"key": key, "value": value, "enable_gqa": True} if takes(arguments["query"], key.times, arguments) else None


def _shared_heads(
    arguments: dict[str, Any], takes_broadcast: Callable[[dict[str, Any]], tuple[bool, bool]]
) -> dict[str, Any] | None:
    """Return the arguments that change if a kernel takes keys and values that broadcast to the query's batch and
    heads."""
    query, key, value = arguments["query"], arguments["key"], arguments["value"]
    if any(x.ndim != 4 for x in (query, key, value)) or _alike(query, key, value):
        return None
    sizes = [(x.shape[dim], query.shape[dim]) for x in (key, value) for dim in (0, 1)]
    if not all(prims.statically_true(size == 1) or prims.statically_true(size == target) for size, target in sizes):
        return None
    as_groups, expanded = takes_broadcast(arguments)
    if as_groups and _alike(key, value) and prims.statically_true(key.shape[0] == query.shape[0]):
        return {"enable_gqa": True}
    wide = {name: _Expansion(arguments[name], query.shape[:2]) for name in ("key", "value")}
    return wide if expanded else None


def _alike(query: TensorProxy, *others: TensorProxy) -> bool:
    """Return whether all have four dims, and the same batch and number of heads."""
    tensors = (query, *others)
    return all(
        x.ndim == 4 and all(prims.statically_true(x.shape[dim] == query.shape[dim]) for dim in (0, 1)) for x in tensors
    )


def _find_repetition(x: TensorProxy, makers: Makers, reader: BoundSymbol) -> _Repetition | None:
    """Return the repetition that produces x, or None."""
    order = (0, 1, 2, 3)
    call = _maker(x, makers, reader)
    if call is not None and call.symbol is prims.permute:
        order = tuple(call.args[1])
        call = _maker(call.args[0], makers, reader)
    if call is None or call.symbol is not prims.reshape or len(order) != 4:
        return None
    joined, wide, heads = call.output, call.args[0], order[1]
    source, dims = wide, tuple(range(wide.ndim))
    while (call := _maker(source, makers, reader)) is not None and call.symbol is prims.broadcast_in_dim:
        source, dims = call.args[0], tuple(dims[dim] for dim in call.args[2])
    if dims != tuple(dim for dim in range(5) if dim != heads + 1) or joined.ndim != 4:
        return None
    if source.name not in makers.calls and makers.prim(source.name) is not None:  # the inside of a composite
        return None
    sizes = [(wide.shape[place], size) for place, size in zip(dims, source.shape, strict=True)]
    times = wide.shape[heads + 1]
    expected = [size * times if dim == heads else size for dim, size in enumerate(source.shape)]
    sizes += zip(joined.shape, expected, strict=True)
    return (
        _Repetition(source, order, times) if all(prims.statically_true(one == other) for one, other in sizes) else None
    )


def _maker(x: TensorProxy, makers: Makers, reader: BoundSymbol) -> BoundSymbol | None:
    """Return the prim that computes x, past copies; None if its gradients, or its saving, would differ."""
    call = makers.prim(x.name)
    while call is not None and call.symbol in (prims.contiguous, prims.clone):
        call = makers.prim(call.args[0].name)
    if call is None or call.mode != reader.mode:
        return None
    return call


def _rewrite(trace: Trace, sites: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> Trace:
    def attend(bound: BoundSymbol) -> TensorProxy | None:
        if bound.symbol not in _ATTENDING or bound.output.name not in sites:
            return None
        arguments, change = sites[bound.output.name]
        changed = {name: _as_argument(each) for name, each in change.items()}
        output: TensorProxy = bound.symbol(**{**arguments, **changed})
        return output

    return rewrite(trace, "grouped_queries", attend, language=language)


def _as_argument(value: Any) -> Any:
    if isinstance(value, _Expansion):
        return torchlang.expand(value.source, (*value.sizes, *value.source.shape[2:]))
    if not isinstance(value, _Repetition):
        return value
    return value.source if value.order == (0, 1, 2, 3) else prims.permute(value.source, value.order)
