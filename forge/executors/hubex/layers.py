"""Layers of the Hub: classes whose `forward` replaces the forward of matching modules of a jitted model.

The option `layers` is parsed into offers: a name or class of modules, a device, modes, and the layer's source. The
offers of a module are those for its class's name, or for its name from the `kernels` library's decorators; then the
device, its capability, the mode and the layer's attributes select one, and each declines with a reason.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from forge import hub
from forge.executors.executor import Declined, decline
from forge.executors.hubex.executor import HubExecutor
from forge.executors.hubex.fingerprint import fingerprint
from forge.executors.hubex.functions import meta_of
from forge.executors.hubex.kernels import Kernel, Origin, OwnForward, implementation
from forge.executors.hubex.operators import Target
from forge.executors.hubex.verification.verification_cache import Verifier, verifier
from forge.executors.modules import Layer, ModuleExecutor, ModuleForward, ModuleOverride, ModuleTemplate
from forge.hub import compat
from forge.hub.manifest import DimOrder, Grad, KernelEntry, Layout, from_function
from forge.hub.manifest.shapes import DimPattern, ShapePattern
from forge.hub.source import parse_source
from forge.ir import SYMBOLIC_TYPES, Symbol, Tag, check
from forge.patterns import Pattern

REGISTERED = "registered"
_ANY = frozenset[str]({"FALLBACK"})
_COMPILED = "TORCH_COMPILE"
_ORDER = {  # the modes whose layers suit a call, in order: layers for torch.compile first
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


class LayerSource:
    """The source of a layer, loaded once at its first use. trusts: as for compat.LayerPlace."""

    def __init__(
        self,
        source: str = "",
        layer: str = "",
        trusts: bool | tuple[str, ...] = False,
        allow_imports: Sequence[str] = (),
        loaded: Layer | None = None,
    ) -> None:
        self.source = source
        self.layer = layer
        self.trusts = trusts
        self.allow_imports = allow_imports
        self._loaded = loaded

    def load(self) -> Layer:
        """Return the layer. Raises HubError if it cannot be loaded."""
        if self._loaded is None:
            layers = dict(layers_of(self.source, self.trusts, self.allow_imports))
            if self.layer not in layers:
                names = ", ".join(sorted(layers)) or "none"
                raise hub.NotFoundError(f"{self.source}: has no layer {self.layer}; there are: {names}")
            self._loaded = layers[self.layer]
        return self._loaded


@dataclass(frozen=True)
class Offer:
    """Layers by mode for modules of a name or a class. device: a device type, None for any; limits: the range of its
    compute capability."""

    target: str | type
    modes: Mapping[frozenset[str], LayerSource]
    device: str | None = None
    limits: tuple[int, int] | None = None

    @property
    def width(self) -> float:
        return float("inf") if self.limits is None else self.limits[1] - self.limits[0]

    def fits(self, device: torch.device) -> bool:
        """Return whether the offer covers a device."""
        if self.device is None:
            return True
        kind = "rocm" if device.type == "cuda" and torch.version.hip is not None else device.type
        if kind != self.device:
            return False
        if self.limits is None or device.type != "cuda":
            return True
        major, minor = torch.cuda.get_device_capability(device)
        return self.limits[0] <= 10 * major + minor <= self.limits[1]


# from options to offers


def layers_of(
    source: str, trusts: bool | tuple[str, ...] = False, allow_imports: Sequence[str] = ()
) -> Iterator[tuple[str, Layer]]:
    """Yield the layers of a repository or folder, by name. Raises HubError."""
    local = parse_source(source).path is not None
    trust: dict[str, Any] = {"trust": "any"} if trusts is True else {"repositories": trusts or ()}
    policy = hub.Policy(local=local, **trust).with_imports(allow_imports)
    resolved = hub.resolve(source, policy=policy)
    package = hub.load(resolved)
    content = next(each.verified.content for each in hub.loaded_kernels() if each.module is package)
    module = getattr(package, "layers", None)
    for name, value in vars(module).items() if module is not None else ():
        if _is_layer(value) and value is not torch.nn.Module and not name.startswith("_"):
            yield name, Layer(value, resolved.metadata.name, content)


def read_layers(layers: Layers, allow_imports: Sequence[str] = ()) -> list[Offer]:
    """Parse the value of `forge.jit(layers=…)` into offers.

    Raises TypeError for an unsupported form, HubError for a source that cannot be used.
    """
    expectation = f"must be a mapping, a list of sources, or {REGISTERED!r}"
    if isinstance(layers, str):
        check(layers == REGISTERED, lambda: f"forge.jit: layers is {layers!r}, but {expectation}")
        return list(_registered_offers(allow_imports))
    check(
        isinstance(layers, (Mapping, Sequence)),
        lambda: f"forge.jit: layers is {layers!r}, but {expectation}",
        TypeError,
    )
    if isinstance(layers, Mapping):
        offers = [offer for name, value in layers.items() for offer in _offers(name, value, allow_imports)]
    else:
        offers = [offer for source in layers for offer in _offers_of_source(source, allow_imports)]
    for offer in offers:
        if _is_here(offer.device):
            for source in offer.modes.values():
                source.load()
    return offers


def _is_here(device: str | None) -> bool:
    return device in (None, "cpu") or (device in ("cuda", "rocm") and torch.cuda.is_available())


def _registered_offers(allow_imports: Sequence[str]) -> Iterator[Offer]:
    for name, devices in compat.registered_layers().items():
        for (kind, limits), modes in devices.items():
            yield Offer(name, _modes(name, modes, allow_imports), kind, limits)


def _offers_of_source(source: Any, allow_imports: Sequence[str]) -> Iterator[Offer]:
    """Yield all layers of a source, each for modules whose class has its name."""
    if _is_layer(source):
        yield Offer(source.__name__, {_ANY: LayerSource(loaded=Layer(source))})
        return
    check(
        isinstance(source, (str, os.PathLike)),
        lambda: (
            f"forge.jit: layers: {source!r} is no repository, folder or layer; say for which modules it is in a mapping"
        ),
        TypeError,
    )
    layers = list(layers_of(os.fspath(source), allow_imports=allow_imports))
    if not layers:
        raise hub.NotFoundError(f"{source}: has no layers")
    for name, layer in layers:
        yield Offer(name, {_ANY: LayerSource(loaded=layer)})


def _is_layer(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.nn.Module)


def _offers(name: str | type, value: Any, allow_imports: Sequence[str]) -> Iterator[Offer]:
    check(
        isinstance(name, (str, type)),
        lambda: f"forge.jit: layers: {name!r} is no name of a layer and no class of modules",
        TypeError,
    )
    if not isinstance(value, Mapping):
        yield Offer(name, _modes(name, value, allow_imports))
        return
    for key, modes in value.items():
        yield Offer(name, _modes(name, modes, allow_imports), *compat.layer_device(key))


def _modes(name: str | type, value: Any, allow_imports: Sequence[str]) -> dict[frozenset[str], LayerSource]:
    if not isinstance(value, Mapping):
        return {_ANY: _layer_source(name, value, allow_imports)}
    return {compat.layer_mode(mode): _layer_source(name, each, allow_imports) for mode, each in value.items()}


def _layer_source(name: str | type, value: Any, allow_imports: Sequence[str]) -> LayerSource:
    if _is_layer(value):
        return LayerSource(loaded=Layer(value))
    if compat.is_layer_place(value):
        place = compat.layer_place(value)
        return LayerSource(place.source, place.layer, place.trusts, allow_imports)
    check(
        isinstance(value, (str, os.PathLike)),
        lambda: f"forge.jit: layers: {name!r} is given {value!r}, which is no layer, repository or folder",
        TypeError,
    )
    source, _, layer = os.fspath(value).rpartition(":")
    if not (source and layer.isidentifier()):
        source, layer = os.fspath(value), name if isinstance(name, str) else name.__name__
    return LayerSource(source, layer, False, allow_imports)


# layers as kernels


def symbol_of(reference: ModuleForward, id: str) -> Symbol:
    """Return the symbol of a module's call; if no layer claims it, torch runs the module's own forward."""

    def meta(*tensors: Any) -> Any:
        return meta_of(reference, tensors, {})

    def body(*tensors: Any) -> Any:
        own = Symbol(reference.__name__, f"opaque.{id}", meta=meta, op=reference, tags=frozenset({Tag.OPAQUE}))
        return own(*tensors)

    return Symbol(reference.__name__, id, body=body)


def layer_kernel(
    layer: Layer, function: ModuleForward, reference: ModuleForward, shapes: Sequence[Sequence[Any]], grad: str
) -> Kernel:
    """Return a layer as a kernel for the calls of one kind of module, with contiguous tensors. shapes: the shapes of
    the module's tensors in the program."""
    id = f"layer.{reference.__name__}"
    signature = from_function(reference, id)
    entry = KernelEntry(
        id,
        layer.kind.__name__,
        fn=function,
        op_kind="layer",
        library=layer.library,
        shape={name: _pattern(shape) for name, shape in zip(reference.names, shapes, strict=True)},
        layout=dict.fromkeys(reference.names, Layout(order=DimOrder())),
        grad=Grad(grad),
    )
    target = Target(symbol_of(reference, id), signature, {name: name for name in reference.names})
    origin, pattern = Origin(content=layer.content), OwnForward(reference, reference.__name__, list(reference.names))
    return Kernel(entry, signature, target, function, pattern=pattern, origin=origin, particular=True)


