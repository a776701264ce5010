"""The requirements on layers, which lend their `forward` to other modules: no state, nothing but `forward`."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from forge.hub.conformance.repository import Finding, Python, Repository, Variant
from forge.hub.import_graph import name_of

DECLARED = ("has_backward", "can_torch_compile")
FILES = ("layers.py", "layers/__init__.py")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class LayerClass:
    """A layer as its source declares it. forward: its parameters after self. has_backward: as declared, or absent."""

    name: str
    forward: str
    has_backward: bool
    file: str
    line: int


@dataclass(frozen=True)
class _Layer:
    """The class of a layer, the variant and file that it is in, and the names of all classes of that file."""

    variant: Variant
    path: str
    node: ast.ClassDef
    beside: frozenset[str]

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def bases(self) -> list[str]:
        return [name_of(each) for each in self.node.bases]

    @property
    def methods(self) -> list[Function]:
        return [each for each in self.node.body if isinstance(each, Function)]

    @property
    def forwards(self) -> list[Function]:
        return [each for each in self.methods if each.name == "forward"]

    @property
    def variables(self) -> Iterator[tuple[str, ast.stmt, ast.expr | None]]:
        """Yield (name, statement, value) of each binding in the class's body; an annotation alone binds nothing."""
        for each in self.node.body:
            if isinstance(each, ast.Assign):
                yield from ((ast.unparse(target), each, each.value) for target in each.targets)
            elif isinstance(each, ast.AnnAssign) and each.value is not None:
                yield ast.unparse(each.target), each, each.value
            elif isinstance(each, ast.ClassDef):
                yield each.name, each, None

    def declaration(self, name: str) -> tuple[ast.stmt | None, Any]:
        """Return the statement that binds a class variable, and its value: Ellipsis if it is not a constant."""
        for bound, statement, value in self.variables:
            if bound == name:
                return statement, value.value if isinstance(value, ast.Constant) else ...
        return None, ...

    def finding(self, requirement: str, text: str, place: ast.stmt | None = None) -> Finding:
        return self.variant.finding(requirement, f"{self.name}{text}", self.path, (place or self.node).lineno)


def _layers(repository: Repository) -> Iterator[_Layer]:
    """Yield the public classes of the modules of layers."""
    for variant, python, tree in repository.python():
        below = python.path.removeprefix(f"{variant.root}/") if variant.root else python.path
        if below == "layers.py" or below.startswith("layers/"):
            classes = [each for each in tree.body if isinstance(each, ast.ClassDef)]
            names = frozenset(each.name for each in classes)
            layers = (_Layer(variant, python.path, each, names) for each in classes if not each.name.startswith("_"))
            yield from (layer for layer in layers if not _is_function(layer))


def _is_function(layer: _Layer) -> bool:
    """Return whether a class is an autograd.Function or a plain record, neither of which is a layer."""
    return "Function" in layer.bases or (not layer.forwards and not any("Module" in name for name in layer.bases))


def layer_classes(repository: Repository) -> Iterator[LayerClass]:
    """Yield every layer of a repository's variants."""
    for layer in _layers(repository):
        forward = next(iter(layer.forwards), None)
        parameters = "" if forward is None else ast.unparse(forward.args).partition(", ")[2]
        _, has_backward = layer.declaration("has_backward")
        yield LayerClass(layer.name, parameters, has_backward is not False, layer.path, layer.node.lineno)


def layers_exported(repository: Repository) -> Iterator[Finding]:
    """Require that a kernel with layers has `layers` in its `__init__`."""
    for variant in repository.variants:
        root = f"{variant.root}/" if variant.root else ""
        init = variant.python.get(f"{root}__init__.py")
        has_layers = any(f"{root}{each}" in variant.files for each in FILES)
        if has_layers and init is not None and init.tree is not None and "layers" not in _names(init):
            yield variant.finding("layers-exported", "layers is not imported here: from . import layers", init.path, 1)


