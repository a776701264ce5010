"""The finder of uses of torch's private parts in a file: names with a leading underscore, and writes to torch's
modules.

Names are resolved through imports, assignments of any form, getattr, vars, sys.modules and import_module. Names that
are imported from forge.torch_internals count as torch's. For an unresolved object, a private name of torch's tensors,
modules and parameters (`x._base`) always counts as torch's. Any other name is forge's if a class of the same file has
it (`Walk._tensor`), or if it belongs to `self` or `cls` and any code of forge defines it.
"""

import ast
import re
from collections.abc import Iterable, Iterator

import torch

OPERATORS = "torch.ops."  # names of operators, which graphs have, are public
_INTERNALS = "forge.torch_internals."
_PRIVATE_MODULE = re.compile(r"torch(\.\w+)*\._[A-Za-z]\w*(\.\w+)*")
_OF_ATTRIBUTES = frozenset({"getattr", "hasattr", "setattr", "delattr", "getattr_static", "object"})  # patch.object too
_OF_GETTERS = frozenset({"attrgetter", "methodcaller"})
_OF_MODULES = frozenset({"import_module", "__import__"})
_WRITES = frozenset({"setattr", "delattr", "object"})
_WRITES_OF_DICT = frozenset({"update", "setdefault", "pop", "popitem", "clear", "__setitem__", "__delitem__"})
_OF_OTHERS = frozenset(  # of Python, transformers, kernels and forge's namespace of results
    "_DEPENDENCY_DATA _KERNEL_MAPPING _asdict _at_fork_reinit _exit _fields _from_config _getframe _installed_version "
    "_is_owned _lru_cache_wrapper _lu_with_info _make _replace _resolve_revision _select_backend "
    "_supports_cuda_capability".split()
)
_OF_OTHERS_OBJECTS = frozenset({"library._name"})  # of ctypes.CDLL
_OWN = "_forge_"  # how the names begin that forge gives to objects of others
_OF_DYNAMO = "_torchdynamo_"
_OF_TENSORS_AND_MODULES = frozenset(
    name
    for each in (torch.Tensor, torch.nn.Module(), torch.nn.Parameter())
    for name in dir(each)
    if name.startswith("_") and not name.startswith("__")
)


def private_uses(tree: ast.AST, own: frozenset[str] = frozenset()) -> Iterator[tuple[int, str]]:
    """Yield the lines with uses of torch's private parts. own: names that are not torch's."""
    names = _Names(tree, own)
    for node in ast.walk(tree):
        yield from ((node.lineno, name) for name in _uses(node, names))  # type: ignore[attr-defined]


def names_defined(trees: Iterable[ast.AST]) -> frozenset[str]:
    """Return the names that code defines or assigns, of attributes too."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).rpartition(".")[2])
    return frozenset(found)


def _names_of_classes(tree: ast.AST) -> frozenset[str]:
    """Return the names that the classes of a file have: those that their bodies define, and those that they set on
    `self`."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    stores = [node for each in classes for node in ast.walk(each) if isinstance(node, ast.Attribute)]
    of_self = {node.attr for node in stores if isinstance(node.ctx, ast.Store) and _last(node.value) == "self"}
    return names_defined(member for each in classes for member in each.body if not _is_function(member)).union(
        of_self, (member.name for each in classes for member in each.body if _is_function(member))
    )


