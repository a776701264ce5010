"""Hashes of the inputs to the verification of each kernel of a repository: read as text, without imports."""

import ast
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeGuard

from forge.hub.compat import library
from forge.hub.files import MANIFEST
from forge.hub.manifest.parse import texts


def title(operation: str, name: str) -> str:
    """Return the name of a kernel in the result of `digests`."""
    return f"{name} of {operation}"


def digests(folder: Path) -> dict[str, str]:
    """Return, for each kernel of a repository of one variant, a hash of its manifest entry (except the speed hints), of
    the sources that define its functions or are imported by them, and of all files that are neither manifest nor
    Python.

    The package's __init__.py counts for every kernel, without its re-exports.
    Raises RefusedError if PyYAML is missing.
    """
    package = next((folder / "build").rglob("__init__.py")).parent
    inside = package / MANIFEST
    yaml = library("yaml")
    text = (inside if inside.is_file() else folder / MANIFEST).read_text()
    manifest = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    head = {key: value for key, value in manifest.items() if key != "ops"}
    sources = _Sources(package)
    result = {}
    for op in manifest["ops"]:
        of_op = {key: value for key, value in op.items() if key != "kernels"}
        operation = op.get("op") or op.get("func") or f"pattern:{op['pattern']}"
        for entry in op["kernels"]:
            fields = {key: value for key, value in entry.items() if key != "faster"}
            digest = hashlib.sha256(json.dumps([head, of_op, fields], sort_keys=True).encode())
            for path in sources.of(texts([of_op, fields])):
                content = sources.code(path)
                digest.update(f"\n{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
            result[title(operation, entry["name"])] = digest.hexdigest()
    return result


class _Sources:
    """The files of a package, and the files that each function depends on."""

    def __init__(self, package: Path) -> None:
        self.init = package / "__init__.py"
        self.files = [path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"]
        self.files = [path for path in self.files if path.name != MANIFEST]
        self.exports = {
            alias.asname or alias.name: paths
            for node in ast.walk(ast.parse(self.init.read_bytes()))
            if _is_relative(node)
            for paths in [list(_files_of(self.init, node))]
            for alias in node.names
        }

    def of(self, texts: Iterable[str]) -> list[Path]:
        """Return the files on which a kernel with these texts in its entry depends: all files, if it names a function
        by its module, or one that the package's __init__.py does not import from another file."""
        texts = set(texts)
        names = texts & self.exports.keys()
        if not names or any(text.startswith(("python:", "hub:")) for text in texts):
            return sorted(self.files)
        paths = {self.init, *(path for path in self.files if path.suffix != ".py")}
        waiting = [path for name in names for path in self.exports[name]]
        while waiting:
            path = waiting.pop()
            if path not in paths:
                paths.add(path)
                waiting += [
                    other
                    for node in ast.walk(ast.parse(path.read_bytes()))
                    if _is_relative(node)
                    for other in _files_of(path, node)
                ]
        return sorted(paths)

    def code(self, path: Path) -> bytes:
        """Return a file's bytes; for the package's __init__.py without docstring, imports from the package and
        `__all__`."""
        if path != self.init:
            return path.read_bytes()
        lines = path.read_bytes().splitlines(keepends=True)
        tree = ast.parse(path.read_bytes())
        for position, node in enumerate(tree.body):
            is_text = position == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            is_all = isinstance(node, ast.Assign) and [ast.unparse(each) for each in node.targets] == ["__all__"]
            if is_text or _is_relative(node) or is_all:
                end = node.end_lineno or node.lineno
                lines[node.lineno - 1 : end] = [b""] * (end - node.lineno + 1)
        return b"".join(line for line in lines if line.strip())


def _is_relative(node: ast.AST) -> TypeGuard[ast.ImportFrom]:
    return isinstance(node, ast.ImportFrom) and bool(node.level)


def _files_of(path: Path, node: ast.ImportFrom) -> Iterator[Path]:
    """Yield the files of a relative import."""
    place = path.parents[(node.level or 1) - 1]
    targets = [place.joinpath(*node.module.split("."))] if node.module else [place / each.name for each in node.names]
    for target in targets:
        files = target.with_suffix(".py"), target / "__init__.py"
        yield next((file for file in files if file.is_file()), place / "__init__.py")
