"""The entry of a call into Dynamo: torch.compile's own machinery, set up for correctness first and low overhead second.

Dynamo's settings hold for the whole process; forge's are in force only while it compiles one of forge's own frames:
- hooks added to a module after it was compiled are guarded (`skip_nnmodule_hook_guards=False`);
- a model in DistributedDataParallel is one graph (`optimize_ddp=False`);
- no profiler event is emitted on every call (`record_runtime_overhead=False`);
- `dynamic=` is applied while compiling instead of on every call;
- two sizes that happened to be equal when a graph was compiled are two symbols (`use_duck_shape=False`).
"""

import functools
import os
import re
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import CodeType
from typing import Any

from forge.capture.dynamo_patches import capture_scope
from forge.capture.history import RAISED, RECOMPILE_LIMITS, History
from forge.capture.python_dispatch import count_modes, mode_around
from forge.compiler.program import EagerFallback, StrictError
from forge.executors.modules import ModuleExecutor
from forge.ir.checks import in_one_line
from forge.ir.interpreter import paused_gc, skip_dynamo, with_room
from forge.ir.locks import free_after_fork
from forge.ir.source import Source
from forge.prims.library import quiet
from forge.runtime.torch_state import restore_transforms
from forge.torch_internals.autograd import forward_level
from forge.torch_internals.dispatch import is_tracing
from forge.torch_internals.dynamo import (
    BackendChain,
    BackendCompilerFailed,
    ConvertFrameReturn,
    FailOnRecompileLimitHit,
    FrameAction,
    FrameExecStrategy,
    OptimizeContext,
    RecompileError,
    TorchRuntimeError,
    compile_lock,
    current_stance,
    entries_of_others,
    eval_frame,
    innermost_backend,
    is_fx_symbolic_tracing,
    optimize,
    release_programs,
    set_eval_frame,
    shapes_config,
    symbolic_convert,
)
from forge.torch_internals.dynamo import DynamoUnsupported as Unsupported
from forge.torch_internals.dynamo import dynamo_config as config
from forge.torch_internals.dynamo_calls import WRONG_ARGUMENTS
from forge.torch_internals.dynamo_functions import WRONG_BACKWARD
from forge.torch_internals.fake_tensors import fake_tensor
from forge.torch_internals.functorch import maybe_current_level
from forge.torch_internals.tensors import has_any_global_hook as has_global_hooks
from forge.torchlang.autocast_mode import casts_recurrent_layers
from forge.torchlang.collective_watch import watch

free_after_fork(compile_lock)
skip_dynamo(release_programs)  # a finalizer, which runs between two graphs, too
_WRONG_CALLS = (
    WRONG_ARGUMENTS,
    "TypeError when making fake tensor call",
    WRONG_BACKWARD,
)
_BOUND = re.compile(r"func='(\w+)' (.+?):(\d+);")
_CALLED = re.compile(
    r"(?:call_function|TypeError) <(?:built-in )?(?:function|method) ([\w.]+)|call_(?:function|method) ([\w.]+)"
)
_RESTATED = "Dynamo failed to run FX node"  # the prefix of an error that restates its cause, since torch 2.15
_NO_FAKE = "no fake impl"  # torch's error for an operator without a fake implementation
_OWN_FRAME = re.compile(rf'^ *File "{re.escape(str(Path(__file__).parents[1]))}/.*\n(?: {{4,}}.*\n)*', re.MULTILINE)
_SHAPE = re.compile(r"size=\(([^)]*)\)")
_SETTINGS = {
    "skip_nnmodule_hook_guards": False,
    "allow_rnn": True,  # torch.lstm is a call like any other
    "record_runtime_overhead": False,
    "optimize_ddp": False,  # forge's backward returns gradients in buckets; it does not split the model into graphs
    "invalidate_compile_context_weakrefs": True,  # torch.utils.swap_tensors rejects tensors with weak references
    "enable_dynamo_decompositions": False,  # each of several calls in place of addcmul_ would round
    "use_numpy_random_stream": True,  # np.random draws from its own generator, not from torch's
}
_SHAPES = {"use_duck_shape": False}
_DYNAMIC = {
    None: {},
    True: {"assume_static_by_default": False},
    False: {"automatic_dynamic_shapes": False, "assume_static_by_default": True},
}


_IN_EAGER = ConvertFrameReturn(
    frame_exec_strategy=FrameExecStrategy(FrameAction.SKIP, FrameAction.DEFAULT), apply_to_code=False
)
_WHOLLY_IN_EAGER = ConvertFrameReturn(  # including the functions that the frame calls
    frame_exec_strategy=FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP), apply_to_code=False
)


