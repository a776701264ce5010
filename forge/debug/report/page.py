"""An explanation as a self-contained HTML page, assembled from page.html, page.css and page.js."""

import html
import json
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from itertools import groupby
from typing import TYPE_CHECKING, Any

from forge.compiler.report import CompileReport
from forge.debug.report import text
from forge.debug.report.folding import LAYER, Line, fold_layers, lines
from forge.ir import Trace
from forge.ir.printing import STATEMENTS
from forge.ir.pytree import proxies

if TYPE_CHECKING:
    from forge.debug.report.explanation import Explanation

COSTS = 25  # the number of operations whose cost is shown; the others are summed
BUDGET = 1_000_000  # characters of all stages' lines together; beyond it the middle stages are left out
_HEIGHT = 640  # the height of the page in a notebook
_PLACE = re.compile(r"\{\{(title|style|script|data)\}\}")
_PRINTED_OBJECT = re.compile(r"\bprinted_object\(\d+\)")
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def page(explanation: "Explanation", programs: Sequence[CompileReport | None], *, stages: bool = True) -> str:
    """Return the page. programs: one per graph, None if it was dropped. stages: whether the traces are shown."""
    parts = {
        "title": html.escape(f"{explanation.name} · forge.explain"),
        "style": _file("page.css"),
        "script": _file("page.js"),
        "data": _escape_json(_data(explanation, programs, stages=stages)),
    }
    return _PLACE.sub(lambda match: parts[match[1]], _file("page.html"))


def frame(explanation: "Explanation", programs: Sequence[CompileReport | None]) -> str:
    """Return the page without the traces, for a notebook."""
    inside = html.escape(page(explanation, programs, stages=False))
    title = html.escape(f"forge.explain of {explanation.name}")
    style = f"width:100%;height:{_HEIGHT}px;border:0"
    return f'<iframe title="{title}" sandbox="allow-scripts" style="{style}" srcdoc="{inside}"></iframe>'


def _file(name: str) -> str:
    return files("forge.debug.report").joinpath(name).read_text(encoding="utf-8")


def _escape_json(data: Any) -> str:
    """Escape JSON so that it cannot close the enclosing script element."""
    content = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return re.sub("[<>&\u2028\u2029]", lambda match: _UNSAFE[match[0]], content)


