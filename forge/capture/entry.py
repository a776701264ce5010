"""The entry of a call into Dynamo: torch.compile's own machinery, set up for correctness first and low overhead second.

Dynamo's settings hold for the whole process; forge's are in force only while it compiles one of forge's own frames:
- hooks added to a module after it was compiled are guarded (`skip_nnmodule_hook_guards=False`);
- a model in DistributedDataParallel is one graph (`optimize_ddp=False`);
- no profiler event is emitted on every call (`record_runtime_overhead=False`);
- `dynamic=` is applied while compiling instead of on every call;
- two lengths that were equal by chance when a graph was compiled are two symbols (`use_duck_shape=False`).
"""

import functools
import inspect
import os
import re
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from torch.autograd import forward_ad

from forge.capture.dynamo_patches import WRONG_ARGUMENTS, WRONG_BACKWARD, capture_scope
from forge.capture.python_dispatch import count_modes, mode_around
from forge.compiler.program import EagerFallback, StrictError
from forge.executors.modules import ModuleExecutor
from forge.ir.checks import in_one_line
from forge.ir.interpreter import paused_gc, skip_dynamo, with_room
from forge.ir.locks import free_after_fork
from forge.ir.printing import note_place, quantity
from forge.ir.source import Source, warn
from forge.prims.library import quiet
from forge.runtime.torch_state import transforms_restored
from forge.support import logs
from forge.torch_internals.dispatch import is_tracing
from forge.torch_internals.dynamo import (
    BackendCompilerFailed,
    ConvertFrameReturn,
    FailOnRecompileLimitHit,
    FrameAction,
    FrameExecStrategy,
    RecompileError,
    TorchRuntimeError,
    compile_lock,
    counters,
    eval_frame,
    get_compilation_metrics,
    graph_break_reasons,
    is_fx_symbolic_tracing,
    optimize,
    set_eval_frame,
    shapes_config,
    symbolic_convert,
)
from forge.torch_internals.dynamo import DynamoUnsupported as Unsupported
from forge.torch_internals.dynamo import dynamo_config as config
from forge.torch_internals.fake_tensors import fake_tensor
from forge.torch_internals.functorch import maybe_current_level
from forge.torch_internals.tensors import has_any_global_hook as has_global_hooks
from forge.torchlang.autocast_mode import casts_recurrent_layers

free_after_fork(compile_lock)
_KEPT = 256  # reasons of each kind
_COMPILE_ID = re.compile(r"\d+/\d+: ")
_ARGUMENT = re.compile(r"'?args\[(\d+)\]'?")
_PLACE = re.compile(r"([^\s/\\]+:\d+) in ")
# guards that are not there where sizes and numbers are symbols; lengths of lists and what a module has are none
_SYMBOLIC = re.compile(r"tensor (?!.*_parameters\[).* size mismatch|\w+(\[[^\]]+\])* == -?\d")
_FAILURES = 2  # in calls that returned, after which a frame is not captured again
_LONGEST = 100  # characters of a guard that are told
_WRONG_CALLS = (
    WRONG_ARGUMENTS,
    "TypeError when making fake tensor call",
    WRONG_BACKWARD,
)
_BOUND = re.compile(r"func='(\w+)' (.+?):(\d+);")
_CALLED = re.compile(
    r"(?:call_function|TypeError) <(?:built-in )?(?:function|method) ([\w.]+)|call_(?:function|method) ([\w.]+)"
)
_RESTATED = "Dynamo failed to run FX node"  # an error that says the one that it comes from, since torch 2.15
_NO_FAKE = "no fake impl"  # what torch says of an operator for which none was registered
_OWN_FRAME = re.compile(rf'^ *File "{re.escape(str(Path(__file__).parents[1]))}/.*\n(?: {{4,}}.*\n)*', re.MULTILINE)
_SHAPE = re.compile(r"size=\(([^)]*)\)")
_IN_LOOP = "graph break in loop"
_RAISED = "Observed exception"  # the program raises an exception and does not catch it
_EXPLANATIONS = "Explanation: ", "Developer debug context: "
_DISABLED = re.compile(r"`torch\.compiler\.disable` \(reason: (?!None\))(.+)\)")
_UNSUPPORTED_OPERATOR = "Operator does not support running with fake tensors"
_REGISTER = "; give it a fake by torch.library.register_fake"
_SETTINGS = {
    "skip_nnmodule_hook_guards": False,
    "allow_rnn": True,  # torch.lstm is a call as any other
    "record_runtime_overhead": False,
    "optimize_ddp": False,  # forge's backward hands gradients out in parts; it does not cut the model into graphs
    "invalidate_compile_context_weakrefs": True,  # torch.utils.swap_tensors takes no tensor that one refers to
    "enable_dynamo_decompositions": False,  # each of several calls in the place of addcmul_ would round
    "use_numpy_random_stream": True,  # np.random draws from its own generator, not from torch's
}
_SHAPES = {"use_duck_shape": False}
_DYNAMIC = {
    None: {},
    True: {"assume_static_by_default": False},
    False: {"automatic_dynamic_shapes": False, "assume_static_by_default": True},
}


