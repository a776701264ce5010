"""forge.jit: the whole pipeline, from a function or module to one that is called the same way and runs faster."""

import builtins
import functools
import inspect
import itertools
import math
import os
import time
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from forge.api.backend import Backend
from forge.api.options import refuse_unknown, resolve_options
from forge.api.unused_options import UnusedOptions, idle_options, look_at_module
from forge.capture.entry import enter
from forge.capture.handles import JitHandle, handle_of, name_of
from forge.compiler.report import SHORTENED
from forge.executors.executor import Executor
from forge.executors.hubex import Layers, Source, kernel_executor, layer_executor
from forge.ir import Trace
from forge.ir import check as require
from forge.ir.checks import check_flag, check_list
from forge.runtime.module import jitted_module
from forge.runtime.torch_state import dynamo_disable
from forge.torch_internals.dynamo import disable, reset_code
from forge.transforms.users import Transform


@dynamo_disable
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
    """Return the same function or module, compiled when it is first called (and again when a guard fails).

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
    refuse_unknown("forge.jit", others, _OPTIONS)
    for name, flag in {"cache": cache, "cuda_graphs": cuda_graphs, "fullgraph": fullgraph}.items():
        check_flag(flag, f"forge.jit: {name}")  # resolve_options checks the others
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
    require(callable(target), lambda: f"forge.jit: {target!r} is not a function or a module", TypeError)
    check_list(allow_imports, "forge.jit: allow_imports", "the names of modules")
    kernels_named = kernel_executor(kernels, allow_imports=allow_imports) if kernels else None
    layers_named = layer_executor(layers, allow_imports=allow_imports) if layers else None
    config = resolve_options(
        executors,
        transforms,
        strict,
        memory,
        cache,
        cuda_graphs,
        freeze,
        select,
        numerics,
        check,
        edit,
        first=[each for each in (kernels_named, layers_named) if each is not None],
    )
    handle = JitHandle(name_of(target), _parameters(target))
    handle.numerics = config.numerics
    handle.again = functools.partial(rejit, target)
    handle.history.strict = config.strict
    idle = idle_options(kernels, layers, allow_imports)
    if kernels_named is not None or layers_named is not None or idle:
        handle.history.on_return = UnusedOptions(handle, kernels_named, layers_named, idle).warn_of_unused
    if layers_named is not None and isinstance(target, torch.nn.Module):
        look_at_module(layers_named, target)
    compiled = enter(
        _entry(target),
        Backend(config, handle),
        before=config.prepare,
        fullgraph=fullgraph,
        dynamic=dynamic,
        history=handle.history,
        layers=layers_named,
    )
    compiled._forge_handle = handle
    if isinstance(target, torch.nn.Module):
        return jitted_module(target, compiled, rejit)
    functools.update_wrapper(compiled, target, updated=())
    compiled.__dict__ = {**getattr(target, "__dict__", {}), **compiled.__dict__}  # Dynamo's own marks stay
    return compiled


_OPTIONS = [each.name for each in inspect.signature(jit).parameters.values() if each.kind is each.KEYWORD_ONLY]


def _parameters(target: Callable) -> list[str]:
    function = target.forward if isinstance(target, torch.nn.Module) else target
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return []
    return [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]


_entries = itertools.count()


def _entry(target: Callable) -> Callable:
    """Return a function of forge's own to compile, with a code object and a name of its own: Dynamo's cache and its
    limit of recompilations are one per code object, and what it learnt of changing shapes is one per name.

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
        target = disable(target, reason="a generator or an async function runs after it was called; jit what it calls")

    def call(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    return call


def _runs_later(target: Callable) -> bool:
    """Return whether a call of it runs nothing yet; Dynamo would run all of it at once."""
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return any(is_one(target) for is_one in kinds)


def last_traces(jitted: Any) -> list[Trace]:
    """Return every stage of the last graph that was compiled: the forward's where gradients are needed, else the whole.

    Of a large program the last one, with a warning; all of them under FORGE_KEEP_STAGES=1.
    """
    return _stages(jitted, "last_traces", "traces")


def last_backward_traces(jitted: Any) -> list[Trace]:
    """Return every stage of the last backward that was compiled of the last graph. Of a large program as
    last_traces."""
    return _stages(jitted, "last_backward_traces", "backward_traces")


def _stages(jitted: Any, caller: str, which: str) -> list[Trace]:
    latest = handle_of(jitted, f"forge.{caller}").latest
    if latest is not None and latest.shortened:
        warnings.warn(f"forge: {SHORTENED}", stacklevel=3)
    return list(getattr(latest, which)) if latest else []


def refold(jitted: Any) -> None:
    """Have what a frozen function computed of its weights computed again at the next call.

    Nobody needs it after a change that torch counts, nor after a write through `data` or `numpy()` of a parameter. It
    is for what is written through other aliases: `buffer.data`, `p.detach().numpy()`, DLPack, or a tensor of `p.data`
    that was taken before the first call.

    Raises TypeError for what was not made by forge.jit.
    """
    for folded in handle_of(jitted, "forge.refold").folded_weights():
        folded.forget()


def finish_compiling(jitted: Any, timeout: float | None = None) -> bool:
    """Wait until a jitted function runs as it will from now on: small programs are compiled a second time, beside the
    program that runs, once they were called often. Here they are at once, and take their place.

    timeout: seconds, None for as long as it takes. Returns whether all is done. Raises TypeError for what was not made
    by forge.jit.
    """
    until = time.monotonic() + (math.inf if timeout is None else timeout)
    waiting = handle_of(jitted, "forge.finish_compiling").tiered_programs()
    while waiting := [tiered for tiered in waiting if not tiered.promote()]:
        if time.monotonic() >= until:
            return False
        time.sleep(0.02)
    return True
