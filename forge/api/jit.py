"""forge.jit: the whole pipeline, from a function or module to an equivalent one that runs faster."""

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
from forge.api.options import CONFIG_OPTIONS, check_transforms, refuse_unknown, resolve_options
from forge.api.unused_options import UnusedOptions, idle_inner_options, idle_options, look_at_module
from forge.capture.entry import enter
from forge.capture.handles import JitHandle, handle_of, name_of
from forge.compiler.report import SHORTENED
from forge.executors.executor import Executor
from forge.executors.hubex import Layers, Source, kernel_executor, layer_executor
from forge.ir import Trace
from forge.ir import check as require
from forge.ir.checks import check_flag, check_list
from forge.runtime.module import jitted_module
from forge.runtime.module_transforms import ModuleTransform, split_transforms, transform_module
from forge.runtime.repeated_calls import CallRecorder
from forge.runtime.torch_state import dynamo_disable
from forge.torch_internals.dynamo import disable, reset_code
from forge.transforms.users import Transform


@dynamo_disable
def jit(  # noqa: PLR0913  the options of forge.jit
    target: Callable | torch.nn.Module | types.EllipsisType = ...,
    *,
    executors: Sequence[str | Executor] | None = None,
    transforms: Sequence[Transform | ModuleTransform] = (),
    kernels: Sequence[Source] = (),
    layers: Layers = (),
    allow_imports: Sequence[str] = (),
    memory: str = "balanced",
    cache: bool = True,
    cuda_graphs: bool | str = "auto",
    freeze: bool = False,
    select: str = "order",
    numerics: str = "fast",
    check: str | None = None,
    edit: str | os.PathLike[str] | None = None,
    strict: bool = False,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    **others: Any,
) -> Any:
    """Return a function or module that compiles `target` when it is first called, and again when a guard fails.

    A jitted module shares the parameters, buffers, hooks and training mode of the original, and has its class and
    state_dict keys. Without a target, return a decorator with these options.

    Args:
        target: A callable or a torch.nn.Module.
        executors: Names or Executor objects in order of priority. None takes every available executor.
        transforms: Functions from Trace to Trace that run on each recorded trace before forge's own passes. They do
            not run again if the cache has a program that the same transforms produced. A forge.ModuleTransform,
            such as those of forge.quantize, replaces parameters in a copy of the module, which is jitted; the
            module keeps its own, and shares the others.
        kernels: Kernel repositories ("org/name@v1"), folders of repositories, manifest files, or kernels declared in
            Python. They take priority over all executors. forge.use_kernels registers kernels for the whole process.
        layers: Layers of the Kernel Hub that replace the forward of the model's modules, in this program alone: a
            mapping from module classes or their names (or names of the `kernels` library's decorators) to layers, as
            kernels.use_kernel_mapping takes it; a list of sources, whose layers match by class name; or "registered"
            for the mapping of kernels.register_kernel_mapping. A layer whose results differ from the module's own
            forward is not used; forge.explain gives the reason.
        allow_imports: Modules that these kernels and layers may import beyond the standard library, torch and their
            declared dependencies.
        memory: How much to recompute in the backward: nothing ("speed"), cheap values that save bytes ("balanced"),
            or every value that saves bytes ("smallest", slower).
        cache: Keep compiled programs on disk, for other processes that capture the same program with the same options
            and versions. FORGE_CACHE_DIR is the folder; FORGE_CACHE=0 disables the cache.
        cuda_graphs: On a CUDA device, record the forward and backward as CUDA graphs after a few calls of a shape:
            always (True), never (False), or once a program was seen to leave its device waiting for launches, if memory
            allows and sizes are fixed or, in inference, recur ("auto"). Calls that cannot be recorded run between
            the graphs; forge.explain gives the reasons. Recorded graphs hold the memory of the forward's residuals, and
            are not cached on disk.
        freeze: For inference: compute once the values that depend on parameters and buffers alone, fold batch norms
            into the layers before them, and join linear layers that share an input. A change of a weight triggers
            the computation again; see forge.refold for the changes that go unnoticed. A call that needs gradients
            runs unfrozen, with a warning.
        select: If several executors accept a call, run the first ("order") or the fastest ("measured"). Each is
            measured once per metadata of the arguments; forge.explain reports the times. A matrix product and the
            pointwise calls after it are measured as one region, too, with the templates of Inductor's max_autotune.
        numerics: "fast" computes bfloat16 and float16 values in float32 within a fused region and rounds the region's
            results. "eager" rounds every value, so that a region returns the results of torch's functions, except for
            the order in which a reduction adds.
        check: "eager" compares the results and gradients of every call and graph with eager, and raises CheckError
            for the first call that differs or overwrites an input; it is slow, and disables the cache and CUDA
            graphs. "regions" runs the operators of each fused region by torch and checks the metadata, strides and
            aliasing that its code would be compiled for; it compiles nothing. FORGE_CHECK is the default.
        edit: A folder to which each program is written as Python. An edited file runs in place of the generated
            program, in this process and later ones, as long as the program stays the same. Disables the cache.
        strict: Raise StrictError for a torch function without a torchlang symbol and for a fallback to eager; raise
            the error of a fused region that fails.
        fullgraph: Raise on a graph break, as torch.compile does, and for a graph that forge cannot compile.
        dynamic: True uses symbolic sizes from the first call, False never does, None does once a size has changed.
        mode: One of torch.compile's, which sets options that are left at their defaults: "reduce-overhead" is
            cuda_graphs=True, "max-autotune" is that with select="measured", "max-autotune-no-cudagraphs" is
            select="measured" with cuda_graphs=False, and "default" and None set nothing.
        others: Unknown options, which raise TypeError.

    Returns:
        A callable or module of the target's class; without a target, a decorator.

    Raises:
        TypeError: For an unknown option, a bool option with another value, or a target that is not callable.
        ValueError: For an unknown executor, `memory`, `select`, `numerics` or `mode`, or an executor whose regions do
            not support the numerics.
        EditError: During a call, for an edited file that is not valid Python.
    """
    refuse_unknown("forge.jit", others, [*_DEFAULTS])
    for name, flag in {"cache": cache, "fullgraph": fullgraph}.items():
        check_flag(flag, f"forge.jit: {name}")  # resolve_options checks the others
    check_flag(dynamic, "forge.jit: dynamic", (True, False, None))
    options: dict[str, Any] = {
        "executors": executors,
        "transforms": transforms,
        "kernels": kernels,
        "layers": layers,
        "allow_imports": allow_imports,
        "memory": memory,
        "cache": cache,
        "cuda_graphs": cuda_graphs,
        "freeze": freeze,
        "select": select,
        "numerics": numerics,
        "check": check,
        "edit": edit,
        "strict": strict,
        "fullgraph": fullgraph,
        "dynamic": dynamic,
        "mode": mode,
    }
    rejit = functools.partial(jit, **options)
    if target is ...:
        return rejit
    require(callable(target), lambda: f"forge.jit: {target!r} is not a function or a module", TypeError)
    check_transforms(transforms)
    of_programs, of_modules = split_transforms(transforms)
    if of_modules:
        target = transform_module(_module_of(target), of_modules)
        rejit = functools.partial(rejit, transforms=of_programs)
    check_list(allow_imports, "forge.jit: allow_imports", "the names of modules")
    kernels_named = kernel_executor(kernels, allow_imports=allow_imports) if kernels else None
    layers_named = layer_executor(layers, allow_imports=allow_imports) if layers else None
    first = [each for each in (kernels_named, layers_named) if each is not None]
    of_config = {name: options[name] for name in CONFIG_OPTIONS}
    config = resolve_options(**{**of_config, "transforms": of_programs}, first=first)
    handle = JitHandle(name_of(target), _parameters(target))
    handle.numerics = config.numerics
    handle.again = functools.partial(rejit, target)
    handle.history.strict = config.strict
    idle = idle_options(kernels, layers, allow_imports) | idle_inner_options(target, options, _DEFAULTS)
    if kernels_named is not None or layers_named is not None or idle:
        handle.history.on_return = UnusedOptions(handle, kernels_named, layers_named, idle).warn_of_unused
    if layers_named is not None and isinstance(target, torch.nn.Module):
        look_at_module(layers_named, target)

    def compile_entry(entry: Callable, recorder: CallRecorder | None = None) -> Callable:
        return enter(
            entry,
            Backend(config, handle, recorder),
            before=config.prepare,
            fullgraph=fullgraph,
            dynamic=dynamic,
            history=handle.history,
            layers=layers_named,
        )

    compiled = compile_entry(_entry(target))
    vars(compiled)["_forge_handle"] = handle
    if isinstance(target, torch.nn.Module):

        def compile_forward() -> Callable:
            return compile_entry(_entry_of(_call_forward, name_of(target), _globals()))

        def compile_step(step: Callable, recorder: CallRecorder) -> Callable:
            return compile_entry(_entry_of(step, f"step_of_{name_of(target)}", step.__globals__), recorder)

        has_own_loop = config.numerics == "fast"
        return jitted_module(target, compiled, compile_forward, rejit, compile_step if has_own_loop else None)
    functools.update_wrapper(compiled, target, updated=())
    compiled.__dict__ = {**getattr(target, "__dict__", {}), **compiled.__dict__}  # Dynamo's own attributes stay
    return compiled


