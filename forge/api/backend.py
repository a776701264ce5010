"""The Dynamo backend: turns a captured graph into an executable, read from disk or compiled, or runs it in eager."""

import importlib.metadata
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch

from forge.api.options import CONFIG_OPTIONS, refuse_unknown, resolve_options
from forge.cache import CacheEntry
from forge.capture import dynamo
from forge.capture.async_tensors import to_waited_graph
from forge.capture.checks import assumptions_last
from forge.capture.dtensors import to_local_graph
from forge.capture.entry import must_be_one_graph
from forge.capture.handles import JitHandle, handle_of_torch_compile
from forge.capture.higher_order import runnable
from forge.capture.inputs import display_name, forget_examples, note_inputs
from forge.capture.layers import decide
from forge.capture.python_dispatch import find_dispatched_value
from forge.capture.quantized_tensors import to_plain_graph
from forge.compiler import pipeline
from forge.compiler.config import Config
from forge.compiler.executable import Executable
from forge.compiler.program import EagerFallback, StrictError, Unsupported
from forge.compiler.report import CompileReport
from forge.debug.graph_check import against_eager
from forge.executors.modules import ModuleExecutor
from forge.ir.interpreter import paused_gc
from forge.ir.source import Source, warn
from forge.runtime.plan import CallBoundary
from forge.runtime.repeated_calls import CallRecorder
from forge.runtime.torch_state import preserve_torch_state
from forge.support import logs
from forge.torch_internals.dynamo import BackendCompilerFailed, register_backend

Compilation = tuple[Executable, CompileReport]


class Backend:
    """The Dynamo backend of one jitted function. Dynamo's tables own it: it does not own compiled programs.

    recorder: wraps the calls of compiled programs.
    """

    def __init__(self, config: Config, handle: JitHandle, recorder: CallRecorder | None = None) -> None:
        self._config, self._recorder = config, recorder
        self._handle = weakref.ref(handle)

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
        """Return the callable that Dynamo calls instead of the graph; a graph that forge cannot compile runs in eager.

        Raises:
            EagerFallback: For a call that forge rejects as torch would, and for a graph that differs from the program:
                the frame runs in eager.
            Unsupported: Under fullgraph, for a graph that forge cannot compile.
        """
        handle = self._handle()
        assert handle is not None, "the function that calls Dynamo has the handle"
        try:
            with paused_gc(), preserve_torch_state():
                executable, report = _compile(graph, self._config, handle)
        except (Unsupported, EagerFallback) as error:
            _raise_if_asked(error, self._config, handle)
            return _in_eager(graph, error, handle)
        except IndexError as error:  # Dynamo takes a bare one for the program's, and its frame would run in eager
            raise BackendCompilerFailed(self, error, None).with_traceback(error.__traceback__) from None
        handle.add(executable, report)
        return executable.call if self._recorder is None else self._recorder.wrap(executable.call)


