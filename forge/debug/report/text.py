"""An explanation as text: tables of the calls that run, with equal layers merged, and each reason once below them."""

import io
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from forge.compiler.report import SHORTENED
from forge.debug.report.folding import Line, fold_layers, lines
from forge.debug.report.rows import CollectiveRow, CostRow
from forge.ir.printing import in_seconds, quantity

if TYPE_CHECKING:
    from forge.debug.report.explanation import Explanation

WIDTH = 120  # the default line width
_COLUMNS = {
    "module": "",
    "operation": "",
    "result": "",
    "executor": "bold",
    "time": "",
    "memory": "",
    "declined": "",
    "source": "dim",
}  # with their styles
_GAP = 2
_NARROWEST, _OPERATION, _SOURCE = 6, 24, 20
_NAMED = 4  # the number of kinds of overlapping calls that are named
_UNITS = ("B", "kB", "MB", "GB", "TB")


def plain(explanation: "Explanation") -> str:
    """Return the text of a report without colours, as wide as the terminal."""
    width = shutil.get_terminal_size((WIDTH, 0)).columns if sys.stdout.isatty() else WIDTH
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None, highlight=False, emoji=False, markup=False)
    for each in render(explanation):
        console.print(each, soft_wrap=isinstance(each, Text))  # the reader's terminal wraps text
    lines = file.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines)


def render(explanation: "Explanation") -> Iterator[RenderableType]:
    """Yield the renderables that rich prints."""
    yield Text(summary(explanation), style="bold")
    if not explanation.rows:
        yield from _reasons(explanation, {})
        return
    notes: dict[tuple[str, str], int] = {}
    for (graph, phase), rows in groupby(explanation.rows, key=lambda row: (row.graph, row.phase)):
        costs = [each for each in explanation.costs if (each.graph, each.phase) == (graph, phase)]
        title = f"graph {graph}, {phase}" if explanation.graphs > 1 else phase
        yield Text(f"\n{title}{_time_by_executor(costs)}", style="bold")
        by_output = {name: each for each in costs for name in each.outputs}
        folds = fold_layers(lines(list(rows)))
        yield _Table([(*cells, _cost(calls, by_output)) for fold in folds for cells, calls in fold.columns], notes)
    yield from _reasons(explanation, notes)


def summary(explanation: "Explanation") -> str:
    """Return the first line."""
    if explanation.ungiven:
        breaks = "; what Dynamo says of graph breaks in this process:" if explanation.graph_breaks else ""
        why = "it was not called yet, runs in eager, or runs graphs of what torch.compile made of the same code before"
        return f"{explanation.name}: Dynamo gave forge no graph: {why}{breaks}"
    if not explanation.captured:
        return "nothing was compiled yet: call the function first"
    if not explanation.graphs:
        return (
            f"{explanation.name}: nothing was compiled, it runs in eager"
            if explanation.graph_breaks
            else (f"{explanation.name}: nothing was compiled, since it calls nothing of torch")
        )
    claimed = ", ".join(f"{name} {count}" for name, count in explanation.executors.items())
    parts = [
        quantity(explanation.graphs, "graph"),
        f"{quantity(len(explanation.rows), 'operation')} ({claimed})",
        quantity(len(explanation.opaque_calls), "opaque call"),
        quantity(len(explanation.graph_breaks), "graph break"),
        quantity(len(explanation.recompiles), "recompile"),
    ]
    if explanation.numerics != "fast":
        parts.append(f"numerics: {explanation.numerics}")
    if explanation.cached:
        parts.append(f"{explanation.cached} from disk")
    if explanation.recorded:
        parts.append(f"CUDA graphs: {explanation.recorded}")
    if explanation.saved:
        parts.append(f"{in_bytes(explanation.saved_bytes)} saved for the backward")
    if explanation.seconds:
        parts.append(f"compiled in {sum(explanation.seconds.values()):.1f} s")
    return f"{explanation.name}: {', '.join(parts)}"


def _time_by_executor(costs: Sequence[CostRow]) -> str:
    """Return `: 1.2 ms (inductor 60 %, torch 40 %)`, or an empty string if nothing was measured."""
    total = sum(each.seconds for each in costs)
    if not total:
        return ""
    by_executor: dict[str, float] = {}
    for each in costs:
        by_executor[each.executor] = by_executor.get(each.executor, 0.0) + each.seconds
    longest = sorted(by_executor.items(), key=lambda each: -each[1])
    shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in longest)
    return f": {in_seconds(total)} ({shares})"


def _cost(calls: Sequence[Line], by_output: Mapping[str, CostRow]) -> tuple[str, str]:
    """Return the total (time, memory) of calls, one of each layer."""
    names = [name for line in calls for row in line.rows for name in row.outputs]
    rows = {id(by_output[name]): by_output[name] for name in names if name in by_output}
    if not rows:
        return "", ""
    seconds, size = (sum(getattr(each, what) for each in rows.values()) for what in ("seconds", "bytes"))
    return in_seconds(seconds), in_bytes(size)


