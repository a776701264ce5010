"""Find uses of torch's private parts in a file: names with a leading underscore, and writes to torch's modules.

Names are resolved through imports, assignments (`aten = torch.ops.aten`), getattr, vars, sys.modules and import_module.
What is imported from forge.torch_internals counts as torch's. An attribute of any other object (`tensor._base`) is
private if no code of forge defines its name.
"""

import ast
import re
from collections.abc import Iterable, Iterator

OPERATORS = "torch.ops."  # names of operators, which graphs have, are public
_INTERNALS = "forge.torch_internals."
_PRIVATE_MODULE = re.compile(r"torch(\.\w+)*\._[A-Za-z]\w*(\.\w+)*")
_OF_ATTRIBUTES = frozenset({"getattr", "hasattr", "setattr", "delattr"})
_OF_MODULES = frozenset({"import_module", "__import__"})
_OF_OTHERS = frozenset(  # of Python, transformers, kernels and forge's namespace of results
    "_DEPENDENCY_DATA _KERNEL_MAPPING _asdict _at_fork_reinit _from_config _getframe _installed_version _is_owned "
    "_lru_cache_wrapper _lu_with_info _select_backend _supports_cuda_capability".split()
)


def private_uses(tree: ast.AST, own: frozenset[str] = frozenset()) -> Iterator[tuple[int, str]]:
    """Return the lines with uses of torch's private parts. own: names that are not torch's."""
    names = _Names(tree)
    for node in ast.walk(tree):
        yield from ((node.lineno, name) for name in _uses(node, names, own))  # type: ignore[attr-defined]


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


class _Names:
    """The names of a file that stand for parts of torch."""

    def __init__(self, tree: ast.AST) -> None:
        self.known: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                self._add(node.names, f"{node.module}.")
            elif isinstance(node, ast.Import):
                self._add(node.names, "")
        for node in ast.walk(tree):
            if not isinstance(node, ast.Assign) or isinstance(node.value, ast.Name):
                continue
            name, target = self.resolve(node.value), node.targets[0]
            if name is not None and isinstance(target, ast.Name):
                self.known.setdefault(target.id, name)

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
        """Return the dotted name of a part of torch that an expression stands for, None for another expression."""
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
        key, of = _text(node.slice), node.value
        if isinstance(of, ast.Call) and _last(of.func) == "vars" and of.args:
            return self._member(of.args[0], key)
        if isinstance(of, ast.Attribute) and of.attr == "__dict__":
            return self._member(of.value, key)
        return key if _last(of) == "modules" and key.partition(".")[0] == "torch" else None


def _uses(node: ast.AST, names: _Names, own: frozenset[str]) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and node.module is not None:
        yield from filter(_is_private, (f"{node.module}.{each.name}" for each in node.names))
    elif isinstance(node, ast.Import):
        yield from filter(_is_private, (each.name for each in node.names))
    elif isinstance(node, (ast.Attribute, ast.Subscript)):
        yield from _of_member(node, names, own)
    elif isinstance(node, ast.Call):
        yield from _of_call(node, names)


def _of_member(node: ast.Attribute | ast.Subscript, names: _Names, own: frozenset[str]) -> Iterator[str]:
    name = names.resolve(node)
    if name is None and isinstance(node, ast.Attribute):
        if _is_underscored(node.attr) and node.attr not in own | _OF_OTHERS:
            yield ast.unparse(node)
    elif name is not None and _is_private(name):
        yield name
    elif name is not None and not isinstance(node.ctx, ast.Load) and not _is_setting(name):
        yield f"{name} = …"
    elif isinstance(node, ast.Subscript) and _PRIVATE_MODULE.fullmatch(_text(node.slice)):
        yield _text(node.slice)


def _of_call(node: ast.Call, names: _Names) -> Iterator[str]:
    name = _last(node.func)
    owner = names.resolve(node.args[0]) if name in _OF_ATTRIBUTES else None
    found = f"{owner}.{_text(node.args[1])}" if owner is not None else ""
    if _is_private(found) or (found and name in ("setattr", "delattr")):
        yield found
    yield from (text for each in node.args if _PRIVATE_MODULE.fullmatch(text := _text(each)))


def _text(node: ast.AST) -> str:
    """Return a constant text, or the constant start of an f-string; "" for another expression."""
    if isinstance(node, ast.JoinedStr) and node.values:
        return _text(node.values[0])
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_underscored(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_private(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "torch" and not f"{name}.".startswith(OPERATORS) and any(map(_is_underscored, parts))


def _is_setting(name: str) -> bool:
    return name.startswith("torch.backends.")
