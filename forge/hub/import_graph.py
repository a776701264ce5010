"""The imports of a package that run while it is imported: from `__init__`, along relative imports, at module level.

A function's imports run when it is called; imports that the code guards (`try: … except ImportError`) may fail.
"""

import ast
import operator
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

# Unguarded, or in code that goes on if the import fails.
Runs = Literal["always", "guarded"]
CAUGHT = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
DYNAMIC = {"import_module", "__import__"}
COMPARES: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """A module that a statement imports. names: the imported names, which may be modules too.

    line and column: where the statement stands. module: empty, with level 0, if a call computes its name.
    """

    line: int
    column: int
    module: str
    level: int
    names: tuple[str, ...] = ()


class _Meanings(NamedTuple):
    """The names of a file that keep one meaning in all their bindings, in any scope.

    typing: the module; false: its TYPE_CHECKING, or the file's own constant False; importers: aliases of import_module
    and __import__.
    """

    typing: frozenset[str]
    false: frozenset[str]
    importers: frozenset[str]


class _Bindings:
    """The names of a file; it is walked in full on the first lookup."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree

    @cached_property
    def names(self) -> _Meanings:
        return _meanings(self._tree)


def name_of(node: ast.AST) -> str:
    """Return the last part of a name, such as `c` of `a.b.c`; empty for other expressions."""
    return getattr(node, "attr", getattr(node, "id", ""))


def imports(tree: ast.Module) -> Iterator[Import]:
    """Yield each import that can run, at any level; those under typing's `if TYPE_CHECKING` and `__main__` cannot."""
    bound = _Bindings(tree)
    pending: list[ast.AST] = list(reversed(tree.body))
    while pending:
        node = pending.pop()
        yield from (each for each in _imports_of(node, bound) if each.module or each.level)
        children = node.orelse if isinstance(node, ast.If) and _never(node, bound) else ast.iter_child_nodes(node)
        pending += reversed([*children])


def runs_at_import(
    trees: Mapping[str, ast.Module], root: str, extra_modules: Collection[str] = ()
) -> dict[tuple[str, Import], Runs]:
    """Return the kind of each import that runs while the package in `root` is imported, and the `extra_modules` in it.

    A file that is imported under a guard is guarded itself. A file with a computed import may import every file.
    """
    package = tuple(part for part in root.split("/") if part)
    result: dict[tuple[str, Import], Runs] = {}
    visited: set[tuple[str, Runs]] = set()
    pending: list[tuple[str, Runs]] = []
    for module in ("", *extra_modules):
        pending += [(path, "always") for path in _files(trees, (*package, *module.split(".")))]
    while pending:
        path, how = pending.pop()
        if (path, how) in visited or (path, "always") in visited:
            continue
        visited.add((path, how))
        for each, guarded in _Module(trees[path]).runs():
            runs: Runs = "guarded" if guarded or how == "guarded" else "always"
            if result.get((path, each)) != "always":
                result[path, each] = runs
            paths = _reached_files(trees, path, each) if each.module or each.level else list(trees)
            pending += [(other, runs) for other in paths]
    return result


def _reached_files(trees: Mapping[str, ast.Module], path: str, statement: Import) -> list[str]:
    """Return the files of the kernel that a relative import executes."""
    parents = tuple(path.split("/")[:-1])
    if not statement.level or statement.level - 1 > len(parents):
        return []
    base = parents[: len(parents) - (statement.level - 1)]
    module = (*base, *(part for part in statement.module.split(".") if part))
    files = _files(trees, module)
    for name in statement.names:
        files += _files(trees, (*module, name))
    return files


def _files(trees: Mapping[str, ast.Module], parts: tuple[str, ...]) -> list[str]:
    """Return the module with this dotted path, and each package that is imported on the way to it."""
    parts = tuple(part for part in parts if part)
    stems = ["/".join(parts[:count]) for count in range(len(parts) + 1)]
    ways = [f"{stem}/__init__.py" if stem else "__init__.py" for stem in stems]
    return [path for path in (*ways, f"{stems[-1]}.py") if path in trees]