class FrameCallback(BackendChain):
    """Dynamo's frame callback under forge's settings; it reports graph breaks to `history`.

    Dynamo compiles one frame at a time. While it does, the process-wide settings and Dynamo's counters are those of the
    frame.
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
        super().__init__(callback)
        self._before = before
        self._history = history
        self._fullgraph = fullgraph
        self._layers = layers
        self._dynamic = dynamic
        settings = {**_SETTINGS, **_DYNAMIC[dynamic]}
        self._backend = innermost_backend(callback)
        self._settings = _available_settings(config, settings)
        self._shapes = _available_settings(shapes_config, _SHAPES)
        self._codes: list[tuple[weakref.ref[CodeType], weakref.ref[CodeType]]] = []  # of frames, before and after

    def _current_settings(self, code: CodeType) -> dict[str, Any]:
        """Return the settings for the modes around the running call of `code`.

        Dynamo counts the recompilations of a code object across all backends: of a forward behind a graph break in
        twelve layers that are jitted one by one, the ninth would run in eager. The limits apply per backend.
        """
        others = entries_of_others(code, self._backend)
        limits = {name: limit + others for name, limit in _recompile_limits().items()} if others else {}
        recurrent = {"allow_rnn": False} if casts_recurrent_layers() else {}
        return {**self._settings, **limits, **recurrent}

    @with_room
    def __call__(self, *frame: Any) -> Any:
        code = frame[0].f_code
        if self._history.stays_in_eager(code):
            return _IN_EAGER
        watch()  # other threads wait meanwhile
        limits = _recompile_limits()
        settings, shapes = config.patch(self._current_settings(code)), shapes_config.patch(self._shapes)
        self._before()
        quietly = nullcontext() if os.environ.get("TORCH_LOGS") else quiet()  # the program raises a better message
        noted, patches = self._history.frame(), capture_scope(self._layers)
        with compile_lock, paused_gc(), restore_transforms(), settings, shapes, patches, quietly, noted:
            try:
                returned = self.call_inner(*frame)
                if returned.guarded_code is not None:
                    self._codes.append((weakref.ref(code), weakref.ref(returned.guarded_code.code)))
                if returned.frame_exec_strategy.cur_action == FrameAction.RUN_ONLY:  # no longer compiled
                    self._history.on_recompile_limit(self._dynamic, limits)
                elif returned.frame_exec_strategy.cur_action == FrameAction.SKIP:
                    exception = self._history.uncaught_exception()
                    if exception is not None:  # Dynamo would skip later calls, which may not raise
                        place = Source(f'File "{code.co_filename}", line {code.co_firstlineno}')
                        return self._on_failure(code, f"{exception} is raised and not caught", place, likely=True)
                    self._history.on_skip(code)
                return returned
            except BackendCompilerFailed as failure:
                refused = failure.inner_exception
                if self._fullgraph or not isinstance(refused, EagerFallback):
                    raise
                self._history.on_eager_fallback(code, refused)
                self._history.on_graph_break(f"a call is refused: {in_one_line(refused.reason)}", refused.source)
                return _IN_EAGER
            except (FailOnRecompileLimitHit, RecompileError, StrictError):
                raise
            except Exception as failure:  # of a call of the program, or of Dynamo's own
                raises = getattr(failure, "gb_type", None) == RAISED
                if not raises and (self._fullgraph or (self._history.strict and _raises_in_eager(failure))):
                    raise
                likely = raises or _raises_in_eager(failure)
                return self._on_failure(code, _in_words(failure), Source(str(failure)), likely=likely)

    def release_with(self, entry: Callable) -> None:
        """Release the compiled code once `entry`, the only way to call it, is gone."""
        weakref.finalize(entry, release_programs, self._codes, weakref.ref(self._backend)).atexit = False

    def _on_failure(self, code: CodeType, reason: str, source: Source | None, *, likely: bool) -> ConvertFrameReturn:
        """Return the decision that the frame runs in eager: it raises torch's error there, which the program may catch.
        likely: whether it most likely raises, so that capturing the functions it calls is pointless."""
        self._history.on_capture_failure(code, reason, source, likely=likely)
        self._history.on_graph_break(f"a call fails: {reason}", source)
        return _WHOLLY_IN_EAGER if likely else _IN_EAGER


def must_be_one_graph() -> bool:
    """Return whether the frame that Dynamo captures must be one graph (fullgraph=True, of forge.jit or
    torch.compile)."""
    captures = getattr(symbolic_convert.tls, "current_tx", None)
    return captures is not None and captures.one_graph


def _recompile_limits() -> dict[str, int]:
    return {name: getattr(config, name) for name in RECOMPILE_LIMITS}


def _available_settings(of: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Return those settings that this torch has."""
    return {name: value for name, value in settings.items() if hasattr(of, name)}


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
    If Dynamo is disabled for the process, `function` is returned, as by torch.compile.
    """
    context = optimize(backend, nopython=fullgraph, guard_fail_fn=history.on_guard_failure)
    if not isinstance(context, OptimizeContext):
        history.on_disabled()
        return function
    assert callable(context.callback)
    callback = context.callback = FrameCallback(context.callback, before, dynamic, history, fullgraph, layers)
    callback.release_with(function)
    history.entry = function.__code__
    compiled = context(function)
    compiling, jit_tracing = maybe_current_level, is_tracing
    tracing = is_fx_symbolic_tracing
    plain = None  # the stance under which calls may take the fast path, after one took the slow path

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal plain
        if history.skip_capture or has_global_hooks() or forward_level() >= 0:
            return function(*args, **kwargs)
        if tracing() or jit_tracing():  # the tracer records its calls
            return function(*args, **kwargs)
        if count_modes() and (mode := mode_around()) is not None:
            history.on_dispatch_mode(mode)
            return function(*args, **kwargs)
        is_long = current_stance() is not plain or compiling() is not None
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
        if is_long and current_stance() == eval_frame.DynamoStance():
            plain = current_stance()
        return result

    vars(call)["_torchdynamo_inline"] = function
    return skip_dynamo(call)


_DYNAMOS = (BackendCompilerFailed, TorchRuntimeError, Unsupported)


def _as_raised(failure: Exception) -> Exception:
    """Return the exception that a call raises if Dynamo raised `failure`."""
    if not isinstance(failure, BackendCompilerFailed):
        return _as_torch_raises(failure)
    inner = failure.inner_exception
    return inner.reason if isinstance(inner, EagerFallback) else inner


_OTHER_DEVICES = getattr(fake_tensor, "FakeTensorDeviceMismatchError", ())  # torch 2.12 and later have it


def _as_torch_raises(failure: Exception) -> Exception:
    """Return the error of torch or Python while Dynamo ran a call on fake tensors, with the user's line and the call as
    notes; Dynamo's own message takes twenty lines. A graph break stays Dynamo's."""
    cause = _cause(failure)
    is_break = isinstance(failure, Unsupported) and getattr(failure, "gb_type", None) not in _WRONG_CALLS
    if cause is None or is_break:
        failure.args = tuple(_OWN_FRAME.sub("", each) if isinstance(each, str) else each for each in failure.args)
        return failure
    if isinstance(cause, _OTHER_DEVICES):
        cause = RuntimeError(str(cause))
    for note in filter(None, (_location(failure), _call_in_words(str(failure)))):
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
    """Return whether a call that fails on fake tensors most likely fails on real ones, too: not only for lack of a fake
    implementation."""
    cause = _cause(failure) if isinstance(failure, (TorchRuntimeError, Unsupported)) else None
    return cause is not None and _NO_FAKE not in str(cause)


def _in_words(failure: Exception) -> str:
    """Return why Dynamo makes no graph of a frame, in one line: the error of torch or Python, and the call."""
    cause, call = _cause(failure), _call_in_words(str(failure))
    text = in_one_line(failure if cause is None else cause)
    return f"{text.rstrip('.')}, {call}" if call is not None else text


def _location(failure: Exception) -> str | None:
    line = Source(str(failure)).line
    return f"at {line}" if line is not None else None


def _call_in_words(text: str) -> str | None:
    """Return the call that failed in Dynamo: `in linear of tensors of shapes [2, 16], [4, 15]`, or the user's function
    with wrong arguments."""
    bound = _BOUND.search(text)
    if bound is not None:
        line = Source(f'File "{bound[2]}", line {bound[3]}').line
        return f"in a call of {bound[1]}, {line}" if line else f"in a call of {bound[1]}"
    match = _CALLED.search(text)
    if match is None:
        return None
    shapes = [f"[{sizes.rstrip(',')}]" for sizes in _SHAPE.findall(text[match.start() :].partition(": got ")[0])]
    return f"in {match[1] or match[2]}" + (f" of tensors of shapes {', '.join(shapes)}" if shapes else "")
