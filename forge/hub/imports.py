"""What a kernel's code may import and what it may be called, found before any of it runs.

This is a check of the Hub's rules and not a sandbox: code that means harm is kept out by trust and locks.
"""

import ast
import importlib.util
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from forge.hub.errors import MalformedError, Place, RefusedError
from forge.hub.files import File

# triton comes with torch wherever it can run.
ALWAYS = frozenset({"torch", "triton", *sys.stdlib_module_names})
ID = re.compile(r"_?[A-Za-z0-9_]+")
DYNAMIC = (b"import_module", b"__import__")


def check_imports(
    files: Mapping[str, File], *, root: str, names: Collection[str], allowed: Collection[str], place: Place
) -> dict[str, ast.Module]:
    """Every import of every Python file of a kernel, held against the Hub's rules; gives what each was parsed to.

    root: the folder of the kernel's package below the variant's, "" for the flat layout. names: what the kernel is
    called, which only a relative import may mean. allowed: top-level modules beside the standard library and torch.
    Raises: MalformedError for a file that is no Python; RefusedError with every import that is not allowed.
    """
    problems: list[str] = []
    sources = {path: file.content for path, file in files.items() if file.content is not None}
    trees = {path: _parse(content, place.at(path)) for path, content in sources.items()}
    for path, content in sources.items():
        depth = len((path.removeprefix(f"{root}/") if root else path).split("/"))
        imports = _imports(trees[path], any(name in content for name in DYNAMIC))
        problems += [f"{path}:{line}: {problem}" for line, problem in _problems(imports, depth, names, allowed)]
    if problems:
        raise RefusedError(f"{place}: imports what a kernel may not:" + "".join(f"\n  {each}" for each in problems))
    return trees


def _parse(content: bytes, place: Place) -> ast.Module:
    try:
        return ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MalformedError(f"{place}: is not Python: {error or type(error).__name__}") from error


def _problems(
    imports: Iterable[tuple[int, str, int]], depth: int, names: Collection[str], allowed: Collection[str]
) -> Iterator[tuple[int, str]]:
    for line, module, level in imports:
        if level > depth:
            yield line, f"from {'.' * level}{module}: leads out of the kernel"
        elif level == 0:
            top = module.split(".")[0]
            if top in names:
                yield line, f"import {module}: is the kernel itself; write it as a relative import"
            elif top not in ALWAYS and top not in allowed:
                yield line, f"import {module}: is neither the standard library, torch nor declared in metadata.json"


def _imports(tree: ast.Module, has_calls: bool) -> Iterator[tuple[int, str, int]]:
    """(line, module, level) of each import that can run; those under `if TYPE_CHECKING` cannot.

    Without has_calls only statements are walked, which is most of the time saved.
    """
    pending: list[ast.AST] = list(reversed(tree.body))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or "", node.level
        elif isinstance(node, ast.Call) and (module := _dynamic(node)):
            yield node.lineno, module, 0
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            pending += reversed(node.orelse)
        else:
            pending += reversed(list(ast.iter_child_nodes(node) if has_calls else _statements(node)))


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    for block in ("body", "handlers", "cases", "orelse", "finalbody"):
        inner = getattr(node, block, ())
        if isinstance(inner, list):
            yield from inner


def _dynamic(node: ast.Call) -> str | None:
    """The absolute name in `importlib.import_module("name")` or `__import__("name")`."""
    function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
    if str(function).encode() not in DYNAMIC or not node.args or not isinstance(node.args[0], ast.Constant):
        return None
    name = node.args[0].value
    return name if isinstance(name, str) and name and not name.startswith(".") else None


def _is_type_checking(test: ast.expr) -> bool:
    return (test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)) == "TYPE_CHECKING"


def check_id(kernel_id: str, folder: Path, place: Place) -> None:
    """Raises RefusedError for an id that is no name, or that is a module which does not come from `folder`."""
    if not ID.fullmatch(kernel_id):
        raise RefusedError(f"{place}: the id is {kernel_id!r}, but must match ^_?[A-Za-z0-9_]+$")
    if kernel_id in sys.stdlib_module_names:
        raise RefusedError(f"{place}: the id {kernel_id!r} shadows a module of the standard library")
    origin = _origin(kernel_id)
    if origin is not None and not Path(origin).parent.resolve().is_relative_to(folder.resolve()):
        state = "was loaded from" if kernel_id in sys.modules else "shadows the installed module"
        raise RefusedError(f"{place}: the id {kernel_id!r} {state} {origin}")


def _origin(name: str) -> str | None:
    """Where the module of this name is or would come from; a folder without code is no module."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__file__", None) or "elsewhere"
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return spec.origin if spec is not None else None
