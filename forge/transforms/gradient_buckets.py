"""Gradients that leave a backward in buckets, each as soon as it is computed.

torch's autograd passes a node's gradients on when the node has run. A backward of one node returns all at its end, so
that the first ones cannot be sent while the last ones are computed. So the backward of a model whose gradients are sent
is a generator: `yield` follows the last call that computes a bucket's gradients, and forge/runtime/autograd.py has a
node per bucket. A suspended generator owns none of the gradients that it yielded: torch's autograd makes a tensor
without other owners a parameter's gradient, and copies others.
"""

import math
from collections.abc import Iterable, Sequence

from forge.ir import BoundSymbol, Proxy, TensorProxy, Trace
from forge.ir.printing import BOX, YIELD

FIRST_BYTES = 1 << 20  # the first bucket is small, so that sending begins early; torch's is, too


def find_buckets(trace: Trace, limit: int, reached: Iterable[int]) -> list[list[int]]:
    """Return the positions of the outputs of a claimed backward by bucket, each of at least `limit` bytes but the first
    and the last one, in the order in which they are computed. Empty if there would be one bucket.

    reached: the positions of all outputs that another set of gradients may reach; those that this backward does not
    compute are in the last bucket.
    """
    producers = _made_by(trace)
    order = sorted((producers.get(x.name, -1), i) for i, x in enumerate(trace.output) if isinstance(x, TensorProxy))
    parts: list[list[int]] = [[]]
    size, enough = 0, min(limit, FIRST_BYTES)
    for _, position in order:
        if size >= enough:
            parts.append([])
            size, enough = 0, limit
        parts[-1].append(position)
        size += _bytes(trace.output[position])
    if len(parts) < 2:
        return []
    parts[-1] += sorted(set(reached).difference(*parts))
    return parts


def in_buckets(trace: Trace, parts: Sequence[Sequence[int]]) -> Trace:
    """Return the backward as a generator that yields each bucket, in order; unchanged if there are none."""
    if not parts:
        return trace
    producers = _made_by(trace)
    places: dict[int, list[BoundSymbol]] = {}
    last = -1
    for positions in parts:
        gradients = tuple(trace.output[i] for i in positions)
        last = max([last, *(producers.get(x.name, -1) for x in gradients if isinstance(x, TensorProxy))])
        part = Proxy(trace.fresh_name("gradients"))
        places.setdefault(last, []).extend(
            (BoundSymbol(BOX, gradients, {}, part), BoundSymbol(YIELD, (part,), {}, None))
        )
    calls = list(places.get(-1, ()))
    for i, bound in enumerate(trace.bound_symbols):
        calls += [bound, *places.get(i, ())]
    return trace.derive(f"{trace.stage}, in parts", calls, output=())


def _made_by(trace: Trace) -> dict[str, int]:
    return {name: i for i, bound in enumerate(trace.bound_symbols) for name in bound.outputs}


def _bytes(x: TensorProxy) -> int:
    sizes = [size for size in x.shape if isinstance(size, int)]
    return math.prod(sizes) * x.dtype.itemsize
