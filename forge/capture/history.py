"""The record of Dynamo's captures of a jitted function: graph breaks, recompilations, frames that run in eager."""

import inspect
import re
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any, NamedTuple

from forge.compiler.program import EagerFallback, StrictError
from forge.ir.printing import note_location, quantity
from forge.ir.source import Source, warn
from forge.support import logs
from forge.torch_internals.dynamo import counters, get_compilation_metrics, graph_break_reasons

_EXCEPTION = re.compile(r"raised exception (.+)")
RAISED = "Observed exception"  # Dynamo's reason if the program raises an exception and does not catch it
RECOMPILE_LIMITS = "accumulated_recompile_limit", "recompile_limit"  # Dynamo's settings
_OTHER_BACKEND = "BACKEND_MATCH failure"  # a cache entry of another jitted function
_KEPT = 256  # reasons of each kind
_COMPILE_ID = re.compile(r"\d+/\d+: ")
_ARGUMENT = re.compile(r"'?args\[(\d+)\]'?")
_PLACE = re.compile(r"([^\s/\\]+:\d+) in ")
# guards that symbolic sizes and numbers avoid; sizes of lists and attributes of modules are never symbolic
_SYMBOLIC = re.compile(r"tensor (?!.*_parameters\[).* size mismatch|\w+(\[[^\]]+\])* == -?\d")
_FAILURES = 2  # in calls that returned, after which a frame is not captured again
_LONGEST = 100  # characters of a guard in a message
_IN_LOOP = "graph break in loop"
_EXPLANATIONS = "Explanation: ", "Developer debug context: "
_DISABLED = re.compile(r"`torch\.compiler\.disable` \(reason: (?!None\))(.+)\)")
_UNSUPPORTED_OPERATOR = "Operator does not support running with fake tensors"
_REGISTER = "; give it a fake by torch.library.register_fake"


class _CaptureFailure(NamedTuple):
    """A function that could not be captured. likely: whether torch, or the program, most likely raises in eager."""

    code: CodeType
    reason: str
    source: Source | None
    likely: bool


