"""forge.jit: the whole pipeline, from a function or module to one that is called the same way and runs faster."""

import builtins
import dataclasses
import functools
import importlib.metadata
import inspect
import itertools
import math
import os
import time
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo.exc import BackendCompilerFailed

from forge.api.unused_options import Named, idle_options, look_at_module
from forge.cache import Slot
from forge.capture import dynamo
from forge.capture.checks import assumptions_last
from forge.capture.dtensors import localized
from forge.capture.entry import enter, must_be_one_graph
from forge.capture.handles import Record, name_of, record_of, record_of_torch_compile
from forge.capture.higher_order import runnable
from forge.capture.inputs import note_inputs
from forge.capture.layers import decide
from forge.capture.python_dispatch import dispatched
from forge.compiler.config import Options, default_check
from forge.compiler.executable import NOT_KEPT, Compiled
from forge.compiler.pipeline import compile_program
from forge.compiler.program import Refused, StrictError, Unsupported
from forge.debug.graph_check import against_eager
from forge.executors.executor import Executor, unknown
from forge.executors.hubex import LayerExecutor, Layers, Source, kernel_executor, layer_executor
from forge.ir import Trace, check
from forge.ir.checks import check_flag, check_list
from forge.ir.interpreter import paused_gc
from forge.ir.source import Source as Place
from forge.ir.source import warn
from forge.runtime.module import jitted_module
from forge.runtime.torch_state import restored, uncaptured
from forge.support import logs
from forge.transforms.users import Transform