def _pattern(shape: Sequence[Any]) -> ShapePattern:
    """Return a shape as a pattern, in which symbolic sizes are named dims."""
    dims = (DimPattern(name=_name(dim)) if isinstance(dim, SYMBOLIC_TYPES) else DimPattern(length=dim) for dim in shape)
    return ShapePattern(tuple(dims))


def _name(dim: Any) -> str | None:
    text = str(dim.node.expr)
    return text if text.isidentifier() else None


# layer selection for a module


class LayerExecutor(HubExecutor, ModuleExecutor):
    """Executor of modules' calls by layers, which are selected during capture (`find`, `override`). The claim pass does
    not check the selected kernel again.

    verifier: verifies the layers. targets: the names and classes of modules for which the user named a layer.
    module_names: the names of called modules, under which offers may exist for them.
    """

    verifier: Verifier

    def __init__(
        self, offers: Iterable[Offer] = (), verifier: Verifier = verifier, *, targets: Iterable[str | type] = ()
    ) -> None:
        super().__init__("layers", verifier)
        self.offers = list(offers)
        self.targets = list(targets)
        self.module_names: set[str] = set()
        self._symbols: dict[str, tuple[Any, Symbol]] = {}
        self._used: dict[Symbol, Kernel] = {}

    @property
    def patterns(self) -> Sequence[Pattern]:  # type: ignore[override]  # read-only, as a HubExecutor's
        """Return none: calls are found by their modules."""
        return ()

    def candidates(self, symbol: Symbol) -> list[Any]:
        kernel = self._used.get(symbol)
        return [] if kernel is None else [implementation(kernel, None)]

    def without_speed_hints(self) -> "LayerExecutor":
        return self

    def see(self, kind: type[torch.nn.Module]) -> None:
        """Record the names of a module class."""
        self.module_names.update(name for name in (getattr(kind, "kernel_layer_name", None), kind.__name__) if name)

    def layers_for(self, module: torch.nn.Module) -> list[Offer]:
        """Return the offers for a module on any device: by the decorator's name of its class, else by the class, else
        by the class's name."""
        kind = type(module)
        for target in (getattr(kind, "kernel_layer_name", None), kind, kind.__name__):
            offers = [offer for offer in self.offers if target is not None and offer.target == target]
            if offers:
                return offers
        return []

    def find(self, module: torch.nn.Module, device: torch.device, training: bool) -> Layer | Declined:
        """Return the layer for a call of a module on a device, or Declined with the reason."""
        condition = getattr(type(module), "kernel_condition", None)
        if condition is not None and not condition(module):
            return decline("the condition of its decorator says no")
        candidates = sorted(
            (each for each in self.layers_for(module) if each.fits(device)), key=lambda each: each.width
        )
        if not candidates:
            return decline(f"no layer is for {device}")
        place = next((candidates[0].modes[mode] for mode in _ORDER[training] if mode in candidates[0].modes), None)
        if place is None:
            return decline(f"no layer is for {'training' if training else 'inference'}")
        try:
            layer = place.load()
        except (hub.HubError, OSError, ValueError) as error:
            return decline(f"the layer cannot be loaded: {error}")
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
    ) -> ModuleOverride:
        template = ModuleTemplate(module)
        reference = ModuleForward(type(module).forward, template, *call, names)
        function = ModuleForward(layer.kind.forward, template, *call, names, contiguous=True)
        kernel = layer_kernel(layer, function, reference, shapes, "autograd" if training else "none")
        return ModuleOverride(
            function,
            verify=lambda tensors: self.verifier.verdict(kernel, tuple(tensors), {}),
            symbol=partial(self.symbol_for, kernel, reference),
            fingerprint=partial(fingerprint, kernel),
        )

    def symbol_for(self, kernel: Kernel, reference: ModuleForward) -> Symbol:
        """Return the symbol of the calls that a kernel takes, shared by modules that differ only in tensors."""
        subject = fingerprint(kernel)
        for key, symbol in self._symbols.values():
            if key == (subject, kernel.entry.grad.kind):
                return symbol
        base = kernel.target.symbol.id
        id = base if base not in self._symbols else f"{base}_{len(self._symbols)}"
        symbol = symbol_of(reference, id)
        self._symbols[id] = (subject, kernel.entry.grad.kind), symbol
        self._used[symbol] = replace(kernel, target=replace(kernel.target, symbol=symbol))
        return symbol


def layer_executor(layers: Layers, *, allow_imports: Sequence[str] = ()) -> LayerExecutor:
    """Return an executor of these layers only. Raises the errors of read_layers."""
    return LayerExecutor(read_layers(layers, allow_imports), targets=layers if isinstance(layers, Mapping) else ())
