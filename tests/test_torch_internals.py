"""Only forge/torch_internals/ names torch's private parts: what a new version of torch breaks is in one place."""

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import torch

import forge
from forge import torch_internals
from forge.torch_internals.patch import PATCHES
from forge.torch_internals.versions import OLDEST

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


for _module in pkgutil.walk_packages(torch_internals.__path__, f"{torch_internals.__name__}."):
    importlib.import_module(_module.name)  # the patches of Inductor are imported with the first region otherwise


def test_every_patch_is_written_in_torch_internals() -> None:
    files = [file for file in ROOT.rglob("*.py") if "torch_internals" not in file.parts]
    makers = {f"forge.torch_internals.patch.{name}" for name in ("patch", "Patch", "Replaced")}
    found = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in files
        for line, name in _named(ast.parse(file.read_text()))
        if name in makers
    ]
    assert not found, "\n".join(found)


def test_each_patch_says_what_it_is_for() -> None:
    for each in PATCHES:
        assert each.why and each.upstream.startswith("torch/"), str(each)
        assert each.since is None or each.before is None or each.since < each.before, str(each)


def test_a_patch_that_nothing_needs_any_more_is_deleted() -> None:
    """One for versions that forge does not support."""
    assert [str(each) for each in PATCHES if each.before is not None and each.before <= OLDEST] == []


def test_each_patch_of_a_scope_finds_what_it_replaces() -> None:
    """A name that torch has no more is a patch for earlier versions: it says so."""
    lost = [each for each in PATCHES if each.original is None and each.since is None and each.before is None]
    assert [str(each) for each in lost if each.name != "rewire_bwd_graph_outputs"] == []


def test_an_attribute_is_itself_again_after_a_patch() -> None:
    before = {each: vars(each.owner).get(each.name) for each in PATCHES}
    jitted = forge.jit(lambda x: x.relu() + 1)
    jitted(torch.ones(3))
    assert all(vars(each.owner).get(each.name) is was for each, was in before.items())