class _Module:
    """The code of a file at module level, including the functions that it calls."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._bound = _Bindings(tree)
        self._functions: dict[str, Function] = {}  # functions defined so far, by the name that calls them
        # modules whose availability the code tests, and the values of the names that hold the results (HAS_NUMPY)
        self._probes: set[str] = set()
        self._entered: set[tuple[str, bool]] = set()
        self._imports: list[tuple[Import, bool]] = []

    def runs(self) -> list[tuple[Import, bool]]:
        """Return (import, whether it is guarded) for each import that runs."""
        self._block(self._tree.body, False, False)
        return self._imports

    def _block(self, statements: Collection[ast.stmt], guarded: bool, conditional: bool) -> None:
        for statement in statements:
            self._statement(statement, guarded, conditional)

    def _statement(self, node: ast.stmt, guarded: bool, conditional: bool) -> None:
        """Follow a statement. conditional: whether the statement runs under a test of availability, which then
        holds."""
        if isinstance(node, Function):
            self._functions[node.name] = node
            arguments = node.args
            for evaluated in (*node.decorator_list, *arguments.defaults, *filter(None, arguments.kw_defaults)):
                self._expression(evaluated, guarded, conditional)
            for decorator in node.decorator_list:
                self._enter(decorator, guarded, conditional)
            return
        if isinstance(node, ast.Try | ast.TryStar):
            self._try(node, guarded, conditional)
            return
        if isinstance(node, ast.If) and (decided := _static_test(node, self._bound)) is not None:
            self._block(node.body if decided else node.orelse, guarded, conditional)
            return
        if isinstance(node, ast.If):
            names = filter(None, map(name_of, ast.walk(node.test)))
            self._probes |= {word for name in names for word in name.lower().split("_")}
        self._take(_imports_of(node, self._bound), guarded, conditional)
        inner_guarded = guarded or (isinstance(node, ast.With | ast.AsyncWith) and _suppresses(node))
        inner_conditional = conditional or isinstance(node, ast.If | ast.Match)
        for each in ast.iter_child_nodes(node):
            if isinstance(each, ast.stmt):
                self._statement(each, inner_guarded, inner_conditional)
            elif isinstance(each, ast.match_case):
                self._block(each.body, inner_guarded, inner_conditional)
            else:
                self._expression(each, guarded, conditional)
        if isinstance(node, ast.ClassDef):  # its methods are not names of the file, its constructor is
            methods = {each.name: each for each in node.body if isinstance(each, Function)}
            self._functions = {name: each for name, each in self._functions.items() if methods.get(name) is not each}
            if "__init__" in methods:
                self._functions[node.name] = methods["__init__"]

    def _try(self, node: ast.Try | ast.TryStar, guarded: bool, conditional: bool) -> None:
        """Follow a try. A handler that ends by raising guards nothing: the module is required, and the handler explains
        it."""
        catches = any(_catches(each) and not isinstance(each.body[-1], ast.Raise) for each in node.handlers)
        self._block(node.body, guarded or catches, conditional)
        for handler in node.handlers:
            self._block(handler.body, guarded, conditional)
        self._block(node.orelse, guarded, True)
        self._block(node.finalbody, guarded, conditional)

    def _expression(self, node: ast.AST, guarded: bool, conditional: bool) -> None:
        pending = [node]
        while pending:
            each = pending.pop()
            if isinstance(each, ast.Call):
                self._take(_imports_of(each, self._bound), guarded, conditional)
                self._enter(each.func, guarded, conditional)
                if name_of(each.func) == "find_spec" and (module := _constant(each)):
                    self._probes.add(module.split(".")[0])
            if not isinstance(each, ast.Lambda):
                pending += ast.iter_child_nodes(each)

    def _enter(self, callee: ast.expr, guarded: bool, conditional: bool) -> None:
        """Follow a call of a function, or of the constructor of a class, of this file."""
        name = callee.id if isinstance(callee, ast.Name) else ""
        if name in self._functions and (name, guarded) not in self._entered:
            self._entered.add((name, guarded))
            self._block(self._functions[name].body, guarded, conditional)

    def _take(self, statements: Collection[Import], guarded: bool, conditional: bool) -> None:
        for each in statements:
            top = each.module.split(".")[0]
            is_probed = not each.level and (top in self._probes or top.lower() in self._probes)
            self._imports.append((each, guarded or (conditional and is_probed)))
            if guarded and not each.level:
                self._probes.add(top)


def _meanings(tree: ast.Module) -> _Meanings:
    """Find the importers and the names that mean typing and False in every one of their bindings."""
    false, typing = Counter[str](), Counter[str]()
    importers: set[str] = set()
    is_set = False
    assigned: list[tuple[str, str]] = []  # (name, the name that it is assigned)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            typing.update(alias.asname or alias.name for alias in node.names if alias.name == "typing")
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                name = alias.asname or alias.name
                if node.module == "typing" and alias.name in ("TYPE_CHECKING", "*"):
                    false["TYPE_CHECKING" if name == "*" else name] += 1
                elif node.module in ("importlib", "builtins") and alias.name in DYNAMIC:
                    importers.add(name)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [each.id for each in targets if isinstance(each, ast.Name)]
            if isinstance(node.value, ast.Constant) and node.value.value is False:
                false.update(name for name in names if name == "TYPE_CHECKING")
            elif isinstance(node.value, ast.Name):
                assigned += [(name, node.value.id) for name in names]
            elif isinstance(node.value, ast.Attribute) and node.value.attr in DYNAMIC:
                importers.update(names)
        elif isinstance(node, ast.Attribute) and node.attr == "TYPE_CHECKING" and not isinstance(node.ctx, ast.Load):
            is_set = True
    if is_set:  # typing.TYPE_CHECKING = True
        false, typing = Counter(), Counter()
    before = -1
    while before != len(importers):
        before = len(importers)
        importers |= {name for name, value in assigned if value in DYNAMIC | importers}
    candidates = false.keys() | typing.keys()
    times = Counter(name for node in ast.walk(tree) for name in _binds(node)) if candidates else Counter[str]()
    return _Meanings(
        frozenset(name for name in typing if typing[name] == times[name]),
        frozenset(name for name in false if false[name] == times[name]),
        frozenset(importers),
    )


def _binds(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node binds, without those bound in nested nodes."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.Import):
        yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        from_typing = node.module == "typing" and not node.level
        names = [alias.asname or alias.name for alias in node.names]
        yield from ("TYPE_CHECKING" if name == "*" and from_typing else name for name in names)
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, Function | ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
        yield from filter(None, [node.name])
    elif isinstance(node, ast.MatchMapping):
        yield from filter(None, [node.rest])


def _imports_of(node: ast.AST, bound: _Bindings) -> list[Import]:
    if isinstance(node, ast.Import):
        return [Import(node.lineno, node.col_offset, alias.name, 0) for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        names = tuple(alias.name for alias in node.names)
        return [Import(node.lineno, node.col_offset, node.module or "", node.level, names)]
    if isinstance(node, ast.Call) and _imports(node.func, bound):
        name = _constant(node) or ""
        level = len(name) - len(name.lstrip("."))
        return [Import(node.lineno, node.col_offset, name[level:], level)]
    return []


def _imports(callee: ast.expr, bound: _Bindings) -> bool:
    """Return whether a callee is import_module or __import__ of any object, or an alias of them."""
    return name_of(callee) in DYNAMIC or (isinstance(callee, ast.Name) and callee.id in bound.names.importers)


def _constant(call: ast.Call) -> str | None:
    """Return the first argument of a call, or the argument `name`, if it is a string."""
    keywords = [each.value for each in call.keywords if each.arg == "name"]
    first = next(iter([*call.args, *keywords]), None)
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None


def _never(node: ast.If, bound: _Bindings) -> bool:
    """Return whether an import skips the body of this statement: `if TYPE_CHECKING`, `__main__`."""
    test = node.test
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        sides = (test.left, test.comparators[0])
        return {getattr(each, "id", getattr(each, "value", None)) for each in sides} == {"__name__", "__main__"}
    if isinstance(test, ast.Attribute):
        return test.attr == "TYPE_CHECKING" and getattr(test.value, "id", None) in bound.names.typing
    return getattr(test, "id", None) in bound.names.false


def _static_test(node: ast.If, bound: _Bindings) -> bool | None:
    """Return the value of a test if it is known at import: of types, `__main__`, the version or the system."""
    if _never(node, bound):
        return False
    test = node.test
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or type(test.ops[0]) not in COMPARES:
        return None
    here: dict[str, Any] = {"sys.version_info": sys.version_info, "sys.platform": sys.platform, "os.name": os.name}
    left = here.get(ast.unparse(test.left))
    try:
        right = ast.literal_eval(test.comparators[0])
        return None if left is None else bool(COMPARES[type(test.ops[0])](left, right))
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return None


def _catches(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(name_of(each) in CAUGHT for each in types)


def _suppresses(node: ast.With | ast.AsyncWith) -> bool:
    for item in node.items:
        call = item.context_expr
        if isinstance(call, ast.Call) and name_of(call.func) == "suppress":
            return any(name_of(each) in CAUGHT for each in call.args)
    return False
