"""Layers of the Hub: classes whose `forward` takes the place of that of modules of a jitted model, where it fits.

What a user says becomes offers: a name or class of modules, a device, modes, and where the layer is. A module is
offered what its class's name, or the name that the `kernels` library's decorators gave it, says; then the device, its
capability, the mode and what the layer declares of itself decide, each with a reason where they say no.
"""

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from forge import hub
from forge.executors.executor import Decision, Declined, decline
from forge.executors.fingerprint import Fingerprint
from forge.executors.hubex.executor import HubExecutor
from forge.executors.hubex.fingerprint import fingerprint
from forge.executors.hubex.kernels import Kernel, implementation
from forge.executors.hubex.overrides import layer_kernel, symbol_of
from forge.executors.hubex.verification.verdicts import Verifier, verifier
from forge.executors.modules import ModuleExecutor, ModuleForward, ModuleOverride, ModuleTemplate
from forge.hub import compat
from forge.hub.source import parse_source
from forge.ir import Symbol, check
from forge.patterns import Pattern

REGISTERED = "registered"
DECLARED = frozenset({"has_backward", "can_torch_compile"})
_ANY = frozenset[str]({"FALLBACK"})
_COMPILED = "TORCH_COMPILE"
_ORDER = {  # of modes that a call may take a layer of: what runs under torch.compile first
    True: (frozenset({"TRAINING", _COMPILED}), frozenset({"TRAINING"}), _ANY),
    False: (
        frozenset({"INFERENCE", _COMPILED}),
        frozenset({"TRAINING", _COMPILED}),
        frozenset({"INFERENCE"}),
        frozenset({"TRAINING"}),
        _ANY,
    ),
}

Layers = Mapping[str | type, Any] | Sequence[Any] | str


@dataclass(frozen=True)
class Layer:
    """A class that lends its forward. library: where it comes from; content: the hash of the files there."""

    kind: type[torch.nn.Module]
    library: str = ""
    content: str = ""

    @property
    def name(self) -> str:
        return f"{self.library}.{self.kind.__name__}" if self.library else self.kind.__name__

    @property
    def has_backward(self) -> bool:
        """Whether it may have a gradient; verification says whether it is right."""
        return getattr(self.kind, "has_backward", True)

    def problem(self, module: type[torch.nn.Module]) -> str | None:
        """Why modules of a class cannot have its forward, or None."""
        if self.kind.__init__ is not torch.nn.Module.__init__:
            return "it has a constructor of its own, and a layer has no state"
        members = {name for name in dir(self.kind) if not name.startswith("__")}
        more = sorted(members - set(dir(torch.nn.Module)) - DECLARED)
        if more:
            return f"it has {', '.join(more)} beside forward, and a layer has nothing else"
        theirs, ours = (list(inspect.signature(each.forward).parameters.values()) for each in (self.kind, module))
        if [each.kind for each in theirs] != [each.kind for each in ours]:
            names = ", ".join(map(str, theirs[1:]))
            return f"its forward takes ({names}), and that of the module ({', '.join(map(str, ours[1:]))})"
        return None


class Place:
    """Where a layer is; it is loaded once, when it is first asked for. trusts: as compat.LayerPlace."""

    def __init__(
        self, source: str, layer: str, trusts: bool | tuple[str, ...] = False, allow_imports: Sequence[str] = ()
    ) -> None:
        self.source = source
        self.layer = layer
        self.trusts = trusts
        self.allow_imports = allow_imports
        self._loaded: Layer | None = None

    def load(self) -> Layer:
        """Raises HubError where it cannot be had."""
        if self._loaded is None:
            found = dict(layers_of(self.source, self.trusts, self.allow_imports))
            if self.layer not in found:
                there = ", ".join(sorted(found)) or "none"
                raise hub.NotFoundError(f"{self.source}: has no layer {self.layer}; there are: {there}")
            self._loaded = found[self.layer]
        return self._loaded