class _Names:
    """The names of a file that stand for parts of torch. own: names that forge defines, anywhere."""

    def __init__(self, tree: ast.AST, own: frozenset[str]) -> None:
        self.known: dict[str, str] = {}
        self.own = own
        self.of_classes = _names_of_classes(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                self._add(node.names, f"{node.module}.")
            elif isinstance(node, ast.Import):
                self._add(node.names, "")
        for node in ast.walk(tree):
            for target, value in _assigned(node):
                name = self.resolve(value)
                if name is not None and not isinstance(value, ast.Name):
                    self.known.setdefault(target, name)

    def is_own(self, owner: ast.AST, name: str) -> bool:
        """Return whether forge, not torch, has this private name of an object."""
        if name in _OF_TENSORS_AND_MODULES or name.startswith(_OF_DYNAMO):
            return False
        of_any = isinstance(owner, ast.Name) and owner.id in ("self", "cls") and name in self.own
        of_others = name in _OF_OTHERS or f"{_last(owner)}.{name}" in _OF_OTHERS_OBJECTS
        return of_any or of_others or name in self.of_classes or name.startswith(_OWN)

    def _add(self, names: list[ast.alias], prefix: str) -> None:
        for each in names:
            name = f"{prefix}{each.name}".replace(_INTERNALS, "torch.")
            if name.partition(".")[0] != "torch":
                continue
            if each.asname or prefix:
                self.known[each.asname or each.name] = name
            else:
                self.known["torch"] = "torch"

    def resolve(self, node: ast.AST) -> str | None:
        """Return the dotted name of a part of torch that an expression stands for, or None."""
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        if isinstance(node, ast.Attribute):
            return self._member(node.value, node.attr)
        if isinstance(node, ast.Subscript):
            return self._subscript(node)
        if not isinstance(node, ast.Call) or not node.args:
            return None
        if _last(node.func) == "getattr":
            return self._member(node.args[0], _text(node.args[1]))
        text = _text(node.args[0])
        return text if _last(node.func) in _OF_MODULES and text.partition(".")[0] == "torch" else None

    def _member(self, owner: ast.AST, name: str) -> str | None:
        found = self.resolve(owner)
        return None if found is None else f"{found}.{name}"

    def _subscript(self, node: ast.Subscript) -> str | None:
        key, owner = _text(node.slice), _dict_owner(node.value)
        if owner is not None:
            return self._member(owner, key)
        return key if _last(node.value) == "modules" and key.partition(".")[0] == "torch" else None


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield the names that a node assigns, each with its value."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _pairs(target, node.value)
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
        yield from _pairs(node.target, node.value)


def _pairs(target: ast.AST, value: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List)):
        for each, its in zip(target.elts, value.elts, strict=False):  # a starred one takes several
            yield from _pairs(each, its)


def _uses(node: ast.AST, names: _Names) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and node.module is not None:
        yield from filter(_is_private, (f"{node.module}.{each.name}" for each in node.names))
    elif isinstance(node, ast.Import):
        yield from filter(_is_private, (each.name for each in node.names))
    elif isinstance(node, (ast.Attribute, ast.Subscript)):
        yield from _of_member(node, names)
    elif isinstance(node, ast.Call):
        yield from _of_call(node, names)


def _of_member(node: ast.Attribute | ast.Subscript, names: _Names) -> Iterator[str]:
    name = names.resolve(node)
    if name is None and isinstance(node, ast.Attribute):
        if _is_underscored(node.attr) and not names.is_own(node.value, node.attr):
            yield ast.unparse(node)
    elif name is not None and _is_private(name):
        yield name
    elif name is not None and not isinstance(node.ctx, ast.Load) and not _is_setting(name):
        yield f"{name} = …"
    elif isinstance(node, ast.Subscript):
        if _PRIVATE_MODULE.fullmatch(_text(node.slice)):
            yield _text(node.slice)
        elif name is None and _dict_owner(node.value) is not None and _text(node.slice) in _OF_TENSORS_AND_MODULES:
            yield ast.unparse(node)


def _of_call(node: ast.Call, names: _Names) -> Iterator[str]:
    name = _last(node.func)
    if name in _OF_ATTRIBUTES and len(node.args) > 1:
        yield from _of_attribute_function(name, node.args[0], _text(node.args[1]), names)
    elif name in _OF_GETTERS:
        parts = (part for each in node.args for part in _text(each).split("."))
        yield from (part for part in parts if _is_underscored(part) and not names.is_own(node.func, part))
    elif name in _WRITES_OF_DICT and isinstance(node.func, ast.Attribute):
        owner = _dict_owner(node.func.value)
        if owner is not None and (found := names.resolve(owner)) is not None:
            yield f"{found}.__dict__.{name}(…)"
    yield from (text for each in node.args if _PRIVATE_MODULE.fullmatch(text := _text(each)))
    if name == "patch" and (text := _text(node.args[0]) if node.args else "").startswith("torch."):
        yield text


def _of_attribute_function(function: str, owner: ast.AST, name: str, names: _Names) -> Iterator[str]:
    found = names.resolve(owner)
    if found is None:
        if _is_underscored(name) and not names.is_own(owner, name):
            yield f"{ast.unparse(owner)}.{name}"
    elif _is_private(f"{found}.{name}") or function in _WRITES:
        yield f"{found}.{name}"


def _dict_owner(node: ast.AST) -> ast.AST | None:
    """Return the object whose attributes `x.__dict__` or `vars(x)` has."""
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        return node.value
    return node.args[0] if isinstance(node, ast.Call) and _last(node.func) == "vars" and node.args else None


def _text(node: ast.AST) -> str:
    """Return a constant text, or the constant start of an f-string; "" for another expression."""
    if isinstance(node, ast.JoinedStr) and node.values:
        return _text(node.values[0])
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


def _is_underscored(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_private(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "torch" and not f"{name}.".startswith(OPERATORS) and any(map(_is_underscored, parts))


def _is_setting(name: str) -> bool:
    return name.startswith("torch.backends.")
