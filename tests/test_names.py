"""The names of values are nouns: no variable, parameter, function or class of forge is a participle alone."""

import ast
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