def _module_of(target: Callable) -> torch.nn.Module:
    """Return a target whose parameters are to be replaced. Raises TypeError for a function, which may read any
    parameter, and for a jitted one."""
    is_jitted = hasattr(type(target), "_forge_compiled")
    require(
        isinstance(target, torch.nn.Module) and not is_jitted,
        lambda: (
            "forge.jit: a transform replaces parameters, and needs a module that is not jitted yet; "
            f"it was given {f'a jitted {type(target).__name__}' if is_jitted else repr(target)}"
        ),
        TypeError,
    )
    assert isinstance(target, torch.nn.Module)
    return target


_DEFAULTS = {
    each.name: each.default for each in inspect.signature(jit).parameters.values() if each.kind is each.KEYWORD_ONLY
}


def _parameters(target: Callable) -> list[str]:
    function = target.forward if isinstance(target, torch.nn.Module) else target
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return []
    return [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]


_entries = itertools.count()


def _entry(target: Callable) -> Callable:
    """Return a function to compile with its own code object and name: Dynamo's cache and its limit of recompilations
    are per code object, and its record of dynamic shapes is per name.

    Dynamo's guards live as long as the types and modules that they check, and they keep its globals alive: objects
    that must be freed may not be among them. A module is its argument, a function is in its closure. Dynamo's code
    object and its compiled code keep each other alive until the cache entry is gone."""
    template = _call_module if isinstance(target, torch.nn.Module) else _wrap_function(target)
    return _entry_of(template, name_of(target), _globals())