class History:
    """The record of why Dynamo compiled more than one graph, or none: the latest graph breaks and failed guards.

    name: of the jitted function. parameters: the names of its positional arguments. captured: whether Dynamo has seen a
    frame. graphs: the number of graphs passed to forge. pending: whether flush_warnings has work to do. limits: why
    Dynamo compiles no more of a frame. skipped: functions that run in eager, except for their callees, and why. strict:
    raise instead of warning. entry: the code of the jitted function. skip_capture: whether no part of it can be
    captured, so that calls do not try. on_return: called after a call in which something was captured.
    """

    strict = False
    entry: CodeType | None = None
    skip_capture = False
    on_return: Callable[[], None] | None = None

    def __init__(self, name: str, parameters: Sequence[str] = ()) -> None:
        self._name = name
        self.graph_breaks: deque[str] = deque(maxlen=_KEPT)
        self.recompiles: deque[str] = deque(maxlen=_KEPT)
        self.limits: list[str] = []
        self.skipped: deque[str] = deque(maxlen=_KEPT)
        self.captured = False
        self.graphs = 0
        self.pending = False
        self._parameter_names = parameters
        self._failures: list[str] = []
        self._sources: dict[str, Source] = {}  # of graph breaks, by the reason
        self._fallbacks: dict[str, EagerFallback] = {}  # of the running call, by line
        self._modes: set[str] = set()  # under which calls ran in eager
        self._capture_failures: list[_CaptureFailure] = []  # of the running call
        self._failures_of: weakref.WeakKeyDictionary[CodeType, int] = weakref.WeakKeyDictionary()
        self._warnings: set[str] = set()
        self._unimplemented: Counter[str] = Counter()  # Dynamo's counts before the frame

    @contextmanager
    def frame(self) -> Iterator[None]:
        """Enter the capture of a frame by Dynamo; count its graph breaks and failed guards at the end."""
        self.captured = self.pending = True
        self._failures.clear()
        before, self._unimplemented = counters["graph_break"].copy(), counters["unimplemented"].copy()
        count = len(graph_break_reasons)
        try:
            yield
        finally:
            sources = {each.reason: _source_of(each.user_stack) for each in graph_break_reasons[count:]}
            for text in (counters["graph_break"] - before).elements():
                self.on_graph_break(_reason(text), sources.get(text))
            if self._failures:
                latest, *earlier = self._failures
                more = f" (nor {quantity(len(earlier), 'earlier graph')} fitted)" if earlier else ""
                self.recompiles.append(f"{latest}{more}")
                logs.capture.log(logs.DETAIL, "%s: recompile: %s%s", self._name, latest, more)

    def on_graph_break(self, reason: str, source: Source | None = None) -> None:
        """Record that a graph ends, or that a frame runs in eager."""
        self.graph_breaks.append(reason)
        if source is not None:
            self._sources.setdefault(reason, source)
        logs.capture.log(logs.DETAIL, "%s: graph break: %s", self._name, reason)

    def on_disabled(self) -> None:
        """Record that Dynamo captures nothing in this process."""
        self.captured = True
        self.on_graph_break("Dynamo is disabled (TORCHDYNAMO_DISABLE=1)")

    def on_guard_failure(self, failure: Any) -> None:
        """Record that no existing graph of the frame fits the call. Dynamo reports the latest graph first."""
        reason = failure.reason.partition(": ")[2] if _COMPILE_ID.match(failure.reason) else failure.reason
        if not reason.startswith(_OTHER_BACKEND):
            self._failures.append(_ARGUMENT.sub(self._argument_name, _guard(reason.strip().splitlines()[0])))

    def uncaught_exception(self) -> str | None:
        """Return the uncaught exception of the frame that Dynamo captured, None if there is none."""
        for text in counters["unimplemented"] - self._unimplemented:
            if text.partition("\n")[0] == RAISED:
                exception = _EXCEPTION.search(text)
                return exception[1] if exception else "an exception"
        return None

    def on_skip(self, code: CodeType) -> None:
        """Record that Dynamo makes no graphs of a function, because it cannot resume a break there (in a loop, say).
        Functions that it calls may have graphs."""
        reasons = list(counters["unimplemented"] - self._unimplemented)
        line = Source(f'File "{code.co_filename}", line {code.co_firstlineno}').line
        generates = code.co_flags & inspect.CO_GENERATOR  # the graph would be part of its consumer's
        if not reasons or line is None or generates:  # it has no torch calls, or is torch's own
            return
        where = "a graph break in a loop: " if any(_IN_LOOP in reason for reason in reasons) else ""
        skipped = f"{code.co_qualname} ({line}): {where}{_reason(reasons[0])}"
        self.skipped.append(skipped)
        failed = next((each for each in reversed(get_compilation_metrics()) if each.co_name == code.co_name), None)
        if failed is not None and failed.fail_user_frame_filename is not None:
            place = failed.fail_user_frame_filename, failed.fail_user_frame_lineno or 0
            self._sources[skipped] = Source.of_frames([place])
        if self.strict:
            self._runs_in_eager(f"a function runs in eager: {skipped}", self._sources.get(skipped))

    def on_recompile_limit(self, dynamic: bool | None, limits: Mapping[str, int]) -> None:
        """Record that Dynamo has reached its recompile limit for a frame: calls that fit none of its graphs run in
        eager, or raise under strict. Warn of the first such frame.

        Args:
            dynamic: The option of forge.jit.
            limits: The user's settings RECOMPILE_LIMITS.
        """
        latest = next(iter(self._failures), None)
        self._failures.clear()  # nothing is compiled again
        if self.limits and not self.strict:
            return
        text = "".join(counters["unimplemented"] - self._unimplemented)
        setting = next((each for each in RECOMPILE_LIMITS if each in text), RECOMPILE_LIMITS[-1])
        guard = f"; the last guard that failed: {latest}" if latest else ""
        advice = " or give forge.jit(dynamic=True)" if not dynamic and latest and _SYMBOLIC.match(latest) else ""
        self.limits.append(
            f"calls run in eager: Dynamo's recompile limit ({limits[setting]}) is reached{guard}; "
            f"raise torch._dynamo.config.{setting}{advice}"
        )
        self._runs_in_eager(f"{self._name}: {self.limits[-1]}")

    def on_eager_fallback(self, code: CodeType, refused: EagerFallback) -> None:
        """Record that a frame runs in eager, where torch most likely raises: the warning waits until the call has
        returned."""
        line = refused.source.line if refused.source is not None else None
        self._fallbacks.setdefault(line or str(refused), refused)
        self.on_capture_failure(code, str(refused), refused.source, likely=True)

    def on_capture_failure(self, code: CodeType, reason: str, source: Source | None, *, likely: bool) -> None:
        """Record that a frame cannot be captured and runs in eager. likely: whether it most likely raises there. Raises
        StrictError under strict if it does not."""
        if self.strict and not likely:
            self._runs_in_eager(f"a frame runs in eager: {reason}", source)
        self._capture_failures.append(_CaptureFailure(code, reason, source, likely))

    def stays_in_eager(self, code: CodeType) -> bool:
        """Return whether capturing the function failed too often, in calls that returned, to be tried again."""
        return self._failures_of.get(code, 0) >= _FAILURES

    def annotate_error(self, error: Exception) -> None:
        """Add notes to an error of the running call: its location in a compiled program, and the fallbacks to eager
        before it."""
        note_location(error)
        for refused in self._fallbacks.values():
            error.add_note(f"forge: a frame runs in eager: {refused}")
        self._fallbacks.clear()
        self._capture_failures.clear()

    def flush_warnings(self) -> None:
        """Warn, now that the running call has returned, of frames that ran in eager, and once if nothing was compiled.
        Raises StrictError instead under strict."""
        fallbacks, failures = list(self._fallbacks.values()), list(self._capture_failures)
        self._fallbacks.clear()
        self._capture_failures.clear()
        for each in failures:
            self._failures_of[each.code] = self._failures_of.get(each.code, 0) + 1
        if self.entry is not None and not (self.strict or self.graphs):
            self.skip_capture = self.stays_in_eager(self.entry)
        for refused in fallbacks:
            self._warn(f"a frame runs in eager: {refused}", refused.source)
        reason = next((each[0] for each in (self.graph_breaks, self.skipped) if each), None)
        if not fallbacks and not self.graphs and reason is not None:
            what = f"nothing of {self._name} was compiled, it runs in eager: {reason}"
            self._runs_in_eager(what, self._sources.get(reason))
            failures = []
        for each in failures:
            if not each.likely or self.stays_in_eager(each.code):
                self._runs_in_eager(f"a frame runs in eager: {each.reason}", each.source)
        if self.on_return is not None:
            self.on_return()
        self.pending = False  # a rejected frame stays in eager

    def on_dispatch_mode(self, mode: str) -> None:
        """Warn, once for each class of dispatch modes, that calls run in eager while such a mode is active."""
        if mode not in self._modes:
            self._modes.add(mode)
            self._runs_in_eager(f"{self._name} runs in eager: the dispatch mode {mode} is active")

    def _runs_in_eager(self, what: str, source: Source | None = None) -> None:
        line = source.line if source is not None else None
        what = f"{what} ({line})" if line is not None and f"({line})" not in what else what
        if self.strict:
            raise StrictError(f"forge.jit(strict=True): {what}")
        self._warn(what, source)

    def _warn(self, what: str, source: Source | None) -> None:
        """Warn once."""
        if what not in self._warnings:
            self._warnings.add(what)
            warn(what, source)

    def _argument_name(self, argument: re.Match[str]) -> str:
        position = int(argument[1])
        return self._parameter_names[position] if position < len(self._parameter_names) else argument[0].strip("'")


