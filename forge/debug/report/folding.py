"""Grouping of rows into the calls that run, and of equal layers into one."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile
from typing import NamedTuple

from forge.debug.report.rows import Row
from forge.ir.printing import quantity

LAYER = re.compile(r"(^|\.)(\d+)(?=\.|$)")
_SHOWN = 8  # the number of a fusion's operations that are shown by name


class Line(NamedTuple):
    """One call that runs: one row, or the rows of a fusion."""

    module: str
    operation: str
    result: str
    executor: str
    declined: tuple[tuple[str, str], ...]
    source: str
    rows: tuple[Row, ...]

    @property
    def layer(self) -> int | None:
        """The number of the layer that makes the call."""
        match = LAYER.search(self.module)
        return int(match[2]) if match else None

    @property
    def pattern(self) -> tuple:
        """Return the fields that equal calls of different layers share, with `*` for the layer's index."""
        results = re.sub(r"\w+: ", "", self.result)
        operation = re.sub(r"fusion\d+", "fusion", self.operation)
        return LAYER.sub(r"\1*", self.module), operation, results, self.executor, self.declined, self.source


def lines(rows: Sequence[Row]) -> list[Line]:
    """Return a line for each call; a fusion is at the position of its first operation."""
    regions: dict[str, list[Row]] = {}
    for row in rows:
        if row.region is not None:
            regions.setdefault(row.region, []).append(row)
    entries = []
    for row in rows:
        if row.region is None:
            result = ", ".join(f"{name}: {each}" for name, each in zip(row.outputs, row.results, strict=True))
            module, source = row.module or "", row.source or ""
            entries.append(Line(module, row.operation, result, row.executor, row.declined, source, (row,)))
        elif row.region in regions:
            entries.append(_fusion(row.region, regions.pop(row.region)))
    return entries


def _fusion(name: str, rows: Sequence[Row]) -> Line:
    counts = Counter(row.operation for row in rows)
    names = [f"{name} ×{count}" if count > 1 else name for name, count in list(counts.items())[:_SHOWN]]
    more = [f"{len(counts) - _SHOWN} more"] if len(counts) > _SHOWN else []
    operations = ", ".join([*names, *more])
    declined = tuple(dict.fromkeys(each for row in rows for each in row.declined))
    first = next((row.source for row in rows if row.source), "")
    module = _common([row.module for row in rows if row.module])
    result = quantity(len(rows), "operation")
    return Line(module, f"{name}: {operations}", result, rows[0].executor, declined, first, tuple(rows))


def _common(modules: Sequence[str]) -> str:
    """Return the common prefix of module paths."""
    parts = [module.split(".") for module in modules]
    alike = takewhile(lambda names: len(set(names)) == 1, zip(*parts, strict=False))
    return ".".join(names[0] for names in alike)


class Fold(NamedTuple):
    """Calls that repeat for consecutive layers: a list of calls per layer. A single list means calls that do not
    repeat."""

    layers: list[list[Line]]

    @property
    def display_lines(self) -> list[tuple[Line, str]]:
        """Return the first layer's calls, with the modules of all layers, such as `layers.{0..5}.up`."""
        return [(line, _module(line, last)) for line, last in zip(self.layers[0], self.layers[-1], strict=True)]

    @property
    def columns(self) -> list[tuple[tuple[Line, str], list[Line]]]:
        """Return each entry of `display_lines` with the calls of all layers that it represents."""
        return list(zip(self.display_lines, map(list, zip(*self.layers, strict=True)), strict=True))


def _module(first: Line, last: Line) -> str:
    if first.layer is None or first.layer == last.layer:
        return first.module
    return LAYER.sub(rf"\g<1>{{{first.layer}..{last.layer}}}", first.module, count=1)


def fold_layers(calls: Sequence[Line]) -> list[Fold]:
    """Return the calls in order; fold calls that repeat for consecutive layers, the longest repetition first."""
    patterns = [call.pattern for call in calls]
    return list(_folds(calls, patterns, 0, len(calls)))


def _folds(calls: Sequence[Line], patterns: Sequence[tuple], start: int, end: int) -> Iterator[Fold]:
    if start == end:
        return
    best = max(
        _repetitions(calls, patterns, start, end), key=lambda repetition: repetition[1] * repetition[2], default=None
    )
    if best is None:
        yield Fold([list(calls[start:end])])
        return
    at, period, times = best
    stop = at + period * times
    yield from _folds(calls, patterns, start, at)
    yield Fold([list(calls[begin : begin + period]) for begin in range(at, stop, period)])
    yield from _folds(calls, patterns, stop, end)


def _repetitions(
    calls: Sequence[Line], patterns: Sequence[tuple], start: int, end: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (start, number of calls, number of repetitions) of calls that repeat with adjacent layer numbers."""
    for period, step in _periods(calls, patterns, start, end):
        run = 0
        for at in range(end - period - 1, start - 1, -1):
            run = run + 1 if _follows(calls, patterns, at, period, step) else 0
            times = run // period + 1
            if times > 1 and any(call.layer is not None for call in calls[at : at + period]):
                yield at, period, times


def _periods(calls: Sequence[Line], patterns: Sequence[tuple], start: int, end: int) -> list[tuple[int, int]]:
    """Return the distances of calls to the equal calls of an adjacent layer, and whether that layer precedes or
    follows."""
    places: dict[tuple, list[tuple[int, int]]] = {}
    for at in range(start, end):
        layer = calls[at].layer
        if layer is not None:
            places.setdefault(patterns[at], []).append((at, layer))
    return sorted(
        {
            (other - at, neighbour - layer)
            for sites in places.values()
            for (at, layer), (other, neighbour) in pairwise(sites)
            if abs(neighbour - layer) == 1
        }
    )


def _follows(calls: Sequence[Line], patterns: Sequence[tuple], at: int, period: int, step: int) -> bool:
    if patterns[at] != patterns[at + period]:
        return False
    layer = calls[at].layer
    return layer is None or calls[at + period].layer == layer + step
