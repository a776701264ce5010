"""Requirements on layers, which lend their `forward` to other modules: no state, nothing but `forward`."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from forge.hub.conformance.finding import Finding
from forge.hub.conformance.repository import Python, Repository, Variant

DECLARED = ("has_backward", "can_torch_compile")
FILES = ("layers.py", "layers/__init__.py")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class LayerClass:
    """A layer as its source has it. forward: its parameters behind self. has_backward: what it says, or leaves out."""

    name: str
    forward: str
    has_backward: bool
    file: str
    line: int


def layer_classes(repository: Repository) -> Iterator[LayerClass]:
    """Every layer of a repository's variants."""
    for _, python, layer in _layers(repository):
        forward = next((each for each in layer.body if isinstance(each, Function) and each.name == "forward"), None)
        taken = "" if forward is None else ast.unparse(forward.args).partition(", ")[2]
        _, value = _declared(layer, "has_backward")
        says_no = isinstance(value, ast.Constant) and value.value is False
        yield LayerClass(layer.name, taken, not says_no, python.path, layer.lineno)


def _layers(repository: Repository) -> Iterator[tuple[Variant, Python, ast.ClassDef]]:
    """The public classes of the modules of layers."""
    for variant, python in repository.python():
        below = python.path.removeprefix(f"{variant.root}/") if variant.root else python.path
        if below == "layers.py" or below.startswith("layers/"):
            for each in python.tree.body:
                if isinstance(each, ast.ClassDef) and not each.name.startswith("_") and not _is_function(each):
                    yield variant, python, each


def _base(node: ast.expr) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def _is_function(layer: ast.ClassDef) -> bool:
    """Whether a class is an autograd.Function, or a plain record: those are no layers."""
    names = [_base(each) for each in layer.bases]
    has_forward = any(isinstance(each, Function) and each.name == "forward" for each in layer.body)
    return "Function" in names or (not has_forward and not any("Module" in name for name in names))


def layers_exported(repository: Repository) -> Iterator[Finding]:
    """A kernel with layers has `layers` in its `__init__`."""
    for variant in repository.variants:
        root = f"{variant.root}/" if variant.root else ""
        init = variant.python.get(f"{root}__init__.py")
        has_layers = any(f"{root}{each}" in variant.files for each in FILES)
        if has_layers and init is not None and init.tree is not None and "layers" not in _names(init):
            yield variant.finding("layers-exported", "layers is not imported here: from . import layers", init.path, 1)


def _names(python: Python) -> set[str]:
    """What is imported or assigned at module level."""
    found: set[str] = set()
    for node in python.nodes:
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def layer_class(repository: Repository) -> Iterator[Finding]:
    """A layer is a subclass of nn.Module, or of a layer beside it, and has no constructor."""
    for variant, python, layer in _layers(repository):
        beside = {each.name for each in python.tree.body if isinstance(each, ast.ClassDef)}
        if not any(_base(each) == "Module" or _base(each) in beside for each in layer.bases):
            bases = ", ".join(ast.unparse(each) for each in layer.bases) or "object"
            text = f"{layer.name} is a subclass of {bases}, but must be one of nn.Module alone"
            yield variant.finding("layer-class", text, python.path, layer.lineno)
        for each in layer.body:
            if isinstance(each, Function) and each.name in ("__init__", "__new__"):
                text = f"{layer.name} has a constructor of its own"
                yield variant.finding("layer-constructor", text, python.path, each.lineno)


def layer_members(repository: Repository) -> Iterator[Finding]:
    """A layer has `forward`, no other method, and no class variable but has_backward and can_torch_compile."""
    for variant, python, layer in _layers(repository):
        methods = [each for each in layer.body if isinstance(each, Function)]
        if not any(each.name == "forward" for each in methods) and all(_base(each) == "Module" for each in layer.bases):
            text = f"{layer.name} has no forward"
            yield variant.finding("layer-forward", text, python.path, layer.lineno)
        for each in methods:
            if each.name not in ("forward", "__init__", "__new__"):
                text = f"{layer.name}.{each.name} is a method beside forward"
                yield variant.finding("layer-methods", text, python.path, each.lineno)
        for name, statement in _variables(layer):
            if name not in DECLARED:
                text = f"{layer.name}.{name} is a class variable; a layer has {' and '.join(DECLARED)} alone"
                yield variant.finding("layer-variables", text, python.path, statement.lineno)