def _globals() -> dict[str, Any]:
    return {"__builtins__": builtins.__dict__, "__name__": __name__}


def _entry_of(template: Callable, name: str, scope: dict[str, Any]) -> Callable:
    """Return a function like `template` with a new code object, and with globals `scope`."""
    code = template.__code__.replace(co_name=f"forge_{next(_entries)}_{name}")
    entry = types.FunctionType(code, scope, closure=template.__closure__)
    weakref.finalize(entry, reset_code, code).atexit = False
    return entry


def _call_module(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def _call_forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module.forward(*args, **kwargs)


def _wrap_function(target: Callable) -> Callable:
    if _runs_later(target):
        target = disable(target, reason="a generator or an async function runs after it was called; jit what it calls")

    def call(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    return call


def _runs_later(target: Callable) -> bool:
    """Return whether calling it runs nothing yet; Dynamo would run all of it at once."""
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return any(is_one(target) for is_one in kinds)


def last_traces(jitted: Any) -> list[Trace]:
    """Return every stage of the graph compiled last: the forward if gradients are needed, else the whole program.

    Args:
        jitted: A result of forge.jit.

    Returns:
        Traces in pass order. A large program has its last stage alone, with a warning, unless FORGE_KEEP_STAGES=1.

    Raises:
        TypeError: If `jitted` is not a result of forge.jit.
    """
    return _stages(jitted, "last_traces", "traces")


def last_backward_traces(jitted: Any) -> list[Trace]:
    """Return every stage of the backward compiled last, of the last graph.

    Args:
        jitted: A result of forge.jit.

    Returns:
        Traces in pass order; of a large program only the last stage, as for last_traces.

    Raises:
        TypeError: If `jitted` is not a result of forge.jit.
    """
    return _stages(jitted, "last_backward_traces", "backward_traces")


def _stages(jitted: Any, caller: str, which: str) -> list[Trace]:
    latest = handle_of(jitted, f"forge.{caller}").latest
    if latest is not None and latest.shortened:
        warnings.warn(f"forge: {SHORTENED}", stacklevel=3)
    return list(getattr(latest, which)) if latest else []


def refold(jitted: Any) -> None:
    """Recompute the folded weights of a frozen function at its next call.

    torch counts most changes, and writes through `data` or `numpy()` of a parameter are noticed; neither needs refold.
    Writes through other aliases do: `buffer.data`, `p.detach().numpy()`, DLPack, or a tensor taken from `p.data` before
    the first call.

    Args:
        jitted: A result of forge.jit(freeze=True).

    Raises:
        TypeError: If `jitted` is not a result of forge.jit.
    """
    for folded in handle_of(jitted, "forge.refold").folded_weights():
        folded.forget()


def finish_compiling(jitted: Any, timeout: float | None = None) -> bool:
    """Wait until a jitted function has its final programs.

    A program whose launches cost more than its kernels is compiled a second time after it was called often: as
    CUDA graphs, or with larger regions in the background. This function starts the second compilation at once and
    installs its result.

    Args:
        jitted: A result of forge.jit.
        timeout: Seconds to wait; None waits without a limit.

    Returns:
        True if every program is final.

    Raises:
        TypeError: If `jitted` is not a result of forge.jit.
    """
    until = time.monotonic() + (math.inf if timeout is None else timeout)
    waiting = handle_of(jitted, "forge.finish_compiling").tiered_programs()
    while waiting := [tiered for tiered in waiting if not tiered.promote()]:
        if time.monotonic() >= until:
            return False
        time.sleep(0.02)
    return True
