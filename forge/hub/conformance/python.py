"""The requirements on Python code: it parses in Python 3.9, and imports only allowed modules."""

import ast
import warnings
from collections.abc import Iterator

from forge.hub import compat, import_graph
from forge.hub.conformance.repository import Finding, Repository, Variant
from forge.hub.imports import problem_of

FLOOR = (3, 9)
# Modules that were added to the standard library after 3.9.
ADDED_IN = {"tomllib": "3.11"}


def python_floor(repository: Repository) -> Iterator[Finding]:
    """Require that every file parses in Python 3.9, and imports no module that the standard library added later."""
    for variant in repository.variants:
        for each in variant.python.values():
            if each.tree is None:
                line, text = each.problem
                yield variant.finding("python-floor", text, each.path, line)
                continue
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    ast.parse(each.text, feature_version=FLOOR)
            except SyntaxError as error:
                text = f"Python 3.9 does not read it: {error.msg}"
                yield variant.finding("python-floor", text, each.path, error.lineno or 1)
            except (ValueError, RecursionError, MemoryError):
                continue  # nested too deeply for this parse alone
            for statement in import_graph.imports(each.tree):
                if not statement.level and (since := ADDED_IN.get(statement.module.split(".")[0])):
                    text = f"{statement.module} is in the standard library since Python {since}"
                    yield variant.finding("python-floor", text, each.path, statement.line)


def imports(repository: Repository) -> Iterator[Finding]:
    """Require that every import of every file is relative, of the standard library, of torch or of a declared
    dependency."""
    for variant in repository.variants:
        names = {str(each) for key in ("name", "id") if (each := variant.value(key, str))}
        names = {name.replace("-", "_") for name in names} | ({variant.path.split("/")[-1]} & _package(variant))
        allowed = {*_declared_modules(variant), *repository.policy.imports}
        allowed |= {"kernels"} if variant.value("kernel-depends", list) else set()
        for each in variant.python.values():
            for statement in import_graph.imports(each.tree) if each.tree is not None else ():
                problem = problem_of(statement, each.path, root=variant.root or "", names=names, allowed=allowed)
                if problem is not None:
                    yield variant.finding("imports", problem.text, each.path, problem.line)


def _package(variant: Variant) -> set[str]:
    """Return the name of the package of unbuilt sources: their folder's."""
    return {variant.path.split("/")[-1]} if variant.is_source else set()


def _declared_modules(variant: Variant) -> Iterator[str]:
    """Yield the modules that the declared dependencies provide, allowed or not: another requirement checks that."""
    names = list(variant.value("python-depends", list) or ())
    by_backend = variant.value("python-depends-backends", dict) or {}
    for each in by_backend.values():
        names += each if isinstance(each, list) else []
    tables = [compat.python_dependencies(kind) for kind in {variant.backend or "cpu", *map(str, by_backend)}]
    for name in names:
        modules = next((table[name] for table in tables if isinstance(name, str) and name in table), None)
        if modules is not None:
            yield from (module for _, module in modules if module is not None)
        elif isinstance(name, str):
            yield name.replace("-", "_")


REQUIREMENTS = (python_floor, imports)