@uncaptured
def jit(
    target: Callable | torch.nn.Module = ...,
    *,
    executors: Sequence[str | Executor] | None = None,
    transforms: Sequence[Transform] = (),
    kernels: Sequence[Source] = (),
    layers: Layers = (),
    allow_imports: Sequence[str] = (),
    memory: str = "balanced",
    cache: bool = True,
    cuda_graphs: bool = False,
    freeze: bool = False,
    select: str = "order",
    numerics: str = "fast",
    check: str | None = None,
    edit: str | os.PathLike[str] | None = None,
    strict: bool = False,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    **others: Any,
) -> Any:
    """The same function or module, compiled when it is first called (and again when a guard fails).

    executors: names or Executor objects, asked in order; all available ones by default.
    transforms: functions Trace -> Trace, run on each recorded trace before forge's own passes; not where a program is
        found on disk that the same transforms made.
    kernels: repositories ("org/name@v1"), folders of repositories, manifests' files, kernels declared in Python; their
        kernels are asked before all executors. forge.use_kernels does the same for the process.
    layers: classes of the Hub whose forward takes the place of that of the model's modules, in this program alone: a
        mapping from names of modules' classes (or of the `kernels` library's decorators), or the classes, to where the
        layer is, as kernels.use_kernel_mapping takes it; a list of sources with layers of the classes' names; or
        "registered" for what the library's register_kernel_mapping was told. One that is not as the module's own
        forward is not used (forge.explain says why).
    allow_imports: modules that these kernels and layers may import beyond the standard library, torch and what they
        declare, which is all that the Hub's rules allow.
    memory: what a backward reads is saved ("speed"), or computed again where that is cheap and saves bytes
        ("balanced"), or wherever it saves bytes ("smallest", slower).
    cache: programs are kept on disk, where another process that captures the same one, under the same options and
        versions, finds it (FORGE_CACHE_DIR, FORGE_CACHE=0).
    cuda_graphs: on a CUDA device, forward and backward are recorded as CUDA graphs after a few calls of a shape, and
        replayed; what cannot be recorded runs between them (forge.explain says why). Not kept on disk.
    freeze: for inference: what depends on parameters and buffers alone is computed once, batch norms are folded into
        the layers before them, linear layers of one input are joined, and all is computed again when a weight changes
        (forge.refold says which changes are not noticed). Calls for which gradients are needed run as without it, with
        a warning.
    select: where a kernel, or another executor that is not torch's or a fuser, takes a call that others would take or
        fuse: who is asked first runs it ("order"), or who was measured to be fastest, on tensors of the call's
        metadata, once for each such metadata ("measured"; forge.explain has the times).
    numerics: "fast" computes in float32 within a region what is bfloat16 or float16, and rounds the region's results;
        "eager" rounds each value, as torch's functions do, so that a region gives what they give one by one, but for
        the order in which sums are added.
    check: "eager" compares every call's result, and the results and gradients of each graph, with what eager gives, and
        raises forge.CheckError naming the first call that differs, or that overwrites what it was given, its executor
        and its inputs. Slow: to find out who is wrong. Nothing is then kept on disk or recorded as a CUDA graph.
        "regions" runs what a fusion executor would compile by torch's operators, and raises where the metadata, strides
        or memory of what a region is given or gives is not what its code would be compiled for. Nothing is compiled,
        so that a test suite can run so: FORGE_CHECK=regions in the environment is the default of this option.
    edit: a folder: each program that runs is written there as Python, and what a file says after it was edited runs in
        the place of what forge generates, in this process or a later one, as long as that is the same. Nothing is then
        kept on disk besides.
    strict: refuse, with forge.StrictError, a torch function that torchlang does not have, instead of running it as an
        opaque call; and what would run in eager with a warning: a graph that forge cannot compile, a function that
        Dynamo gives up on or compiles nothing of. A fused region that fails raises its error, or RegionError where it
        cannot be compiled. A graph break between two graphs is for `fullgraph`.
    fullgraph: refuse graph breaks, as torch.compile does, and a graph that forge cannot compile, which else runs in
        eager.
    dynamic: True traces with symbolic shapes from the first call, False never, None after a shape has changed.

    A jitted module shares the original's parameters, buffers, hooks and mode, and has its class and state_dict keys.
    Without a target, a decorator with these options. Raises TypeError for an unknown option, one that should be a
    bool and is none, or a target that cannot be called; ValueError for an unknown executor, `memory`, `select` or
    `numerics`, or an executor that has no regions of such numerics. A call that compiles raises forge.EditError for
    an edited file that is no Python.
    """
    _check_options("forge.jit", others, _OPTIONS)
    for name, given in {"cache": cache, "cuda_graphs": cuda_graphs, "fullgraph": fullgraph}.items():
        check_flag(given, f"forge.jit: {name}")  # Options checks the others
    check_flag(dynamic, "forge.jit: dynamic", (True, False, None))
    rejit = functools.partial(
        jit,
        executors=executors,
        transforms=transforms,
        kernels=kernels,
        layers=layers,
        allow_imports=allow_imports,
        memory=memory,
        cache=cache,
        cuda_graphs=cuda_graphs,
        freeze=freeze,
        select=select,
        numerics=numerics,
        check=check,
        edit=edit,
        strict=strict,
        fullgraph=fullgraph,
        dynamic=dynamic,
    )
    if target is ...:
        return rejit
    _check_target(target)
    check_list(allow_imports, "forge.jit: allow_imports", "the names of modules")
    named = kernel_executor(kernels, allow_imports=allow_imports) if kernels else None
    lent = layer_executor(layers, allow_imports=allow_imports) if layers else None
    plain = default_check(check) != "eager" and edit is None
    options = Options(
        executors,
        transforms,
        strict,
        memory,
        cache=cache and plain,
        cuda_graphs=cuda_graphs and plain,
        freeze=freeze,
        select=select,
        check=check,
        edit=edit,
        numerics=numerics,
        first=[each for each in (named, lent) if each is not None],
    )
    record = Record(name_of(target), _parameters(target))
    record.numerics = options.numerics
    record.again = functools.partial(rejit, target)
    record.history.strict = options.strict
    idle = idle_options(kernels, layers, allow_imports)
    if named is not None or lent is not None or idle:
        record.history.returned = Named(record, named, lent, idle).tell
    if lent is not None and isinstance(target, torch.nn.Module):
        look_at_module(lent, target)
    backend = _Backend(options, record)
    compiled = enter(
        _entry(target),
        backend,
        before=options.prepare,
        fullgraph=fullgraph,
        dynamic=dynamic,
        history=record.history,
        layers=lent,
    )
    compiled._forge_record = record
    if isinstance(target, torch.nn.Module):
        return jitted_module(target, compiled, rejit)
    functools.update_wrapper(compiled, target, updated=())
    compiled.__dict__ = {**getattr(target, "__dict__", {}), **compiled.__dict__}  # Dynamo's own marks stay
    return compiled


_OPTIONS = [each.name for each in inspect.signature(jit).parameters.values() if each.kind is each.KEYWORD_ONLY]
_BACKEND_OPTIONS = [each.name for each in dataclasses.fields(Options)]


