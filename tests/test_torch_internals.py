"""Only forge/torch_internals/ names torch's private parts: what a new version of torch breaks is in one place."""

import ast
from collections.abc import Iterator
from pathlib import Path

import forge

ROOT = Path(forge.__file__).parent
OPERATORS = "torch.ops."  # names of operators, which graphs have, are public


def _dotted(node: ast.AST) -> str | None:
    """Return the name that a chain of attributes spells, None for another expression."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def _named(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute) and (name := _dotted(node)) is not None:
            yield node.lineno, name
        elif isinstance(node, ast.Call) and (_dotted(node.func) or "").endswith("import_module"):
            yield from ((node.lineno, arg.value) for arg in node.args if isinstance(arg, ast.Constant))


def _is_private(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "torch" and any(part.startswith("_") and not part.startswith("__") for part in parts)


def test_private_parts_of_torch_are_named_in_torch_internals_alone() -> None:
    files = [file for file in ROOT.rglob("*.py") if not {"torch_internals", "_builtin_kernels"} & set(file.parts)]
    found = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in files
        for line, name in _named(ast.parse(file.read_text()))
        if _is_private(name) and not name.startswith(OPERATORS)
    ]
    assert not found, "\n".join(found)
