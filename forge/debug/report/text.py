"""An explanation as text: what runs in tables, layers that are alike once, and below them each reason once."""

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
from forge.debug.report.rows import CostRow
from forge.ir.printing import in_seconds, quantity

if TYPE_CHECKING:
    from forge.debug.report.explanation import Explanation

WIDTH = 120  # where nobody says how wide lines may be
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
_UNITS = ("B", "kB", "MB", "GB", "TB")


def plain(told: "Explanation") -> str:
    """Without colours, as wide as the terminal."""
    width = shutil.get_terminal_size((WIDTH, 0)).columns if sys.stdout.isatty() else WIDTH
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False, emoji=False, markup=False)
    for each in render(told):
        console.print(each, soft_wrap=isinstance(each, Text))  # what is no table goes on as the reader's screen has it
    lines = console.file.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines)


def render(told: "Explanation") -> Iterator[RenderableType]:
    """Yield the renderables that rich prints."""
    yield Text(summary(told), style="bold")
    if not told.rows:
        yield from _reasons(told, {})
        return
    notes: dict[tuple[str, str], int] = {}
    for (graph, phase), rows in groupby(told.rows, key=lambda row: (row.graph, row.phase)):
        costs = [each for each in told.costs if (each.graph, each.phase) == (graph, phase)]
        title = f"graph {graph}, {phase}" if told.graphs > 1 else phase
        yield Text(f"\n{title}{_spent(costs)}", style="bold")
        by_output = {name: each for each in costs for name in each.outputs}
        folds = fold_layers(lines(list(rows)))
        yield _Table([(*shown, _cost(calls, by_output)) for fold in folds for shown, calls in fold.columns], notes)
    yield from _reasons(told, notes)


def summary(told: "Explanation") -> str:
    """Return the first line."""
    if told.ungiven:
        breaks = "; what Dynamo says of graph breaks in this process:" if told.graph_breaks else ""
        why = "it was not called yet, runs in eager, or runs graphs of what torch.compile made of the same code before"
        return f"{told.name}: Dynamo gave forge no graph: {why}{breaks}"
    if not told.captured:
        return "nothing was compiled yet: call the function first"
    if not told.graphs:
        return (
            f"{told.name}: nothing was compiled, it runs in eager"
            if told.graph_breaks
            else (f"{told.name}: nothing was compiled, since it calls nothing of torch")
        )
    claimed = ", ".join(f"{name} {count}" for name, count in told.executors.items())
    parts = [
        quantity(told.graphs, "graph"),
        f"{quantity(len(told.rows), 'operation')} ({claimed})",
        quantity(len(told.opaque_calls), "opaque call"),
        quantity(len(told.graph_breaks), "graph break"),
        quantity(len(told.recompiles), "recompile"),
    ]
    if told.numerics != "fast":
        parts.append(f"numerics: {told.numerics}")
    if told.cached:
        parts.append(f"{told.cached} from disk")
    if told.recorded:
        parts.append(f"CUDA graphs: {told.recorded}")
    if told.saved:
        parts.append(f"{in_bytes(told.saved_bytes)} saved for the backward")
    if told.seconds:
        parts.append(f"compiled in {sum(told.seconds.values()):.1f} s")
    return f"{told.name}: {', '.join(parts)}"


def _spent(costs: Sequence[CostRow]) -> str:
    """`: 1.2 ms (inductor 60 %, torch 40 %)`; nothing where nothing was measured."""
    total = sum(each.seconds for each in costs)
    if not total:
        return ""
    by_executor: Counter[str] = Counter()
    for each in costs:
        by_executor[each.executor] += each.seconds
    shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in by_executor.most_common())
    return f": {in_seconds(total)} ({shares})"