def _variables(layer: ast.ClassDef) -> Iterator[tuple[str, ast.stmt]]:
    """(name, statement) of what the class's body binds; an annotation alone binds nothing."""
    for each in layer.body:
        if isinstance(each, ast.Assign):
            for target in each.targets:
                yield ast.unparse(target), each
        elif isinstance(each, ast.AnnAssign) and each.value is not None:
            yield ast.unparse(each.target), each
        elif isinstance(each, ast.ClassDef):
            yield each.name, each


def _declared(layer: ast.ClassDef, name: str) -> tuple[ast.stmt | None, ast.expr | None]:
    for bound, statement in _variables(layer):
        if bound == name:
            return statement, statement.value
    return None, None


def layer_declarations(repository: Repository) -> Iterator[Finding]:
    """has_backward and can_torch_compile are True or False as written, and has_backward is not claimed in vain.

    An absent has_backward claims True: a kernel of native or Triton code without any gradient must say False.
    """
    for variant, python, layer in _layers(repository):
        for name in DECLARED:
            statement, value = _declared(layer, name)
            if statement is not None and not (isinstance(value, ast.Constant) and isinstance(value.value, bool)):
                text = f"{layer.name}.{name} must be True or False as written"
                yield variant.finding("layer-variables", text, python.path, statement.lineno)
        statement, value = _declared(layer, "has_backward")
        is_true = statement is None or (isinstance(value, ast.Constant) and value.value is True)
        if is_true and _has_kernels(variant) and not _has_gradient(variant):
            text = f"{layer.name} claims a backward, and nothing here defines a gradient: has_backward = False"
            yield variant.finding("has-backward", text, python.path, (statement or layer).lineno)


def _has_kernels(variant: Variant) -> bool:
    """Whether it runs code that autograd does not see into."""
    return bool(variant.native) or any(
        "import triton" in each.text or "custom_op" in each.text for each in variant.python.values()
    )


def _has_gradient(variant: Variant) -> bool:
    if any("autograd" in each.text for each in variant.python.values()):
        return True
    return any(b"autograd" in variant.files[path].read().lower() for path in variant.native)


def layer_signature(repository: Repository) -> Iterator[Finding]:
    """forward takes self, and where the layer has the name of one of torch's, the arguments of that one's."""
    for variant, python, layer in _layers(repository):
        for each in layer.body:
            if not isinstance(each, Function) or each.name != "forward":
                continue
            problem = _signature_problem(layer.name, each)
            if problem is not None:
                yield variant.finding("layer-signature", problem, python.path, each.lineno)


def _signature_problem(name: str, forward: Function) -> str | None:
    given = [each.arg for each in (*forward.args.posonlyargs, *forward.args.args)]
    if {_base(each) for each in forward.decorator_list} & {"staticmethod", "classmethod"}:
        return f"{name}.forward must be a method"
    if isinstance(forward, ast.AsyncFunctionDef):
        return f"{name}.forward must not be async"
    if not given:
        return f"{name}.forward does not take self"
    theirs = getattr(torch.nn, name, None)
    if not isinstance(theirs, type) or not issubclass(theirs, torch.nn.Module):
        return None
    wanted = list(inspect.signature(theirs.forward).parameters.values())
    if any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in wanted):
        return None
    given += [each.arg for each in forward.args.kwonlyargs]
    if len(given) == len(wanted) and not forward.args.vararg and not forward.args.kwarg:
        return None
    names = ", ".join(each.name for each in wanted)
    return f"{name}.forward takes ({', '.join(given)}), but torch.nn.{name}.forward takes ({names})"


REQUIREMENTS = (
    layers_exported,
    layer_class,
    layer_members,
    layer_declarations,
    layer_signature,
)
