"""Kernels, layers and options about them that a user named for a program and that have no effect: one warning each,
with the reason."""

import difflib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from forge.capture.handles import JitHandle, handle_of
from forge.compiler.claim import Claim
from forge.compiler.report import CompileReport, LayerUse
from forge.executors.executor import NO_GRADIENT
from forge.executors.hubex import HubExecutor, LayerExecutor
from forge.ir.source import Source, warn


class UnusedOptions:
    """Warnings about kernels and layers that a user named for the function of `handle` and that no graph uses.

    idle: options that have no effect, each with the reason.
    """

    def __init__(
        self,
        handle: JitHandle,
        kernels: HubExecutor | None,
        layers: LayerExecutor | None,
        idle: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._handle = weakref.ref(handle)
        self._kernels = kernels
        self._layers = layers
        self._idle = idle
        self._warnings: set[str] = set()

    def warn_of_unused(self) -> None:
        """Warn of the named kernels, layers and options that no graph compiled so far uses."""
        handle = self._handle()
        if handle is None or not handle.reports:
            return
        for option, problem in self._idle.items():
            self._warn(option, f"{handle.name}: {problem}")
        if self._kernels is not None:
            for library, problem, source in unused_kernels(self._kernels, handle.reports):
                self._warn(library, f"{handle.name}: {problem}", source)
        if self._layers is not None and self._layers.targets:
            for target in self._layers.targets:
                unmatched = unmatched_layer_message(target, sorted(self._layers.module_names))
                if unmatched is not None:
                    self._warn(str(target), f"{handle.name}: {unmatched}")
            for use in unused_layers(handle.reports):
                problem = f"the layer for {use.module} is not used: {use.reason}"
                self._warn(f"{use.kind}: {use.reason}", f"{handle.name}: {problem}")

    def _warn(self, of: str, what: str, source: Source | None = None) -> None:
        if of not in self._warnings:
            self._warnings.add(of)
            warn(what, source)


def idle_options(kernels: Sequence, layers: Any, allow_imports: Sequence[str]) -> dict[str, str]:
    """Return the options of forge.jit about kernels and layers that have no effect, each with its message."""
    idle = {}
    if isinstance(layers, Mapping) and not layers:
        idle["layers"] = "layers={} names no layer"
    if allow_imports and not kernels and not layers:
        idle["allow_imports"] = f"allow_imports={[*allow_imports]} has no effect without kernels= or layers="
    return idle


def idle_inner_options(target: Any, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, str]:
    """Return messages about what is jitted already, the target of forge.jit or modules inside it, by name: its own
    options have no effect in the target's programs."""
    idle = {}
    for name, each in target.named_modules() if isinstance(target, torch.nn.Module) else [("", target)]:
        is_jitted = hasattr(type(each), "_forge_compiled") or "_forge_handle" in getattr(each, "__dict__", ())
        again = handle_of(each).again if is_jitted else None
        inner = {} if again is None else again.keywords
        idle_names = [each for each, value in inner.items() if value not in (defaults[each], options[each])]
        if idle_names:
            text = " and ".join(f"{each}=" for each in idle_names)
            where = f" of {name!r}" if name else ""
            idle[name] = f"{text} of the inner forge.jit{where} has no effect: give it to the outer one"
    return idle


def look_at_module(layers: LayerExecutor, module: torch.nn.Module) -> None:
    """Have the layers see the classes of all of a model's modules: the first calls need not reach each of them."""
    for each in module.modules():
        layers.see(type(each))


def unmatched_layer_message(target: str | type, names: Sequence[str]) -> str | None:
    """Return a message if no module has the name or class that a layer was named for; None otherwise."""
    name = target if isinstance(target, str) else target.__name__
    if name in names:
        return None
    near = difflib.get_close_matches(name, names, n=3)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else f"; they are {', '.join(sorted(names))}"
    return f"no module is a {name!r}, for which layers= names a layer{hint}"


def unused_layers(programs: Sequence[CompileReport]) -> Iterator[LayerUse]:
    """Yield the calls of modules that their layers do not fit. A wrong layer that fits has its own warning."""
    for program in programs:
        yield from (use for use in program.layers if use.how is None and not use.layer)


def unused_kernels(kernels: HubExecutor, programs: Sequence[CompileReport]) -> Iterator[tuple[str, str, Source | None]]:
    """Yield (name, warning, source) of kernels that a program does not use because they have no gradient, and of
    libraries without any used kernel. A kernel that failed verification has its own warning."""
    claims = [[*program.claims, *program.backward_claims] for program in programs]
    declined = [entry for each in claims for entry in _declined_claims(kernels, each)]
    for each in claims:
        used_here = {claim.executor for claim in each}
        for name, reason, claim in _declined_claims(kernels, each):
            if reason == NO_GRADIENT and name not in used_here:
                yield name, f"kernel {name} is not used for {claim.operation}: {reason}", claim.source
    used = {claim.executor for each in claims for claim in each}
    for library, names in _libraries(kernels).items():
        reasons = [each for each in declined if each[0] in names]
        if not used.isdisjoint(names) or any(_has_own_warning(kernels, reason) for _, reason, _ in reasons):
            continue
        if not reasons:
            what = ", ".join(sorted({each.operation for each in kernels.kernels if each.name in names}))
            yield library, f"no kernel of {library} is used: nothing calls {what}", None
            continue
        name, reason, claim = reasons[0]
        yield library, f"no kernel of {library} is used: {name} declined {claim.operation}: {reason}", claim.source


def _declined_claims(kernels: HubExecutor, claims: Sequence[Claim]) -> list[tuple[str, str, Claim]]:
    names = {kernel.name for kernel in kernels.kernels}
    return [(name, reason, claim) for claim in claims for name, reason in claim.declined if name in names]


def _has_own_warning(kernels: HubExecutor, reason: str) -> bool:
    return reason == NO_GRADIENT or (kernels.verifier is not None and kernels.verifier.has_warned_of(reason))


def _libraries(kernels: HubExecutor) -> dict[str, set[str]]:
    """Return the names of the kernels, grouped by the source that a user named."""
    result: dict[str, set[str]] = {}
    for kernel in kernels.kernels:
        result.setdefault(kernel.entry.library or kernel.name, set()).add(kernel.name)
    return result