def backend(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable:
    """Compile a graph for torch.compile(model, backend="forge", mode=..., options={...}), with the options of
    resolve_options.

    Raises TypeError for an unknown option, and for a bool option with another value.
    """
    settings = options.pop("options", None) or {}
    if "mode" in options:
        settings = {**settings, "mode": options.pop("mode")}
    refuse_unknown("forge", (*options, *settings), CONFIG_OPTIONS)
    handle = handle_of_torch_compile()
    try:
        config = resolve_options(**settings)
        handle.numerics = config.numerics
        return Backend(config, handle)(graph, example_inputs)
    except EagerFallback as reason:  # the frame is torch.compile's: the graph raises when it runs
        return _in_eager(graph, reason, handle)


# If forge is installed, torch registers the backend by its entry point, and rejects a second registration.
if not importlib.metadata.entry_points(group="torch_dynamo_backends", name="forge"):
    register_backend(backend, name="forge")


def _compile(graph: torch.fx.GraphModule, config: Config, handle: JitHandle) -> Compilation:
    """Compile a graph of tensors, of DTensors by their local tensors, or of subclasses by torch's functions."""
    note_inputs(graph)
    rewritten = []
    for rewrite in (to_plain_graph, to_waited_graph, to_local_graph):
        local_graph = rewrite(graph)
        if local_graph is not None:
            graph = local_graph.graph
            rewritten.append(local_graph.wrap)
    assumptions_last(graph)
    subclass = find_dispatched_value(graph)
    if rewritten:
        forget_examples(graph)
    if subclass is not None:
        config = config.in_torch()
    layers = decide(graph, next((each for each in config.executors if isinstance(each, ModuleExecutor)), None))
    run, entry = runnable(graph), CacheEntry(graph, config, handle.parameters)
    count = len(graph.graph.find_nodes(op="placeholder"))
    boundary = CallBoundary(lambda *inputs: run(*inputs[:count]), to_local=_compose(rewritten))
    compiled = entry.load(boundary, layers)
    while compiled is None:
        equal = entry.equal_lengths
        capture, seconds = _record(graph, config, handle)
        boundary = _with_capture(boundary, capture, config)
        executable, report = pipeline.compile(
            capture.program,
            config,
            boundary,
            opaque_calls=capture.opaque_calls,
            layers=layers,
            seconds={"record": seconds},
        )
        if entry.equal_lengths != equal:
            continue  # equal from the start, as in a later process that compiles a backward of this program
        if config.freeze and executable.plan.training is not None:
            _warn_of_gradients(report, handle)
        entry.write(executable, report, capture.program.mutated, capture.graph_constants)
        compiled = executable, report
    _log(handle.name, compiled[1])
    if subclass is not None:
        _warn_of_subclass(*subclass, handle)
    return compiled


def _compose(wraps: Sequence[Callable[[Callable], Callable]]) -> Callable[[Callable], Callable] | None:
    """Return the function that turns a call of the repeatedly rewritten graph into one of the captured graph."""
    return reduce(lambda outer, inner: lambda call: outer(inner(call)), wraps) if wraps else None


def _record(graph: torch.fx.GraphModule, config: Config, handle: JitHandle) -> tuple[dynamo.Capture, float]:
    """Return the program of a graph, and the seconds that recording took."""
    start = time.perf_counter()
    capture = dynamo.record(graph, handle.parameters)
    if config.strict and capture.opaque_calls:
        raise StrictError(_strict_message(capture.opaque_calls))
    return capture, time.perf_counter() - start


def _with_capture(boundary: CallBoundary, capture: dynamo.Capture, config: Config) -> CallBoundary:
    """Return the boundary of a call of the captured program."""
    boundary = boundary._replace(graph_constants=capture.graph_constants)
    if config.comparison is None or boundary.eager is None:
        return boundary
    return boundary._replace(compare=partial(against_eager, eager=boundary.eager, program=capture.program))


def _raise_if_asked(error: Unsupported | EagerFallback, config: Config, handle: JitHandle) -> None:
    """Raise the error that keeps a graph from being compiled, unless the graph itself may run in eager."""
    reason = error.reason if isinstance(error, EagerFallback) else error
    if isinstance(reason, Unsupported):
        if must_be_one_graph():
            raise _refused_by_fullgraph(reason, handle) from None
        if config.strict:
            what = f"forge cannot compile a graph: {reason}; {reason.advice}"
            raise StrictError(f"forge.jit(strict=True): {what}") from None
    elif config.strict:
        raise reason from None
    if error is not reason:
        raise error


def _in_eager(graph: torch.fx.GraphModule, reason: Unsupported | EagerFallback, handle: JitHandle) -> Callable:
    warn(f"a graph runs in eager: {reason}", reason.source)
    run = runnable(graph)

    def call(*inputs: Any) -> Any:  # Dynamo replaces graph.forward by another object
        return run(*inputs)

    handle.add_eager(call, str(reason))
    return call


# logs and warnings of a graph


def _log(name: str, report: CompileReport) -> None:
    if not (logs.compile.isEnabledFor(logs.DETAIL) or logs.claim.isEnabledFor(logs.DETAIL)):
        return  # claims of a program from disk are read lazily
    claims = [*report.claims, *report.backward_claims]
    if logs.compile.isEnabledFor(logs.DETAIL):
        by = ", ".join(f"{executor} {count}" for executor, count in Counter(each.executor for each in claims).items())
        spent = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in report.seconds.items())
        prefix = "found on disk; " if report.cached else ""
        logs.compile.log(logs.DETAIL, "%s: %d operations (%s); %s%s", name, len(claims), by, prefix, spent)
    if logs.claim.isEnabledFor(logs.DETAIL):
        for each in claims:
            logs.claim.log(logs.DETAIL, "%s: %s by %s  %s", name, each.operation, each.executor, each.source or "")
            for executor, reason in each.declined:
                logs.claim.debug("%s:   %s declined: %s", name, executor, reason)


def _warn_of_subclass(node: torch.fx.Node, kind: str, handle: JitHandle) -> None:
    name = display_name(node.name, handle.parameters)
    reason = f"{name} is a {kind}, whose operators are not torch's kernels alone"
    warn(f"a graph runs by torch's own functions, without regions: {reason}", Source.of(node))


def _warn_of_gradients(report: CompileReport, handle: JitHandle) -> None:
    """Warn, once per jitted function, that gradients keep its weights from being folded."""
    if not handle.warned:
        handle.warned = True
        advice = "call it under torch.no_grad() or torch.inference_mode(), or after requires_grad_(False)"
        reason = report.unfrozen[0].removeprefix("all weights: ")
        warnings.warn(f"forge.jit(freeze=True) folds no weights: {reason}; {advice}", stacklevel=2)


def _refused_by_fullgraph(reason: Unsupported, handle: JitHandle) -> Unsupported:
    return Unsupported(
        f"fullgraph=True: forge cannot compile {handle.name}: {reason}; {reason.advice}, or leave out fullgraph, where "
        "torch runs it"
    )


def _strict_message(names: list[str]) -> str:
    listed = ", ".join(dict.fromkeys(names))
    own = all(map(_is_users, names))
    advice = "say what it means (docs/how-to/custom-operators.md)" if own else _ADD_A_SYMBOL
    return (
        f"forge.jit(strict=True): torchlang does not have {listed}; {advice}, or jit without strict to run it as an "
        "opaque call"
    )


_ADD_A_SYMBOL = "add a @torchsymbol in forge/torchlang (docs/how-to/adding-an-op.md)"
_OPERATORS = "torch.ops."


def _is_users(name: str) -> bool:
    """Return whether a graph calls the user's operator or function by this name, rather than one of torch's."""
    if name.startswith(_OPERATORS):
        return name.removeprefix(_OPERATORS).partition(".")[0] not in _TORCHS_OWN
    return not name.startswith("torch.")


_TORCHS_OWN = frozenset({"aten", "prim", "prims", "higher_order", "inductor", "quantized", "_c10d_functional"})