class _CaptureFailure(NamedTuple):
    """A function that could not be captured. likely: whether torch, or the program, most likely raises in eager."""

    code: CodeType
    reason: str
    source: Source | None
    likely: bool


class History:
    """The record of why Dynamo compiled more than one graph, or none: the latest graph breaks and failed guards.

    name: of the jitted function. parameters: the names of its positional arguments. captured: whether Dynamo has seen a
    frame. graphs: how many were handed to forge. pending: whether flush_warnings has work to do. limits: why Dynamo
    compiles no more of a frame. skipped: functions that run in eager, except for what they call, and why. strict: raise
    instead of warning. entry: the code of the jitted function. skip_capture: whether no part of it can be captured, so
    that calls do not try. on_return: called after a call in which something was captured.
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
        self._parameters = parameters
        self._failures: list[str] = []
        self._sources: dict[str, Source] = {}  # where graphs broke, by the reason
        self._refused: dict[str, EagerFallback] = {}  # of the running call, by line
        self._modes: set[str] = set()  # under which calls ran in eager
        self._failed: list[_CaptureFailure] = []  # of the running call
        self._failures_of: weakref.WeakKeyDictionary[CodeType, int] = weakref.WeakKeyDictionary()
        self._told: set[str] = set()
        self._unimplemented: Counter[str] = Counter()  # what Dynamo counted before the frame

    @contextmanager
    def frame(self) -> Iterator[None]:
        """Enter the capture of a frame by Dynamo; count its graph breaks and failed guards at the end."""
        self.captured = self.pending = True
        self._failures.clear()
        before, self._unimplemented = counters["graph_break"].copy(), counters["unimplemented"].copy()
        known = len(graph_break_reasons)
        try:
            yield
        finally:
            sources = {each.reason: _source_of(each.user_stack) for each in graph_break_reasons[known:]}
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

    def on_guard_failure(self, failure: Any) -> None:
        """Record that an existing graph of the frame does not fit the call. Dynamo reports the latest graph first."""
        reason = failure.reason.partition(": ")[2] if _COMPILE_ID.match(failure.reason) else failure.reason
        self._failures.append(_ARGUMENT.sub(self._argument_name, _guard(reason.strip().splitlines()[0])))

    def on_skip(self, code: CodeType) -> None:
        """Record that Dynamo makes no graphs of a function, because it cannot resume a break there (in a loop, say).
        Functions that it calls may have graphs of their own."""
        reasons = list(counters["unimplemented"] - self._unimplemented)
        line = Source(f'File "{code.co_filename}", line {code.co_firstlineno}').line
        generates = code.co_flags & inspect.CO_GENERATOR  # it would be a part of who reads it
        if not reasons or line is None or generates:  # nothing of torch is in it, or it is torch's own
            return
        where = "a graph break in a loop: " if any(_IN_LOOP in reason for reason in reasons) else ""
        skipped = f"{code.co_qualname} ({line}): {where}{_reason(reasons[0])}"
        self.skipped.append(skipped)
        failed = next((each for each in reversed(get_compilation_metrics()) if each.co_name == code.co_name), None)
        if failed is not None and failed.fail_user_frame_filename is not None:
            self._sources[skipped] = Source.of_frames(
                [(failed.fail_user_frame_filename, failed.fail_user_frame_lineno)]
            )
        if self.strict:
            self._runs_in_eager(f"a function runs in eager: {skipped}", self._sources.get(skipped))

    def on_recompile_limit(self, dynamic: bool | None) -> None:
        """Record that Dynamo has reached its recompile limit for a frame: calls that fit none of its graphs run in
        eager, or raise under strict. Warn of the first such frame."""
        latest = next(iter(self._failures), None)
        self._failures.clear()  # nothing is compiled again
        if self.limits and not self.strict:
            return
        limits = "accumulated_recompile_limit", "recompile_limit"
        said = "".join(counters["unimplemented"] - self._unimplemented)
        setting = next((each for each in limits if each in said), limits[-1])
        guard = f"; the last guard that failed: {latest}" if latest else ""
        advice = " or give forge.jit(dynamic=True)" if not dynamic and latest and _SYMBOLIC.match(latest) else ""
        self.limits.append(
            f"calls run in eager: Dynamo's recompile limit ({getattr(config, setting)}) is reached{guard}; "
            f"raise torch._dynamo.config.{setting}{advice}"
        )
        self._runs_in_eager(f"{self._name}: {self.limits[-1]}")

    def on_eager_fallback(self, code: CodeType, refused: EagerFallback) -> None:
        """Record that a frame runs in eager, where torch most likely raises: no warning before the call has
        returned."""
        line = refused.source.line if refused.source is not None else None
        self._refused.setdefault(line or str(refused), refused)
        self.on_capture_failure(code, str(refused), refused.source, likely=True)

    def on_capture_failure(self, code: CodeType, reason: str, source: Source | None, *, likely: bool) -> None:
        """Record that a frame cannot be captured and runs in eager. likely: whether it most likely raises there. Raises
        StrictError under strict where it does not."""
        if self.strict and not likely:
            self._runs_in_eager(f"a frame runs in eager: {reason}", source)
        self._failed.append(_CaptureFailure(code, reason, source, likely))

    def stays_in_eager(self, code: CodeType) -> bool:
        """Return whether capturing the function failed so often, in calls that returned, that it is not tried again."""
        return self._failures_of.get(code, 0) >= _FAILURES

    def annotate_error(self, error: Exception) -> None:
        """Add notes to an error of the running call: its place in a compiled program, and the fallbacks to eager before
        it."""
        note_place(error)
        for refused in self._refused.values():
            error.add_note(f"forge: a frame runs in eager: {refused}")
        self._refused.clear()
        self._failed.clear()

    def flush_warnings(self) -> None:
        """Warn, now that the running call has returned, of frames that ran in eager, and once if nothing was compiled.
        Raises StrictError instead under strict."""
        told, failed = list(self._refused.values()), list(self._failed)
        self._refused.clear()
        self._failed.clear()
        for each in failed:
            self._failures_of[each.code] = self._failures_of.get(each.code, 0) + 1
        if self.entry is not None and not (self.strict or self.graphs):
            self.skip_capture = self.stays_in_eager(self.entry)
        for refused in told:
            self._warn(f"a frame runs in eager: {refused}", refused.source)
        reason = next((each[0] for each in (self.graph_breaks, self.skipped) if each), None)
        if not told and not self.graphs and reason is not None:
            what = f"nothing of {self._name} was compiled, it runs in eager: {reason}"
            self._runs_in_eager(what, self._sources.get(reason))
            failed = []
        for each in failed:
            if not each.likely or self.stays_in_eager(each.code):
                self._runs_in_eager(f"a frame runs in eager: {each.reason}", each.source)
        if self.on_return is not None:
            self.on_return()
        self.pending = False  # what is refused stays refused

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
        if what not in self._told:
            self._told.add(what)
            warn(what, source)

    def _argument_name(self, argument: re.Match[str]) -> str:
        position = int(argument[1])
        return self._parameters[position] if position < len(self._parameters) else argument[0].strip("'")


def _reason(text: str) -> str:
    """Return Dynamo's reason of a graph break in one line: its title with its explanation, or else its context."""
    disabled = _DISABLED.search(text)
    if disabled:
        return disabled[1]
    what, *others = [line.strip() for line in text.strip().splitlines()]
    said = (line.removeprefix(start) for start in _EXPLANATIONS for line in others if line.startswith(start))
    explanation = next(filter(None, said), None)
    advice = _REGISTER if what == _UNSUPPORTED_OPERATOR else ""
    return (what if explanation is None else f"{what}: {explanation}") + advice


