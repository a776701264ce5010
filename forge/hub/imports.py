"""The checks of a kernel's imports and of its id, made before any of its code runs.

The Hub's rule covers every import of every file. Loading is refused only for unguarded imports that run while the
kernel's `__init__` runs. This is a check of rules and not a sandbox: trust and locks keep out malicious code.
"""

import ast
import importlib.util
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from forge.hub import import_graph
from forge.hub.errors import MalformedError, Place, RefusedError
from forge.hub.files import MANIFEST, File

# triton comes with torch wherever it can run.
ALWAYS = frozenset({"torch", "triton", *sys.stdlib_module_names})
ID = re.compile(r"_?[A-Za-z0-9_]+")
NAMED_MODULES = re.compile(rb"python:\.([\w.]+):")


@dataclass(frozen=True)
class ImportProblem:
    """An import that the Hub's rules do not allow. module: the module that a policy may allow, None if no policy
    may."""

    path: str
    line: int
    text: str
    module: str | None = None


def check_imports(
    files: Mapping[str, File],
    *,
    root: str,
    names: Collection[str],
    allowed: Collection[str],
    place: Place,
    extra_modules: Collection[str] = (),
) -> dict[str, ast.Module]:
    """Check the imports that loading a kernel executes by the Hub's rules; return the AST of each file.

    The modules that its manifest names, and the `extra_modules`, are executed too. root, names and allowed are as for
    `problem_of`. Raises: MalformedError for a file that does not parse; RefusedError with every such import that is not
    allowed.
    """
    trees = {path: parse(file.content, place.at(path)) for path, file in files.items() if file.content is not None}
    manifest = files.get(MANIFEST)
    own = [each.decode() for each in NAMED_MODULES.findall(manifest.read())] if manifest is not None else []
    try:
        runs = import_graph.runs_at_import(trees, root, [*own, *extra_modules])
    except RecursionError as error:
        raise MalformedError(f"{place}: is nested too deeply to be read") from error
    blocking = []
    for path, statement in sorted(runs, key=lambda each: (each[0], each[1].line)):
        problem = problem_of(statement, path, root=root, names=names, allowed=allowed)
        if problem is not None and (runs[path, statement] == "always" or problem.module is None):
            blocking.append(problem)
    if blocking:
        modules = list(dict.fromkeys(each.module for each in blocking if each.module is not None))
        advice = f"\nif you trust it, allow these: allow_imports={modules}" if modules else ""
        lines = "".join(f"\n  {each.path}:{each.line}: {each.text}" for each in blocking)
        raise RefusedError(f"{place}: imports what a kernel may not:{lines}{advice}")
    return trees


def parse(content: bytes, place: Place) -> ast.Module:
    """Parse a file. Raises MalformedError if it does not parse."""
    try:
        return ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MalformedError(f"{place}: is not Python: {error or type(error).__name__}") from error


def problem_of(
    statement: import_graph.Import, path: str, *, root: str, names: Collection[str], allowed: Collection[str]
) -> ImportProblem | None:
    """Return the problem of an import of a kernel's file, or None.

    root: the folder of the kernel's package relative to the variant's, "" for the flat layout. names: the kernel's
    names, which only relative imports may use. allowed: top-level modules besides the standard library and torch.
    """
    depth = len((path.removeprefix(f"{root}/") if root else path).split("/"))
    if statement.level > depth:
        return ImportProblem(
            path, statement.line, f"from {'.' * statement.level}{statement.module}: leads out of the kernel"
        )
    top = statement.module.split(".")[0]
    if statement.level or not top:
        return None
    if top in names:
        text = f"import {statement.module}: is the kernel itself; write it as a relative import"
        return ImportProblem(path, statement.line, text)
    if top in ALWAYS or top in allowed:
        return None
    text = f"import {statement.module}: is neither the standard library, torch nor declared in metadata.json"
    return ImportProblem(path, statement.line, text, top)


def check_id(kernel_id: str, folder: Path, place: Place) -> None:
    """Raise RefusedError for an id that is not a valid name, or that is a module from outside `folder`."""
    if not ID.fullmatch(kernel_id):
        raise RefusedError(f"{place}: the id is {kernel_id!r}, but must match ^_?[A-Za-z0-9_]+$")
    if kernel_id in sys.stdlib_module_names:
        raise RefusedError(f"{place}: the id {kernel_id!r} shadows a module of the standard library")
    origin = _origin(kernel_id)
    if origin is not None and not Path(origin).parent.resolve().is_relative_to(folder.resolve()):
        state = "was loaded from" if kernel_id in sys.modules else "shadows the installed module"
        raise RefusedError(f"{place}: the id {kernel_id!r} {state} {origin}")


def _origin(name: str) -> str | None:
    """Return the place from which the module of this name is or would be imported. A folder without code is no
    module."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__file__", None) or "elsewhere"
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return spec.origin if spec is not None else None
