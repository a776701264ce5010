"""Reads whose indices are known to be within bounds are marked (Tag.IN_BOUNDS), so that CPU regions may contain them.

torch raises if an index is out of bounds, and a region's loops would end the process. Clamped positions, buckets of
distances, indices of the largest values and constants are within bounds for all inputs.

Source: the value ranges of torch._inductor.bounds, by which Inductor omits its own checks.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import torch

from forge import prims, torchlang
from forge.ir import BoundSymbol, Symbol, Tag, TensorProxy, Trace
from forge.ir.proxies import Dim
from forge.prims.core import statically_true
from forge.transforms.makers import Makers, innermost

_INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_PLACES = _INTEGERS - {torch.bool, torch.uint8}  # of indices that are not masks
_READS = frozenset(  # Inductor lowers the others otherwise than their decompositions
    {
        torchlang.aten_index,
        torchlang.embedding,
        torchlang.gather,
        torchlang.getitem,
        torchlang.index_select,
        torchlang.take,
        torchlang.take_along_dim,
    }
)
_IN_BOUNDS = frozenset({Tag.IN_BOUNDS})


class Interval(NamedTuple):
    """The least and the greatest value of an integer tensor; None if unknown."""

    low: Dim | None = None
    high: Dim | None = None

    def is_within(self, lowest: Dim, size: Dim) -> bool:
        """Return whether every value is at least `lowest` and less than `size`."""
        if self.low is None or self.high is None:
            return False
        return statically_true(self.low >= lowest) and statically_true(self.high < size)


_UNKNOWN = Interval()


def mark_bounded(trace: Trace, folded: Collection[str] = ()) -> Trace:
    """Return the trace with its CPU reads marked whose indices are within bounds; unchanged if there are none.

    folded: the names of constants that nothing can write to.
    """
    intervals = _Intervals(trace, folded)
    new = trace.derive("mark_bounded", [])
    changed = False
    for bound in trace.bound_symbols:
        if intervals.are_within(bound):
            bound, changed = _marked(bound), True
        new.bound_symbols.append(bound)
    return new if changed else trace


def _marked(bound: BoundSymbol) -> BoundSymbol:
    """Return a call that is marked, with its decomposition."""
    return bound.replace(tags=bound.tags | _IN_BOUNDS, subsymbols=[_marked(sub) for sub in bound.subsymbols])


_Index = tuple[TensorProxy, Dim, Dim]  # an index, the size of the dim along which it reads, and its least allowed value


def _of_index(x: TensorProxy, indices: tuple[TensorProxy | None, ...]) -> Iterable[_Index]:
    return [(each, size, -size) for each, size in zip(indices, x.shape, strict=False) if each is not None]


def _of_gather(x: TensorProxy, dim: int, index: TensorProxy) -> Iterable[_Index]:
    return [(index, x.shape[dim] if x.ndim else 1, 0)]


def _of_embedding(weight: TensorProxy, indices: TensorProxy, *options: Any) -> Iterable[_Index]:
    return [(indices, weight.shape[0], 0)]


_INDICES: dict[Symbol, Callable[..., Iterable[_Index]]] = {
    prims.index: _of_index,
    prims.gather: _of_gather,
    prims.embedding: _of_embedding,
}


class _Intervals:
    """The intervals of the values of a trace, computed on demand."""

    def __init__(self, trace: Trace, folded: Collection[str]) -> None:
        self._makers = Makers(trace)
        self._constants = {name: trace.constants[name] for name in folded}
        self._by_name: dict[str, Interval] = {}

    def of(self, value: Any) -> Interval:
        """Return the interval of a tensor or of a number."""
        if not isinstance(value, TensorProxy):
            return Interval(value, value) if isinstance(value, (int, torch.SymInt)) else _UNKNOWN
        if value.name not in self._by_name:
            self._by_name[value.name] = _UNKNOWN if value.dtype not in _INTEGERS else self._find(value)
        return self._by_name[value.name]

    def are_within(self, bound: BoundSymbol) -> bool:
        """Return whether a call on a CPU reads by indices, and all of them are within bounds."""
        if bound.symbol not in _READS or bound.output.device.type != "cpu":
            return False
        self.made_by(bound.output)  # this makes values inside the call known
        reads = [
            read for call in innermost(bound) if call.symbol in _INDICES for read in _INDICES[call.symbol](*call.args)
        ]
        return bool(reads) and all(
            index.dtype in _PLACES and self.of(index).is_within(lowest, size) for index, size, lowest in reads
        )

    def made_by(self, value: Any) -> BoundSymbol | None:
        """Return the prim that computes a value of the program."""
        return self._makers.prim(value.name) if isinstance(value, TensorProxy) else None

    def _find(self, value: TensorProxy) -> Interval:
        constant = self._constants.get(value.name)
        if constant is not None:
            return _of_constant(constant)
        call = self.made_by(value)
        rule = _RULES.get(call.symbol) if call is not None else None
        if call is None or rule is None:
            return Interval(0, 1) if value.dtype == torch.bool else _UNKNOWN
        return rule(self, call, value)


def _of_constant(constant: torch.Tensor) -> Interval:
    if constant.device.type != "cpu" or constant.numel() == 0:
        return _UNKNOWN
    low, high = torch.aminmax(constant.long())
    return Interval(int(low), int(high))


def _least(a: Dim | None, b: Dim | None) -> Dim | None:
    """Return the smaller of two bounds, if it is known which one that is."""
    if a is None or b is None:
        return None
    return a if statically_true(a <= b) else b if statically_true(b <= a) else None


def _largest(a: Dim | None, b: Dim | None) -> Dim | None:
    if a is None or b is None:
        return None
    return a if statically_true(a >= b) else b if statically_true(b >= a) else None


def _union(intervals: Iterable[Interval]) -> Interval:
    first, *rest = intervals
    for each in rest:
        first = Interval(_least(first.low, each.low), _largest(first.high, each.high))
    return first


def _of_iota(intervals: _Intervals, call: BoundSymbol, value: TensorProxy) -> Interval:
    length, start, step = call.args[:3]
    if not all(isinstance(each, (int, torch.SymInt)) for each in (start, step)):
        return _UNKNOWN
    return _union([Interval(start, start), intervals.of(start + step * (length - 1))])


def _of_full(intervals: _Intervals, call: BoundSymbol, value: TensorProxy) -> Interval:
    return intervals.of(call.args[1])


def _of_first(intervals: _Intervals, call: BoundSymbol, value: TensorProxy) -> Interval:
    """Return the interval of elements of the first argument."""
    return intervals.of(call.args[0])


def _of_conversion(intervals: _Intervals, call: BoundSymbol, value: TensorProxy) -> Interval:
    """Return the interval of integers that the new dtype can represent, too."""
    interval, limits = intervals.of(call.args[0]), torch.iinfo(value.dtype) if value.dtype != torch.bool else None
    if limits is None:
        return Interval(0, 1)
    return interval if interval.is_within(limits.min, limits.max) else _UNKNOWN


def _of_cat(intervals: _Intervals, call: BoundSymbol, value: TensorProxy) -> Interval:
    return _union(map(intervals.of, call.args[0]))


def _of_where(intervals: _Intervals, call: BoundSymbol, value: TensorProxy) -> Interval:
    """Return the interval of both choices; of the second one alone if the first applies to numbers less than a bound,
    as for indices from the end, and there are none."""
    condition = intervals.made_by(call.args[0])
    if condition is not None and condition.symbol is prims.lt:
        a, b = map(intervals.of, condition.args[:2])
        if a.low is not None and b.high is not None and statically_true(a.low >= b.high):
            return intervals.of(call.args[2])
    return _union(map(intervals.of, call.args[1:3]))


def _of_maximum(intervals: _Intervals, call: BoundSymbol, value: TensorProxy) -> Interval:
    """Return the interval of the maximum: a lower bound of either is one of the result."""
    a, b = map(intervals.of, call.args[:2])
    lows = [each for each in (a.low, b.low) if each is not None]
    return Interval(_largest(lows[0], lows[-1]) if lows else None, _largest(a.high, b.high))


def _of_minimum(intervals: _Intervals, call: BoundSymbol, value: TensorProxy) -> Interval:
    a, b = map(intervals.of, call.args[:2])
    highs = [each for each in (a.high, b.high) if each is not None]
    return Interval(_least(a.low, b.low), _least(highs[0], highs[-1]) if highs else None)


def _of_sum(intervals: _Intervals, call: BoundSymbol, value: TensorProxy) -> Interval:
    a, b = map(intervals.of, call.args[:2])
    return _without_overflow(_plus(a.low, b.low), _plus(a.high, b.high), value)


def _of_difference(intervals: _Intervals, call: BoundSymbol, value: TensorProxy) -> Interval:
    a, b = map(intervals.of, call.args[:2])
    return _without_overflow(_plus(a.low, b.high, -1), _plus(a.high, b.low, -1), value)


def _of_product(intervals: _Intervals, call: BoundSymbol, value: TensorProxy) -> Interval:
    a, b = map(intervals.of, call.args[:2])
    if not all(isinstance(each, int) for each in (*a, *b)):
        return _UNKNOWN
    ends = [one * other for one in a for other in b]  # type: ignore[operator]  # all are numbers
    return _without_overflow(min(ends), max(ends), value)


def _of_negation(intervals: _Intervals, call: BoundSymbol, value: TensorProxy) -> Interval:
    a = intervals.of(call.args[0])
    return _without_overflow(_plus(0, a.high, -1), _plus(0, a.low, -1), value)


def _of_remainder(intervals: _Intervals, call: BoundSymbol, value: TensorProxy) -> Interval:
    """Return the interval of remainders by a positive number, whose sign they have."""
    divisor = intervals.of(call.args[1])
    is_number = isinstance(divisor.low, int) and divisor.high == divisor.low > 0
    return Interval(0, divisor.low - 1) if is_number and divisor.low is not None else _UNKNOWN


def _of_places(intervals: _Intervals, call: BoundSymbol, value: TensorProxy) -> Interval:
    """Return the interval of indices along a dim, the call's only result or its second one."""
    x, dim = call.args[0], call.args[2 if call.symbol is prims.topk else 1]
    if isinstance(call.output, (tuple, list)) and call.output[0].name == value.name:
        return intervals.of(x)
    return Interval(0, x.shape[dim] - 1) if x.ndim else _UNKNOWN