def _reason(text: str) -> str:
    """Return Dynamo's reason for a graph break in one line: its title with its explanation, or else its context."""
    disabled = _DISABLED.search(text)
    if disabled:
        return disabled[1]
    what, *others = [line.strip() for line in text.strip().splitlines()]
    explanations = (line.removeprefix(start) for start in _EXPLANATIONS for line in others if line.startswith(start))
    explanation = next(filter(None, explanations), None)
    advice = _REGISTER if what == _UNSUPPORTED_OPERATOR else ""
    return (what if explanation is None else f"{what}: {explanation}") + advice


def _source_of(stack: Iterable[Any]) -> Source:
    """Return the source location of Dynamo's frame summaries."""
    return Source.of_frames((frame.filename, frame.lineno) for frame in stack)


def breaks_of_process() -> list[str]:
    """Return why Dynamo ended graphs, or made none, in this process, as far as it counts them."""
    return list(map(_reason, counters["graph_break"]))


def _guard(text: str) -> str:
    """Return a failed guard in short: `module.n == 3 (model.py:12)`. Dynamo's text adds the line of code, the end of
    the path and a hint."""
    code, _, comment = text.partition("  # ")
    code = " ".join(code.split())
    code = code if len(code) <= _LONGEST else f"{code[: _LONGEST - 1]}…"
    places = _PLACE.findall(comment)
    return f"{code} ({places[-1]})" if places else code