def _check_target(target: Any) -> None:
    check(callable(target), lambda: f"forge.jit: {target!r} is not a function or a module", TypeError)


# What torch.compile has options for that are named otherwise here (docs/coming-from.md).
_OF_TORCH_COMPILE = {
    "mode": 'cuda_graphs=True is its "reduce-overhead", select="measured" its "max-autotune"',
    "backend": 'executors= says who runs calls; torch.compile(model, backend="forge") takes forge as the backend',
    "options": 'they are arguments of forge.jit; torch.compile(model, backend="forge", options={...}) takes them so',
    "disable": "a function that is not given to forge.jit runs in eager",
}


def _check_options(caller: str, given: Iterable[str], known: list[str]) -> None:
    for name in given:
        named = _OF_TORCH_COMPILE.get(name)
        what = unknown("option", name, known) if named is None else f"{name!r} is an option of torch.compile; {named}"
        check(name in known, lambda what=what: f"{caller}: {what}", TypeError)


class _Backend:
    """The Dynamo backend of one jitted function. Dynamo's tables keep it: it does not keep what was compiled."""

    def __init__(self, options: Options, record: Record) -> None:
        self._options = options
        self._record = weakref.ref(record)

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
        try:
            return compile_graph(graph, example_inputs, options=self._options, record=self._record())
        except IndexError as error:  # Dynamo takes a bare one for the program's, and its frame would run in eager
            raise BackendCompilerFailed(self, error, None).with_traceback(error.__traceback__) from None


def _parameters(target: Callable) -> list[str]:
    function = target.forward if isinstance(target, torch.nn.Module) else target
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return []
    return [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]


_entries = itertools.count()


def _entry(target: Callable) -> Callable:
    """A function of forge's own to compile, with a code object and a name of its own: Dynamo's cache and its limit of
    recompilations are one per code object, and what it learnt of changing shapes is one per name.

    Dynamo's guards live as long as the types and modules that they look at, and they keep its globals: nothing that
    shall be freed may be one. A module is its argument, a function its closure's. Dynamo keeps the code object and
    what it compiled for it, each for the other's sake, until the entry goes."""
    template = _calling_module if isinstance(target, torch.nn.Module) else _calling(target)
    code = template.__code__.replace(co_name=f"forge_{next(_entries)}_{name_of(target)}")
    scope = {"__builtins__": builtins.__dict__, "__name__": __name__}
    entry = types.FunctionType(code, scope, closure=template.__closure__)
    weakref.finalize(entry, reset_code, code).atexit = False
    return entry