def _names(python: Python) -> set[str]:
    """Return the names that are imported or assigned at module level."""
    names: set[str] = set()
    for node in python.nodes:
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def layer_class(repository: Repository) -> Iterator[Finding]:
    """Require that a layer is a subclass of nn.Module, or of a layer beside it, and has no constructor."""
    for layer in _layers(repository):
        if not any(name == "Module" or name in layer.beside for name in layer.bases):
            bases = ", ".join(ast.unparse(each) for each in layer.node.bases) or "object"
            yield layer.finding("layer-class", f" is a subclass of {bases}, but must be one of nn.Module alone")
        for each in layer.methods:
            if each.name in ("__init__", "__new__"):
                yield layer.finding("layer-constructor", " has a constructor of its own", each)


def layer_members(repository: Repository) -> Iterator[Finding]:
    """Require that a layer has `forward`, no other method, and no class variable but has_backward and
    can_torch_compile."""
    for layer in _layers(repository):
        if not layer.forwards and all(name == "Module" for name in layer.bases):
            yield layer.finding("layer-forward", " has no forward")
        for each in layer.methods:
            if each.name not in ("forward", "__init__", "__new__"):
                yield layer.finding("layer-methods", f".{each.name} is a method beside forward", each)
        for name, statement, _ in layer.variables:
            if name not in DECLARED:
                text = f".{name} is a class variable; a layer has {' and '.join(DECLARED)} alone"
                yield layer.finding("layer-variables", text, statement)


def layer_declarations(repository: Repository) -> Iterator[Finding]:
    """Require that has_backward and can_torch_compile are literally True or False, and has_backward is not claimed
    without a gradient.

    An absent has_backward claims True: a kernel of native or Triton code without any gradient must say False.
    """
    for layer in _layers(repository):
        for name in DECLARED:
            statement, value = layer.declaration(name)
            if statement is not None and not isinstance(value, bool):
                yield layer.finding("layer-variables", f".{name} must be True or False as written", statement)
        statement, value = layer.declaration("has_backward")
        is_true = statement is None or value is True
        if is_true and _has_kernels(layer.variant) and not _has_gradient(layer.variant):
            text = " claims a backward, and nothing here defines a gradient: has_backward = False"
            yield layer.finding("has-backward", text, statement)


def _has_kernels(variant: Variant) -> bool:
    """Return whether the variant runs code that is opaque to autograd."""
    return bool(variant.native) or any(
        "import triton" in each.text or "custom_op" in each.text for each in variant.python.values()
    )


def _has_gradient(variant: Variant) -> bool:
    if any("autograd" in each.text for each in variant.python.values()):
        return True
    return any(b"autograd" in variant.files[path].read().lower() for path in variant.native)


def layer_signature(repository: Repository) -> Iterator[Finding]:
    """Require that forward takes self and, if the layer is named like one of torch's, the arguments of that layer."""
    for layer in _layers(repository):
        for each in layer.forwards:
            if (problem := _signature_problem(layer.name, each)) is not None:
                yield layer.finding("layer-signature", f".forward {problem}", each)


def _signature_problem(name: str, forward: Function) -> str | None:
    names = [each.arg for each in (*forward.args.posonlyargs, *forward.args.args)]
    if {name_of(each) for each in forward.decorator_list} & {"staticmethod", "classmethod"}:
        return "must be a method"
    if isinstance(forward, ast.AsyncFunctionDef):
        return "must not be async"
    if not names:
        return "does not take self"
    theirs = getattr(torch.nn, name, None)
    if not isinstance(theirs, type) or not issubclass(theirs, torch.nn.Module):
        return None
    parameters = list(inspect.signature(theirs.forward).parameters.values())
    if any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters):
        return None
    names += [each.arg for each in forward.args.kwonlyargs]
    if len(names) == len(parameters) and not forward.args.vararg and not forward.args.kwarg:
        return None
    listing = ", ".join(each.name for each in parameters)
    return f"takes ({', '.join(names)}), but torch.nn.{name}.forward takes ({listing})"


REQUIREMENTS = (layers_exported, layer_class, layer_members, layer_declarations, layer_signature)