def _source_of(stack: Iterable[Any]) -> Source:
    """Return the source of frames as Dynamo has them."""
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


_IN_EAGER = ConvertFrameReturn(
    frame_exec_strategy=FrameExecStrategy(FrameAction.SKIP, FrameAction.DEFAULT), apply_to_code=False
)


class FrameCallback:
    """Dynamo's frame callback under forge's settings; it reports graph breaks to `history`.

    Dynamo compiles one frame at a time. The settings, which are the process's, and Dynamo's counters are those of the
    frame meanwhile.
    """

    def __init__(
        self,
        callback: Callable,
        before: Callable,
        dynamic: bool | None,
        history: History,
        fullgraph: bool,
        layers: ModuleExecutor | None,
    ) -> None:
        self._torchdynamo_orig_backend = callback  # the chain by which Dynamo finds the backend of a cache entry
        self._before = before
        self._history = history
        self._fullgraph = fullgraph
        self._layers = layers
        self._dynamic = dynamic
        wanted = {**_SETTINGS, **_DYNAMIC[dynamic]}
        self._settings = _available_settings(config, wanted)
        self._shapes = _available_settings(shapes_config, _SHAPES)

    def _current_settings(self) -> dict[str, Any]:
        """Return the settings for the modes around the running call."""
        return {**self._settings, "allow_rnn": False} if casts_recurrent_layers() else self._settings

    @with_room
    def __call__(self, *frame: Any) -> Any:
        code = frame[0].f_code
        if self._history.stays_in_eager(code):
            return _IN_EAGER
        settings, shapes = config.patch(self._current_settings()), shapes_config.patch(self._shapes)
        self._before()
        quietly = nullcontext() if os.environ.get("TORCH_LOGS") else quiet()  # the program raises what says more
        noted, patches = self._history.frame(), capture_scope(self._layers)
        with compile_lock, paused_gc(), transforms_restored(), settings, shapes, patches, quietly, noted:
            try:
                returned = self._torchdynamo_orig_backend(*frame)
                if returned.frame_exec_strategy.cur_action == FrameAction.RUN_ONLY:  # Dynamo compiles no more of it
                    self._history.on_recompile_limit(self._dynamic)
                elif returned.frame_exec_strategy.cur_action == FrameAction.SKIP:
                    self._history.on_skip(code)
                return returned
            except BackendCompilerFailed as failure:
                refused = failure.inner_exception
                if self._fullgraph or not isinstance(refused, EagerFallback):
                    raise
                self._history.on_eager_fallback(code, refused)
                return self._in_eager(f"a call is refused: {in_one_line(refused.reason)}", refused.source)
            except (FailOnRecompileLimitHit, RecompileError, StrictError):
                raise
            except Exception as failure:  # of a call of the program, or of Dynamo's own
                raises = getattr(failure, "gb_type", None) == _RAISED
                if not raises and (self._fullgraph or (self._history.strict and _raises_in_eager(failure))):
                    raise
                reason, source = _in_words(failure), Source(str(failure))
                self._history.on_capture_failure(code, reason, source, likely=raises or _raises_in_eager(failure))
                return self._in_eager(f"a call fails: {reason}", source)

    def _in_eager(self, reason: str, source: Source | None) -> ConvertFrameReturn:
        """Return the decision that the frame runs in eager: it raises there what torch raises, and the program may
        catch it."""
        self._history.on_graph_break(reason, source)
        return _IN_EAGER