class _Pool:
    """A pool of unique texts, by number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, string: str) -> int:
        return self.numbers.setdefault(string, len(self.numbers))

    @property
    def texts(self) -> list[str]:
        return list(self.numbers)


def _data(explanation: "Explanation", programs: Sequence[CompileReport | None], *, stages: bool) -> dict[str, Any]:
    whole = explanation.to_dict()
    keys = ("name", "captured", "graphs", "executors", "seconds", "saved_bytes", "shortened", "cached")
    strings = _Pool()
    declined: dict[Any, int] = {}
    return {
        **{name: whole[name] for name in keys},
        "summary": text.summary(explanation),
        "operations": len(explanation.rows),
        "fusions": len(explanation.regions),
        "reasons": [[title, list(counts.items())] for title, counts in text.reasons(explanation).items()],
        "parts": _parts(explanation, programs, strings, declined),
        "declined": list(declined),
        "saved": _saved_by_module(explanation),
        "costs": _costs(explanation),
        "stages": _stages(programs) if stages else None,
        "strings": strings.texts,
    }


def _parts(
    explanation: "Explanation",
    programs: Sequence[CompileReport | None],
    strings: _Pool,
    declined: dict[tuple[str, str], int],
) -> list[dict[str, Any]]:
    """Return the folded calls of each graph and phase, with the edges from producers to consumers."""
    parts = []
    for (graph, phase), rows in groupby(explanation.rows, key=lambda row: (row.graph, row.phase)):
        folds = fold_layers(lines(list(rows)))
        calls = [line for fold in folds for layer in fold.layers for line in layer]
        report = programs[graph] if graph < len(programs) else None
        traces = [] if report is None else report.traces if phase == "forward" else report.backward_traces
        order, edges = _flow(calls, traces[-1]) if traces else (None, None)
        parts.append(
            {
                "graph": graph,
                "phase": phase,
                "calls": [_call(line, strings, declined) for line in calls],
                "folds": [[len(fold.layers), len(fold.layers[0])] for fold in folds],
                "modules": [strings(module) for fold in folds for _, module in fold.display_lines],
                "order": order,
                "edges": edges,
            }
        )
    return parts


def _call(line: Line, strings: _Pool, declined: dict[tuple[str, str], int]) -> list:
    """Return [module, operation, result, executor, source, reasons, fusion, memory] of a call."""
    reasons = [declined.setdefault(each, len(declined)) for each in line.declined]
    cells = map(strings, (line.module, line.operation, line.result, line.executor, line.source))
    members = [
        list(map(strings, (row.operation, ", ".join(row.results), row.module or "", row.source or "")))
        for row in line.rows
        if row.region is not None
    ]
    return [*cells, reasons, strings(line.rows[0].region or ""), members]


def _flow(calls: Sequence[Line], trace: Trace) -> tuple[list[int], list[tuple[int, int]]]:
    """Return each call's position in the trace that runs, and the pairs (from, to) of calls that are producer and
    consumer."""
    makers = {name: number for number, call in enumerate(calls) for row in call.rows for name in row.outputs}
    order = [0] * len(calls)
    edges: dict[tuple[int, int], None] = {}
    for at, bound in enumerate(trace.bound_symbols):
        target = next((makers[name] for name in bound.outputs if name in makers), None)
        if bound.symbol in STATEMENTS or target is None:
            continue
        order[target] = at
        for proxy in proxies((bound.args, bound.kwargs)):
            maker = makers.get(proxy.name, target)
            if maker != target:
                edges[maker, target] = None
    return order, list(edges)


def _saved_by_module(explanation: "Explanation") -> list[tuple[str, int, int]]:
    """Return (module, number of tensors, bytes) of saved tensors, with equal layers merged, the largest first."""
    sums_of: dict[str, tuple[int, int]] = {}
    for each in explanation.saved:
        if each.own:
            module = "(unknown)" if each.module is None else LAYER.sub(r"\1*", each.module) or "(the module itself)"
            count, size = sums_of.get(module, (0, 0))
            sums_of[module] = count + 1, size + (each.bytes or 0)
    return sorted(((module, *sums) for module, sums in sums_of.items()), key=lambda each: -each[2])


def _costs(explanation: "Explanation") -> dict[str, list[tuple[str, float, int, int]]] | None:
    """Return (name, seconds, bytes of the results, number of calls), the longest first.

    The costs are by operation of each phase and by executor; None if nothing was measured.
    """
    if not explanation.costs:
        return None
    sums_of: dict[str, dict[str, tuple[float, int, int]]] = {"operations": {}, "executors": {}}
    for each in explanation.costs:
        for kind, name in (("operations", f"{each.operation}, {each.phase}"), ("executors", each.executor)):
            seconds, size, count = sums_of[kind].get(name, (0.0, 0, 0))
            sums_of[kind][name] = seconds + each.seconds, size + each.bytes, count + 1
    longest = {
        kind: sorted(((name, *sums) for name, sums in those.items()), key=lambda each: -each[1])
        for kind, those in sums_of.items()
    }
    rest = longest["operations"][COSTS:]
    if rest:
        _, times, sizes, counts = zip(*rest, strict=True)
        longest["operations"][COSTS:] = [(f"{len(rest)} others", sum(times), sum(sizes), sum(counts))]
    return longest


def _stages(programs: Iterable[CompileReport | None]) -> dict[str, Any]:
    """Return every stage as runs of lines, [first, count], of one pool, since passes leave most lines unchanged."""
    pool, parts, omitted = _Pool(), [], 0
    for graph, report in enumerate(programs):
        for phase, traces in (("forward", report.traces), ("backward", report.backward_traces)) if report else ():
            stages = []
            for at in sorted(range(len(traces)), key=lambda at: (at not in (0, len(traces) - 1), -at)):  # ends first
                if sum(map(len, pool.numbers)) > BUDGET:
                    omitted += 1
                else:
                    stages.append((at, traces[at].stage, _runs(map(pool, _lines(traces[at])))))
            if stages:
                parts.append({"graph": graph, "phase": phase, "stages": [each[1:] for each in sorted(stages)]})
    return {"parts": parts, "lines": pool.texts, "left": omitted}


def _lines(trace: Trace) -> list[str]:
    """Return the printed trace; objects without a literal are numbered in order, so that stages can be compared."""
    numbers = _Pool()
    return _PRINTED_OBJECT.sub(lambda match: f"printed_object({numbers(match[0])})", str(trace)).splitlines()


def _runs(numbers: Iterable[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return runs
