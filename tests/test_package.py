"""The names of the package forge: each loads its module on first use."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo import trace_rules

import forge

STUB = Path(forge.__file__).with_suffix(".pyi")


def test_the_stub_has_the_names_and_their_modules() -> None:
    imports = [node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.ImportFrom)]
    modules = {
        alias.name: f"forge.{alias.name}" if node.module == "forge" else node.module
        for node in imports
        for alias in node.names
    }
    assert modules.pop("__version__") == "forge.version"
    assert modules == forge._MODULES
    assert f"__all__ = {forge.__all__}" == ast.unparse(ast.parse(STUB.read_text()).body[-1])


@pytest.mark.parametrize("name", forge.__all__)
def test_a_name_is_there(name: str) -> None:
    assert getattr(forge, name) is not None
    assert name in dir(forge)


def test_what_it_is_made_of_is_not_listed() -> None:
    assert {"functools", "importlib", "sys"}.isdisjoint(dir(forge)) and "executors" in dir(forge)


def test_a_name_that_is_not_there_is_an_error_of_attributes() -> None:
    with pytest.raises(AttributeError, match="module 'forge' has no attribute 'jitt'"):
        _ = forge.jitt
    with pytest.raises(ImportError, match="cannot import name 'jitt' from 'forge'"):
        from forge import jitt  # noqa: F401


def test_a_package_inside_is_there_without_an_import_of_its_own() -> None:
    code = "import forge; print(forge.executors.__name__, forge.cache.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["forge.executors", "forge.cache"]


@pytest.mark.parametrize("module", ["forge", "forge.cli"])
def test_it_is_imported_without_torch(module: str) -> None:
    code = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("place, name", [(torch, "index_select"), (F, "linear"), (torch.Tensor, "select")])
def test_tables_are_made_of_torchs_functions_where_others_are_in_their_place(
    place: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch_geometric replaces torch.index_select when it is imported."""
    torchs, seen = getattr(place, name), []
    monkeypatch.setattr(place, name, lambda *args: torchs(*args))
    replacement = getattr(place, name)
    import_module = importlib.import_module

    def record(module: str) -> ModuleType:
        if module == "forge.version":
            seen.append(getattr(place, name))
        return import_module(module)

    monkeypatch.setattr("importlib.import_module", record)
    monkeypatch.delitem(sys.modules, "forge.version")
    forge._import("forge.version")
    assert seen == [torchs]
    assert getattr(place, name) is replacement
    assert replacement not in trace_rules.get_torch_obj_rule_map()


def test_a_module_that_another_thread_is_importing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in sys.modules before it has its names; importlib holds its lock."""
    asked: list[str] = []
    monkeypatch.setattr("importlib.import_module", asked.append)
    assert "forge.version" in sys.modules
    forge._import("forge.version")
    assert asked == ["forge.version"]


def test_the_first_call_of_a_process_may_be_under_autocast() -> None:
    """It imports the executors, whose patterns are traced then."""
    code = """
import torch, forge
with torch.autocast("cpu", torch.bfloat16):
    print(forge.jit(lambda x: 1.0 + x @ x)(torch.ones(2, 2)).dtype)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["torch.bfloat16"]