def _plus(a: Dim | None, b: Dim | None, sign: int = 1) -> Dim | None:
    return None if a is None or b is None else a + sign * b


def _without_overflow(low: Dim | None, high: Dim | None, value: TensorProxy) -> Interval:
    """Return an interval; an unknown one if a value may be outside of the dtype's range."""
    limits = torch.iinfo(value.dtype) if value.dtype != torch.bool else None
    interval = Interval(low, high)
    return interval if limits is not None and interval.is_within(limits.min, limits.max) else _UNKNOWN


_RULES: dict[Symbol, Callable[[_Intervals, BoundSymbol, TensorProxy], Interval]] = {
    prims.iota: _of_iota,
    prims.full: _of_full,
    prims.convert_element_type: _of_conversion,
    **dict.fromkeys(
        (
            prims.broadcast_in_dim,
            prims.clone,
            prims.contiguous,
            prims.device_put,
            prims.embedding,
            prims.flip,
            prims.gather,
            prims.index,
            prims.permute,
            prims.reshape,
            prims.slice,
            prims.squeeze,
        ),
        _of_first,
    ),
    prims.cat: _of_cat,
    prims.where: _of_where,
    prims.maximum: _of_maximum,
    prims.minimum: _of_minimum,
    prims.add: _of_sum,
    prims.sub: _of_difference,
    prims.mul: _of_product,
    prims.neg: _of_negation,
    prims.remainder: _of_remainder,
    **dict.fromkeys((prims.argmax, prims.argmin, prims.max_dim, prims.min_dim, prims.sort, prims.topk), _of_places),
}