class Known:
    """A layer that was given itself."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer

    def load(self) -> Layer:
        return self.layer


@dataclass(frozen=True)
class Offer:
    """A layer, by mode, for modules of a name or a class. device: a type, None for any; limits: of its capability."""

    wanted: str | type
    modes: Mapping[frozenset[str], Place | Known]
    device: str | None = None
    limits: tuple[int, int] | None = None

    @property
    def width(self) -> float:
        return float("inf") if self.limits is None else self.limits[1] - self.limits[0]

    def fits(self, device: torch.device) -> bool:
        """Whether it is for a device."""
        if self.device is None:
            return True
        kind = "rocm" if device.type == "cuda" and torch.version.hip is not None else device.type
        if kind != self.device:
            return False
        if self.limits is None or device.type != "cuda":
            return True
        major, minor = torch.cuda.get_device_capability(device)
        return self.limits[0] <= 10 * major + minor <= self.limits[1]


# what a user says


def layers_of(
    source: str, trusts: bool | tuple[str, ...] = False, allow_imports: Sequence[str] = ()
) -> Iterator[tuple[str, Layer]]:
    """The layers of a repository or folder, by name. Raises HubError."""
    local = parse_source(source).path is not None
    trust: dict[str, Any] = {"trust": "any"} if trusts is True else {"repositories": trusts or ()}
    policy = hub.Policy(local=local, **trust).allowing(allow_imports)
    resolved = hub.resolve(source, policy=policy)
    package = hub.load(resolved)
    content = next(each.verified.content for each in hub.loaded() if each.module is package)
    module = getattr(package, "layers", None)
    for name, value in vars(module).items() if module is not None else ():
        is_layer = isinstance(value, type) and issubclass(value, torch.nn.Module) and value is not torch.nn.Module
        if is_layer and not name.startswith("_"):
            yield name, Layer(value, resolved.metadata.name, content)


def read_layers(layers: Layers, allow_imports: Sequence[str] = ()) -> list[Offer]:
    """What `forge.jit(layers=…)` was given, as offers.

    Raises TypeError for what is none of its forms, HubError for a source that cannot be used.
    """
    if isinstance(layers, str):
        check(
            layers == REGISTERED,
            lambda: f"layers is {layers!r}, but must be a mapping, a list of sources, or {REGISTERED!r}",
        )
        return list(_registered(allow_imports))
    if isinstance(layers, Mapping):
        offers = [offer for name, value in layers.items() for offer in _offers(name, value, allow_imports)]
    else:
        check(
            isinstance(layers, Sequence),
            lambda: f"layers is {layers!r}, but must be a mapping, a list of sources, or {REGISTERED!r}",
            TypeError,
        )
        offers = [offer for source in layers for offer in _every(source, allow_imports)]
    for offer in offers:
        if _is_here(offer.device):
            for place in offer.modes.values():
                place.load()
    return offers


def _is_here(device: str | None) -> bool:
    return device in (None, "cpu") or (device in ("cuda", "rocm") and torch.cuda.is_available())


def _registered(allow_imports: Sequence[str]) -> Iterator[Offer]:
    for name, devices in compat.registered_layers().items():
        for (kind, limits), modes in devices.items():
            yield Offer(name, _modes(name, modes, allow_imports), kind, limits)


def _every(source: Any, allow_imports: Sequence[str]) -> Iterator[Offer]:
    """All layers of a source, each for modules whose class has its name."""
    if _is_layer(source):
        yield Offer(source.__name__, {_ANY: Known(Layer(source))})
        return
    check(
        isinstance(source, (str, os.PathLike)),
        lambda: f"layers: {source!r} is no repository, folder or layer; say for which modules it is in a mapping",
        TypeError,
    )
    found = list(layers_of(os.fspath(source), allow_imports=allow_imports))
    if not found:
        raise hub.NotFoundError(f"{source}: has no layers")
    for name, layer in found:
        yield Offer(name, {_ANY: Known(layer)})


def _is_layer(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.nn.Module)


def _offers(name: str | type, value: Any, allow_imports: Sequence[str]) -> Iterator[Offer]:
    check(
        isinstance(name, (str, type)),
        lambda: f"layers: {name!r} is no name of a layer and no class of modules",
        TypeError,
    )
    if not isinstance(value, Mapping):
        yield Offer(name, _modes(name, value, allow_imports))
        return
    for key, modes in value.items():
        kind, limits = compat.layer_device(key)
        yield Offer(name, _modes(name, modes, allow_imports), kind, limits)


def _modes(name: str | type, value: Any, allow_imports: Sequence[str]) -> dict[frozenset[str], Place | Known]:
    if not isinstance(value, Mapping):
        return {_ANY: _place(name, value, allow_imports)}
    return {compat.layer_mode(mode): _place(name, each, allow_imports) for mode, each in value.items()}


def _place(name: str | type, value: Any, allow_imports: Sequence[str]) -> Place | Known:
    if _is_layer(value):
        return Known(Layer(value))
    if compat.is_layer_place(value):
        found = compat.layer_place(value)
        return Place(found.source, found.layer, found.trusts, allow_imports)
    check(
        isinstance(value, (str, os.PathLike)),
        lambda: f"layers: {name!r} is given {value!r}, which is no layer, repository or folder",
        TypeError,
    )
    source, _, layer = os.fspath(value).rpartition(":")
    if source and layer.isidentifier():
        return Place(source, layer, False, allow_imports)
    return Place(os.fspath(value), name if isinstance(name, str) else name.__name__, False, allow_imports)


# which one a module gets


@dataclass(frozen=True)
class LayerOverride(ModuleOverride):
    """A layer as a kernel for a call of a module."""

    executor: "LayerExecutor"
    kernel: Kernel

    @property
    def function(self) -> ModuleForward:
        return self.kernel.function

    def verify(self, tensors: Sequence[torch.Tensor]) -> Decision:
        return self.executor.verifier.verdict(self.kernel, tuple(tensors), {})

    def symbol(self) -> Symbol:
        return self.executor.symbol_for(self.kernel)

    def fingerprint(self) -> Fingerprint:
        return fingerprint(self.kernel)


class LayerExecutor(HubExecutor, ModuleExecutor):
    """Runs modules' calls by layers, which are chosen while a call is captured (`find`, `override`). No kernel is asked
    again when it is claimed.

    verifier: verifies the layers. named: the names and classes of modules that the user gave layers for one by one.
    seen: the names by which modules that were called may be offered some.
    """

    def __init__(
        self, offers: Iterable[Offer] = (), verifier: Verifier = verifier, *, named: Iterable[str | type] = ()
    ) -> None:
        super().__init__("layers", verifier)
        self.offers = list(offers)
        self.named = list(named)
        self.seen: set[str] = set()
        self._symbols: dict[str, tuple[Any, Symbol]] = {}
        self._used: dict[Symbol, Kernel] = {}

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """None: calls are found by their modules."""
        return ()

    def candidates(self, symbol: Symbol) -> list[Any]:
        kernel = self._used.get(symbol)
        return [] if kernel is None else [implementation(kernel, None)]

    def ignoring_speed_hints(self) -> "LayerExecutor":
        return self

    def see(self, kind: type[torch.nn.Module]) -> None:
        """Notes the names of a class of modules."""
        self.seen.update(name for name in (getattr(kind, "kernel_layer_name", None), kind.__name__) if name)

    def layers_for(self, module: torch.nn.Module) -> list[Offer]:
        """What is for a module, whatever the device: by the name that a decorator gave its class, else by the class."""
        kind = type(module)
        for wanted in (getattr(kind, "kernel_layer_name", None), kind, kind.__name__):
            found = [offer for offer in self.offers if wanted is not None and offer.wanted == wanted]
            if found:
                return found
        return []

    def find(self, module: torch.nn.Module, device: torch.device, training: bool) -> Layer | Declined:
        """The layer for a call of a module on a device; Declined with the reason where there is none."""
        condition = getattr(type(module), "kernel_condition", None)
        if condition is not None and not condition(module):
            return decline("the condition of its decorator says no")
        fitting = sorted((each for each in self.layers_for(module) if each.fits(device)), key=lambda each: each.width)
        if not fitting:
            return decline(f"no layer is for {device}")
        place = next((fitting[0].modes[mode] for mode in _ORDER[training] if mode in fitting[0].modes), None)
        if place is None:
            return decline(f"no layer is for {'training' if training else 'inference'}")
        try:
            layer = place.load()
        except (hub.HubError, OSError, ValueError) as error:
            return decline(f"it cannot be loaded: {error}")
        if training and not layer.has_backward:
            return decline(f"{layer.name} has has_backward = False, and a gradient is needed")
        problem = layer.problem(type(module))
        return layer if problem is None else decline(f"{layer.name}: {problem}")

    def override(
        self,
        layer: Layer,
        module: torch.nn.Module,
        call: tuple[tuple, dict[str, Any]],
        names: Sequence[str],
        shapes: Sequence[Sequence[Any]],
        *,
        training: bool,
    ) -> LayerOverride:
        template = ModuleTemplate(module)
        reference = ModuleForward(type(module).forward, template, *call, names)
        function = ModuleForward(layer.kind.forward, template, *call, names, contiguous=True)
        kernel = layer_kernel(
            function,
            reference,
            shapes,
            name=layer.kind.__name__,
            library=layer.library,
            content=layer.content,
            grad="autograd" if training else "none",
        )
        return LayerOverride(self, kernel)

    def symbol_for(self, kernel: Kernel) -> Symbol:
        """The symbol of the calls that a kernel takes: one for all modules that differ in their tensors alone."""
        subject = fingerprint(kernel)
        for known, symbol in self._symbols.values():
            if known == (subject, kernel.entry.grad.kind):
                return symbol
        base = kernel.target.symbol.id
        id = base if base not in self._symbols else f"{base}_{len(self._symbols)}"
        symbol = symbol_of(kernel.pattern.reference, id)
        self._symbols[id] = (subject, kernel.entry.grad.kind), symbol
        self._used[symbol] = replace(kernel, target=replace(kernel.target, symbol=symbol))
        return symbol


def layer_executor(layers: Layers, *, allow_imports: Sequence[str] = ()) -> LayerExecutor:
    """An executor of these layers alone. Raises as read_layers does."""
    return LayerExecutor(read_layers(layers, allow_imports), named=layers if isinstance(layers, Mapping) else ())