def _cost(calls: Sequence[Line], by_output: Mapping[str, CostRow]) -> tuple[str, str]:
    """(time, memory) of calls, one of each layer, together."""
    names = [name for line in calls for row in line.rows for name in row.outputs]
    found = {id(by_output[name]): by_output[name] for name in names if name in by_output}
    if not found:
        return "", ""
    seconds, size = (sum(getattr(each, what) for each in found.values()) for what in ("seconds", "bytes"))
    return in_seconds(seconds), in_bytes(size)


class _Table:
    """Lines as a table that fits: each with its module, and with its time and memory. notes: the number of each reason,
    which is written below."""

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
            last = name == "source"  # it is cut off, others go on in the next line
            table.add_column(name, style=style, width=width, no_wrap=last, overflow="ellipsis" if last else "fold")
        columns = dict(self._columns)
        if "source" in columns:
            columns["source"] = [_with_line(cell, widths["source"]) for cell in columns["source"]]
        for cells in zip(*columns.values(), strict=True):
            table.add_row(*map(Text, cells))
        yield table

    def _widths(self, available: int) -> dict[str, int]:
        """Return what each column would have, less what is missing, taken from the source and then from the widest."""
        widths = {name: max(map(len, [name, *cells])) for name, cells in self._columns.items()}
        words = [word for cell in self._columns["operation"] for word in cell.split()]  # a fusion's stand in lines
        widths["operation"] = max(map(len, [*words, " " * _OPERATION]))
        missing = sum(widths.values()) + _GAP * len(widths) - available
        if "source" in widths:
            widths["source"] -= max(0, min(missing, widths["source"] - _SOURCE))
        while sum(widths.values()) + _GAP * len(widths) > available and max(widths.values()) > _NARROWEST:
            widths[max(widths, key=widths.__getitem__)] -= 1
        return widths


def _with_line(source: str, width: int) -> str:
    """`model.py:12  h = x @ w` in `width` columns: the code goes first, then the end of the file's name, never the
    line's number."""
    place, gap, _ = source.partition("  ")
    if len(source) <= width or len(place + gap) + 2 <= width:  # the table cuts the code off
        return source
    if len(place) <= width:
        return place
    name, colon, line = place.rpartition(":")
    kept = width - len(f"…{colon}{line}")
    return f"{name[:kept]}…{colon}{line}" if kept >= 0 else line


def _reasons(told: "Explanation", notes: dict[tuple[str, str], int]) -> Iterator[RenderableType]:
    """Yield what stands below the tables; a line for each reason, which is never broken by us."""
    declined = [f"[{number}] {name}: {reason}" for (name, reason), number in notes.items()]
    if declined:
        yield Text("\ndeclined", style="bold")
        yield from [_no_wrap(f"  {line}") for line in declined]
    for title, counts in reasons(told).items():
        for reason, count in counts.items():
            yield _no_wrap(f"{title}: {reason}{f' (×{count})' if count > 1 else ''}")


def reasons(told: "Explanation") -> dict[str, Counter[str]]:
    """Return what happened besides the operations: by what it is called, each with how often it did."""
    found = {
        "opaque calls": told.opaque_calls,
        "graph breaks": told.graph_breaks,
        "recompiles": told.recompiles,
        "run in eager": told.eager,
        "no graph of": told.skipped,
        "outside of what is jitted": told.outside,
        "not kept on disk": told.uncached,
        "outside of CUDA graphs": told.unrecorded,
        "frozen": told.frozen,
        "not frozen": told.unfrozen,
        "edited": told.edited,
        "layers": list(map(str, told.layers)),
        "measured": list(map(str, told.measured)),
        "not profiled": told.unprofiled,
        "stages": [SHORTENED] if told.shortened else [],
    }
    return {title: Counter(each.strip().splitlines()[0] for each in what) for title, what in found.items() if what}


def _no_wrap(line: str) -> Text:
    return Text(line, overflow="ignore")


def in_bytes(count: float) -> str:
    """`12.3 kB`."""
    power = 0
    while count >= 1000 and power < len(_UNITS) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.{min(power, 1)}f} {_UNITS[power]}"