class _Table:
    """A table of lines that fits the width, with module, time and memory of each. notes: the number of each reason,
    which is printed below."""

    def __init__(self, lines: Sequence[tuple[Line, str, tuple[str, str]]], notes: dict[tuple[str, str], int]) -> None:
        columns: dict[str, list[str]] = {name: [] for name in _COLUMNS}
        for line, module, cost in lines:
            marks = "".join(f"[{notes.setdefault(each, len(notes) + 1)}]" for each in line.declined)
            cells = (module, line.operation, line.result, line.executor, *cost, marks, line.source)
            for name, cell in zip(_COLUMNS, cells, strict=True):
                columns[name].append(cell)
        self._columns = {name: cells for name, cells in columns.items() if any(cells)}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim", show_edge=False)
        widths = self._widths(options.max_width)
        for name, width in widths.items():
            style = _COLUMNS[name]
            last = name == "source"  # the source is truncated, other columns wrap
            table.add_column(name, style=style, width=width, no_wrap=last, overflow="ellipsis" if last else "fold")
        columns = dict(self._columns)
        if "source" in columns:
            columns["source"] = [_with_line(cell, widths["source"]) for cell in columns["source"]]
        for cells in zip(*columns.values(), strict=True):
            table.add_row(*map(Text, cells))
        yield table

    def _widths(self, available: int) -> dict[str, int]:
        """Return the width of each column. Missing space is taken from the source and then from the widest."""
        widths = {name: max(map(len, [name, *cells])) for name, cells in self._columns.items()}
        words = [word for cell in self._columns["operation"] for word in cell.split()]  # a fusion's cell wraps
        widths["operation"] = max(map(len, [*words, " " * _OPERATION]))
        missing = sum(widths.values()) + _GAP * len(widths) - available
        if "source" in widths:
            widths["source"] -= max(0, min(missing, widths["source"] - _SOURCE))
        while sum(widths.values()) + _GAP * len(widths) > available and max(widths.values()) > _NARROWEST:
            widths[max(widths, key=widths.__getitem__)] -= 1
        return widths


def _with_line(source: str, width: int) -> str:
    """Return `model.py:12  h = x @ w` in `width` columns.

    The code is truncated first, then the end of the file's name, never the line number.
    """
    place, gap, _ = source.partition("  ")
    if len(source) <= width or len(place + gap) + 2 <= width:  # the table truncates the code
        return source
    if len(place) <= width:
        return place
    name, colon, line = place.rpartition(":")
    room = width - len(f"…{colon}{line}")
    return f"{name[:room]}…{colon}{line}" if room >= 0 else line


def _reasons(explanation: "Explanation", notes: dict[tuple[str, str], int]) -> Iterator[RenderableType]:
    """Yield the lines below the tables, one for each reason, without line breaks."""
    declined = [f"[{number}] {name}: {reason}" for (name, reason), number in notes.items()]
    if declined:
        yield Text("\ndeclined", style="bold")
        yield from [_no_wrap(f"  {line}") for line in declined]
    for title, counts in reasons(explanation).items():
        for reason, count in counts.items():
            yield _no_wrap(f"{title}: {reason}{f' (×{count})' if count > 1 else ''}")


def reasons(explanation: "Explanation") -> dict[str, Counter[str]]:
    """Return the events besides the operations, by their headings, each with its count."""
    reasons_of = {
        "opaque calls": explanation.opaque_calls,
        "graph breaks": explanation.graph_breaks,
        "recompiles": explanation.recompiles,
        "run in eager": explanation.eager,
        "no graph of": explanation.skipped,
        "outside of what is jitted": explanation.outside,
        "collectives": list(_collectives(explanation.collectives)),
        "ranks differ": explanation.ranks,
        "not kept on disk": explanation.uncached,
        "outside of CUDA graphs": explanation.unrecorded,
        "frozen": explanation.frozen,
        "not frozen": explanation.unfrozen,
        "edited": explanation.edited,
        "layers": list(map(str, explanation.layers)),
        "measured": list(map(str, explanation.measured)),
        "not profiled": explanation.unprofiled,
        "stages": [SHORTENED] if explanation.shortened else [],
    }
    return {title: Counter(each.strip().splitlines()[0] for each in what) for title, what in reasons_of.items() if what}


def _collectives(rows: Sequence[CollectiveRow]) -> Iterator[str]:
    """Yield a line for the messages of one kind in one phase."""
    kinds: dict[tuple, list[CollectiveRow]] = {}
    for row in rows:
        kinds.setdefault((row.phase, row.operation, row.group, row.group_size), []).append(row)
    for (phase, operation, group, size), messages in kinds.items():
        sent_bytes, whole, tensors = (
            sum(getattr(row, what) for row in messages) for what in ("sent_bytes", "bytes", "tensors")
        )
        exposed = sum(not row.overlap for row in messages)
        names = Counter(name for row in messages for name in row.overlap)
        calls = [f"{name}{f' ×{count}' if count > 1 else ''}" for name, count in names.most_common(_NAMED)]
        calls += ["…"] if len(names) > _NAMED else []
        yield ", ".join(
            [
                f"{phase}, {operation} over {f'{size} processes' if size else f'group {group}'}: "
                + quantity(len(messages), "message"),
                quantity(tensors, "tensor"),
                f"{in_bytes(whole)} ({in_bytes(sent_bytes)} sent by each process)",
                *([f"during {' '.join(calls)}"] if calls else []),
                *([f"{exposed} with no call meanwhile"] if exposed else []),
            ]
        )


def _no_wrap(line: str) -> Text:
    return Text(line, overflow="ignore")


def in_bytes(count: float) -> str:
    """Return a number of bytes as `12.3 kB`."""
    power = 0
    while count >= 1000 and power < len(_UNITS) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.{min(power, 1)}f} {_UNITS[power]}"
