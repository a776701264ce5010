"""The names of values are nouns: no variable, parameter, function or class of forge is a participle alone."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent / "forge"
PARTICIPLES = frozenset(
    "asked called chosen done drawn found given gone grown held kept known laid lent lost made meant met "
    "moved named said seen sent shown taken told tried wanted written".split()
)
PUBLIC = {"debug/simulation.py": {"sent"}}  # a field of a message, in bytes
# verified.json has the hash of these kernels' text
APART = ROOT / "_builtin_kernels"


def names_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name


def test_no_name_is_a_participle_alone() -> None:
    paths = [path for path in sorted(ROOT.rglob("*.py")) if APART not in path.parents]
    assert len(paths) > 400
    names = {
        str(path.relative_to(ROOT)): PARTICIPLES.intersection(names_of(ast.parse(path.read_text()))) for path in paths
    }
    assert {path: each for path, each in names.items() if each} == PUBLIC


def test_each_kind_of_name_is_read() -> None:
    code = "def made(given, *told, **kept):\n    wanted = 1\n    [found for found in ()]\nclass seen: pass\n"
    assert PARTICIPLES.intersection(names_of(ast.parse(code))) == {
        *("made", "given", "told", "kept", "wanted", "found", "seen"),
    }


_FILES = re.compile(r"((?:\w+\.py(?:, )?)+)(?:\s{2,}|$)")
_NAMES = re.compile(r"(?:^|(?<=\. )|(?<=; )|\n\s*)((?:[a-z_]+, )*[a-z_][a-z_0-9]*):\s")


def documented_names(docstring: str) -> list[str]:
    """Return the parameters and attributes that a docstring describes, as `name: description`."""
    return [name for names in _NAMES.findall(docstring) for name in names.split(", ")]


def existing_names(node: ast.AST) -> set[str]:
    """Return the parameters of a function; the fields, attributes, methods and parameters of a class."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
    names = {
        each.target.id
        for each in ast.walk(node)
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    names |= {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    functions = [each for each in ast.walk(node) if isinstance(each, ast.FunctionDef)]
    return names.union({each.name for each in functions}, *map(existing_names, functions))


def absent_names(node: ast.AST) -> list[str]:
    """Return what a docstring that describes at least one parameter or attribute describes without there being one."""
    docstring = ast.get_docstring(node) or ""
    names, there = documented_names(docstring), existing_names(node)
    return [name for name in names if name not in there] if there.intersection(names) else []


def test_docstrings_describe_what_is_there() -> None:
    absent = {}
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text())
        if path.name == "__init__.py":
            lines = (ast.get_docstring(tree) or "").splitlines()
            files = [name for line in lines if (match := _FILES.match(line)) for name in match[1].split(", ")]
            absent |= {f"{path}: {name}": [name] for name in files if name and not (path.parent / name).exists()}
        for node in ast.walk(tree):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                absent[f"{path}:{node.lineno}"] = absent_names(node)
    assert {place: names for place, names in absent.items() if names} == {}


def test_a_docstring_of_absent_names_is_seen() -> None:
    code = 'class A:\n    """A.\n\n    one, two: Numbers. three: Another.\n    """\n\n    one: int\n    two: int\n'
    assert absent_names(ast.parse(code).body[0]) == ["three"]
    code = 'def f(x):\n    """Return x.\n\n    Args:\n        x: One.\n        y: None.\n    """\n'
    assert absent_names(ast.parse(code).body[0]) == ["y"]