def must_be_one_graph() -> bool:
    """Return whether the frame that Dynamo captures must be one graph (fullgraph=True, of forge.jit or
    torch.compile)."""
    captures = getattr(symbolic_convert.tls, "current_tx", None)
    return captures is not None and captures.one_graph


def _available_settings(of: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of `wanted` that this torch has."""
    return {name: value for name, value in wanted.items() if hasattr(of, name)}


def enter(
    function: Callable,
    backend: Callable,
    *,
    before: Callable[[], None],
    fullgraph: bool,
    dynamic: bool | None,
    history: History,
    layers: ModuleExecutor | None = None,
) -> Callable:
    """Return `function` compiled by `backend`, a Dynamo backend. `before` is called before each capture. Calls of
    modules for which `layers` has an override are marked.

    Calls take torch.compile's wrapper, which handles these, while a stance or a functorch transform is active; else
    they set the frame callback and call. Calls run in eager while hooks for all modules are registered, which Dynamo
    does not guard, while a tracer is active (torch.fx, torch.jit.trace), and while torch differentiates in forward
    mode. An error of the backend is raised as itself, and one that torch raises for bad arguments is of torch's type.
    """
    context = optimize(backend, nopython=fullgraph, guard_fail_fn=history.on_guard_failure)
    callback = context.callback = FrameCallback(context.callback, before, dynamic, history, fullgraph, layers)
    history.entry = function.__code__
    compiled = context(function)
    compiling, jit_tracing = maybe_current_level, is_tracing
    tracing = is_fx_symbolic_tracing
    plain = None  # the stance in which a call may go the short way, once one went the long way

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal plain
        if history.skip_capture or has_global_hooks() or forward_ad._current_level >= 0:
            return function(*args, **kwargs)
        if tracing() or jit_tracing():  # its calls are part of what is traced
            return function(*args, **kwargs)
        if count_modes() and (mode := mode_around()) is not None:
            history.on_dispatch_mode(mode)
            return function(*args, **kwargs)
        is_long = eval_frame._stance is not plain or compiling() is not None
        try:
            if is_long:
                result = compiled(*args, **kwargs)
            else:
                before = set_eval_frame(callback)
                try:
                    result = function(*args, **kwargs)
                finally:
                    set_eval_frame(before)
        except _DYNAMOS as failure:
            raised = _as_raised(failure)
            raise raised from raised.__cause__ if isinstance(failure, BackendCompilerFailed) else None
        except Exception as failure:
            history.annotate_error(failure)
            raise
        if history.pending:
            history.flush_warnings()
        if is_long and eval_frame._stance == eval_frame.DynamoStance():
            plain = eval_frame._stance
        return result

    call._torchdynamo_inline = function
    return skip_dynamo(call)


_DYNAMOS = (BackendCompilerFailed, TorchRuntimeError, Unsupported)


def _as_raised(failure: Exception) -> Exception:
    """Return the exception that a call raises where Dynamo raised `failure`."""
    if not isinstance(failure, BackendCompilerFailed):
        return _as_torch_raises(failure)
    inner = failure.inner_exception
    return inner.reason if isinstance(inner, EagerFallback) else inner


_OTHER_DEVICES = getattr(fake_tensor, "FakeTensorDeviceMismatchError", ())  # torch 2.12 and later have it


def _as_torch_raises(failure: TorchRuntimeError | Unsupported) -> Exception:
    """Return the error of torch or Python while Dynamo ran a call on fake tensors, with the user's line and the call as
    notes; Dynamo's own needs twenty lines for it. A graph break stays Dynamo's."""
    cause = _cause(failure)
    is_break = isinstance(failure, Unsupported) and getattr(failure, "gb_type", None) not in _WRONG_CALLS
    if cause is None or is_break:
        failure.args = tuple(_OWN_FRAME.sub("", each) if isinstance(each, str) else each for each in failure.args)
        return failure
    if isinstance(cause, _OTHER_DEVICES):
        cause = RuntimeError(str(cause))
    for note in filter(None, (_place(failure), _call_in_words(str(failure)))):
        cause.add_note(note)
    return cause.with_traceback(None)


def _cause(failure: Exception) -> Exception | None:
    """Return the error of torch or Python while Dynamo ran a call on fake tensors."""
    cause: BaseException | None = failure
    while cause is not None and not isinstance(cause, _OTHER_DEVICES):
        if type(cause).__module__ == "builtins" and not str(cause).startswith(_RESTATED):
            break
        cause = cause.__cause__ or cause.__context__
    return cause if isinstance(cause, Exception) else None


def _raises_in_eager(failure: Exception) -> bool:
    """Return whether a call that fails on fake tensors most likely fails on real ones, too: not only for want of a
    fake."""
    cause = _cause(failure) if isinstance(failure, (TorchRuntimeError, Unsupported)) else None
    return cause is not None and _NO_FAKE not in str(cause)


def _in_words(failure: Exception) -> str:
    """Return why Dynamo makes no graph of a frame, in one line: the error of torch or Python, and the call."""
    cause, call = _cause(failure), _call_in_words(str(failure))
    said = in_one_line(failure if cause is None else cause)
    return f"{said.rstrip('.')}, {call}" if call is not None else said


def _place(failure: Exception) -> str | None:
    line = Source(str(failure)).line
    return f"at {line}" if line is not None else None


def _call_in_words(text: str) -> str | None:
    """Return the call that failed in Dynamo: `in linear of tensors of shapes [2, 16], [4, 15]`, or the user's function
    whose arguments are wrong."""
    bound = _BOUND.search(text)
    if bound is not None:
        line = Source(f'File "{bound[2]}", line {bound[3]}').line
        return f"in a call of {bound[1]}, {line}" if line else f"in a call of {bound[1]}"
    called = _CALLED.search(text)
    if called is None:
        return None
    shapes = [f"[{lengths.rstrip(',')}]" for lengths in _SHAPE.findall(text[called.start() :].partition(": got ")[0])]
    return f"in {called[1] or called[2]}" + (f" of tensors of shapes {', '.join(shapes)}" if shapes else "")