def _calling_module(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def _calling(target: Callable) -> Callable:
    if _runs_later(target):
        target = torch._dynamo.disable(
            target, reason="a generator or an async function runs after it was called; jit what it calls"
        )

    def call(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    return call


def _runs_later(target: Callable) -> bool:
    """Whether a call of it runs nothing yet; Dynamo would run all of it at once."""
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return any(is_one(target) for is_one in kinds)


def compile_graph(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, options: Options, record: Record | None = None
) -> Callable:
    """The Dynamo backend: capture -> transform -> claim -> generate. What forge cannot compile runs in eager.

    Raises Refused for a call that forge refuses as torch would, and for a graph that is not what the program says: the
    frame is to run in eager. Raises Unsupported under fullgraph for what it cannot compile.
    """
    record = record or Record(name_of(graph))
    try:
        with paused_gc(), restored():
            compiled = _compile(graph, options, record)
    except (Unsupported, Refused) as error:
        reason = error.reason if isinstance(error, Refused) else error
        if isinstance(reason, Unsupported):
            if must_be_one_graph():
                raise _refused_by_fullgraph(reason, record) from None
            if options.strict:
                raise StrictError(
                    f"forge.jit(strict=True): forge cannot compile a graph: {reason}; {reason.advice}"
                ) from None
        elif options.strict:
            raise reason from None
        if error is not reason:
            raise
        return _in_eager(graph, error, record)
    call = compiled.handed_over()
    record.add(call, compiled)
    return call


def _compile(graph: torch.fx.GraphModule, options: Options, record: Record) -> Compiled:
    note_inputs(graph)
    local = localized(graph)
    if local is None:
        return _compile_tensors(graph, options, record)
    compiled = _compile_tensors(local.graph, options, record)
    compiled.call = local.around(compiled.call)
    return compiled


def _compile_tensors(graph: torch.fx.GraphModule, options: Options, record: Record) -> Compiled:
    assumptions_last(graph)
    special = dispatched(graph)
    if special is not None:
        compiled = _compile_plain(graph, options.in_torch(), record)
        node, kind = special
        name = dynamo.friendly(node.name, record.parameters)
        reason = f"{name} is a {kind}, whose operators are not torch's kernels alone"
        warn(f"a graph runs by torch's own functions, without regions: {reason}", Place.of(node))
        return compiled
    return _compile_plain(graph, options, record)


def _compile_plain(graph: torch.fx.GraphModule, options: Options, record: Record) -> Compiled:
    uses = decide(graph, next((each for each in options.executors if isinstance(each, LayerExecutor)), None))
    run, slot = runnable(graph), Slot(graph, options, record.parameters)
    given = len(graph.graph.find_nodes(op="placeholder"))
    eager = lambda *inputs: run(*inputs[:given])
    compiled = slot.load(eager) or _compile_anew(graph, options, record, slot, eager)
    compiled.layers = uses
    _log(record.name, compiled)
    return compiled


def _compile_anew(
    graph: torch.fx.GraphModule, options: Options, record: Record, slot: Slot, eager: Callable
) -> Compiled:
    start, equal = time.perf_counter(), slot.equal_lengths
    capture = dynamo.record(graph, record.parameters)
    if options.strict and capture.opaque_calls:
        raise StrictError(_strict_message(capture.opaque_calls))
    seconds = time.perf_counter() - start
    compiled = compile_program(capture.program, options, eager=eager)
    if slot.equal_lengths != equal:  # known from the start where a later process compiles a backward of this program
        return _compile_anew(graph, options, record, slot, eager)
    compiled.opaque_calls = capture.opaque_calls
    if options.freeze and compiled.recipe.training is not None:
        _warn_of_gradients(compiled, record)
    slot.keep(compiled, capture.program.mutated, capture.held)
    if options.compares:
        compiled.call = against_eager(compiled.call, eager, capture.program)
    if capture.held:
        compiled.call = _holding(compiled.call, capture.held)
    compiled.seconds = {"record": seconds, **compiled.seconds}
    return compiled


def _log(name: str, compiled: Compiled) -> None:
    if not (logs.compile.isEnabledFor(logs.DETAIL) or logs.claim.isEnabledFor(logs.DETAIL)):
        return  # of a program from disk, claims are read when they are asked for
    claims = [*compiled.claims, *compiled.backward_claims]
    if logs.compile.isEnabledFor(logs.DETAIL):
        by = ", ".join(f"{executor} {count}" for executor, count in Counter(each.executor for each in claims).items())
        spent = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in compiled.seconds.items())
        found = "found on disk; " if compiled.cached else ""
        logs.compile.log(logs.DETAIL, "%s: %d operations (%s); %s%s", name, len(claims), by, found, spent)
    if logs.claim.isEnabledFor(logs.DETAIL):
        for each in claims:
            logs.claim.log(logs.DETAIL, "%s: %s by %s  %s", name, each.operation, each.executor, each.source or "")
            for executor, reason in each.declined:
                logs.claim.debug("%s:   %s declined: %s", name, executor, reason)


def _warn_of_gradients(compiled: Compiled, record: Record) -> None:
    """Once for a jitted function."""
    if not record.warned:
        record.warned = True
        advice = "call it under torch.no_grad() or torch.inference_mode(), or after requires_grad_(False)"
        reason = compiled.unfrozen[0].removeprefix("all weights: ")
        warnings.warn(f"forge.jit(freeze=True) folds no weights: {reason}; {advice}", stacklevel=2)


def _holding(call: Callable, held: list[torch.Tensor]) -> Callable:
    """`call`, whose last arguments are tensors that the graph holds."""
    return lambda *inputs: call(*inputs, *held)


def backend(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable:
    """torch.compile(model, backend="forge"): `options=` takes executors, transforms, memory, cache,
    cuda_graphs, freeze, select, numerics and strict.

    Raises TypeError for another option, and for one that should be a bool and is none.
    """
    wanted = options.pop("options", None) or {}
    _check_options("forge", (*options, *wanted), _BACKEND_OPTIONS)
    record = record_of_torch_compile()
    try:
        asked = Options(**wanted)
        record.numerics = asked.numerics
        return compile_graph(graph, example_inputs, options=asked, record=record)
    except Refused as reason:  # the frame is torch.compile's: the graph raises when it runs
        return _in_eager(graph, reason, record)


def _refused_by_fullgraph(reason: Unsupported, record: Record) -> Unsupported:
    return Unsupported(
        f"fullgraph=True: forge cannot compile {record.name}: {reason}; {reason.advice}, or leave out fullgraph, where "
        "torch runs it"
    )


def _in_eager(graph: torch.fx.GraphModule, reason: Unsupported | Refused, record: Record) -> Callable:
    warn(f"a graph runs in eager: {reason}", reason.source)
    call = _calling(runnable(graph))  # Dynamo keeps another object in the place of graph.forward
    record.add(call, str(reason))
    return call


def _strict_message(names: list[str]) -> str:
    listed = ", ".join(dict.fromkeys(names))
    own = all(map(_is_users, names))
    advice = "say what it means (docs/ops-of-your-own.md)" if own else _ADD_A_SYMBOL
    return (
        f"forge.jit(strict=True): torchlang does not have {listed}; {advice}, or jit without strict to run it as an "
        "opaque call"
    )


_ADD_A_SYMBOL = "add a @torchsymbol in forge/torchlang (docs/adding-an-op.md)"
_OPERATORS = "torch.ops."


def _is_users(name: str) -> bool:
    """Whether what a graph calls is an operator or a function of the user's, rather than torch's."""
    if name.startswith(_OPERATORS):
        return name.removeprefix(_OPERATORS).partition(".")[0] not in _TORCHS_OWN
    return not name.startswith("torch.")


_TORCHS_OWN = frozenset({"aten", "prim", "prims", "higher_order", "inductor", "quantized", "_c10d_functional"})


# Where forge is installed, torch registers it by its entry point, and refuses a name that is registered twice.
if not importlib.metadata.entry_points(group="torch_dynamo_backends", name="forge"):
    torch._dynamo.register_backend(backend, name="forge")


def last_traces(jitted: Any) -> list[Trace]:
    """Every stage of the last graph that was compiled: the forward's where gradients are needed, else the whole.

    Of a large program the last one, with a warning; all of them under FORGE_KEEP_STAGES=1.
    """
    return _stages(jitted, "last_traces", "traces")


def last_backward_traces(jitted: Any) -> list[Trace]:
    """Every stage of the last backward that was compiled of the last graph. Of a large program as last_traces."""
    return _stages(jitted, "last_backward_traces", "backward_traces")


def _stages(jitted: Any, caller: str, which: str) -> list[Trace]:
    latest = record_of(jitted, f"forge.{caller}").latest
    if latest is not None and latest.shortened:
        warnings.warn(f"forge: {NOT_KEPT}", stacklevel=3)
    return list(getattr(latest, which)) if latest else []


def refold(jitted: Any) -> None:
    """Has what a frozen function computed of its weights computed again at the next call.

    Nobody needs it after a change that torch counts, nor after a write through `data` or `numpy()` of a parameter. It
    is for what is written through other aliases: `buffer.data`, `p.detach().numpy()`, DLPack, or a tensor of `p.data`
    that was taken before the first call.

    Raises TypeError for what was not made by forge.jit.
    """
    for compiled in record_of(jitted, "forge.refold").compiled:
        folded = compiled.folded()
        if folded is not None:
            folded.forget()


def finish_compiling(jitted: Any, timeout: float | None = None) -> bool:
    """Waits until a jitted function runs as it will from now on: small programs are compiled a second time, beside the
    program that runs, once they were called often. Here they are at once, and take their place.

    timeout: seconds, None for as long as it takes. Returns whether all is done. Raises TypeError for what was not made
    by forge.jit.
    """
    until = time.monotonic() + (math.inf if timeout is None else timeout)
    known = record_of(jitted, "forge.finish_compiling").compiled
    waiting = [growing for compiled in known if (growing := compiled.growing()) is not None]
    while waiting := [growing for growing in waiting if not growing.advance()]:
        if time.monotonic() >= until:
            return False
        time.sleep(0.02)
    return True
