"""Functions and modules whose module cannot be imported by its name are compiled, with guards on its globals."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import forge

SOURCE = """
import math
import torch
from torch import nn

SCALE = 2
COUNT = 0
TABLE = {"shift": 1}
__doc__ = "generated"

def helper(x):
    return x.sin() * SCALE

class Base(nn.Module):
    factor = 3

    def forward(self, x):
        return x * self.factor

class Net(Base):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        global COUNT
        COUNT += 1
        x = super().forward(helper(self.linear(x)))
        return x * math.pi + TABLE["shift"] + len(__doc__)
"""


def executed(name: str) -> Callable[[Path], dict[str, Any]]:
    def load(folder: Path) -> dict[str, Any]:
        scope = {"__name__": name}
        exec(SOURCE, scope)
        return scope

    return load


def loaded(folder: Path) -> dict[str, Any]:
    """Load a module by importlib, without sys.modules."""
    path = folder / "loaded_elsewhere.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("loaded_elsewhere", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


SCOPES = {
    "no such module": executed("generated"),
    "no such package": executed("generated.inner"),
    "another module of the name": executed(json.__name__),
    "the program's name": executed("__main__"),
    "not in sys.modules": loaded,
}


@pytest.mark.parametrize("name", SCOPES)
@pytest.mark.filterwarnings("error:forge")
def test_a_model_of_such_a_module_is_one_graph_that_follows_its_globals(name: str, tmp_path: Path) -> None:
    scope = SCOPES[name](tmp_path)
    model = scope["Net"]()
    jitted = forge.jit(model, fullgraph=True)
    x = torch.randn(2, 4)

    def compare() -> None:
        before = scope["COUNT"]
        actual, scope["COUNT"] = jitted(x), before
        torch.testing.assert_close(actual, model(x))
        assert scope["COUNT"] == before + 1

    compare()
    for change in (
        lambda: scope.update(SCALE=5),
        lambda: scope["TABLE"].update(shift=7),
        lambda: setattr(scope["Base"], "factor", 4),
        lambda: exec("def helper(x):\n    return x.cos()", scope),
    ):
        change()
        compare()
    assert not forge.explain(jitted).graph_breaks


def test_a_function_of_globals_without_a_name() -> None:
    scope: dict[str, Any] = {}
    exec("import torch\nSHIFT = 1\ndef inner(x):\n    return x + SHIFT\ndef outer(x):\n    return inner(x) * 2", scope)
    jitted = forge.jit(scope["outer"], fullgraph=True)
    for shift in (1, 3):
        scope["SHIFT"] = shift
        torch.testing.assert_close(jitted(torch.ones(2)), torch.full((2,), 2.0 * (1 + shift)))


def test_a_module_is_not_imported_a_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_once.py").write_text(SOURCE + "\nprint('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("imported_once")
    monkeypatch.delitem(sys.modules, "imported_once")
    model = module.Net()
    x = torch.randn(2, 4)
    torch.testing.assert_close(forge.jit(model, fullgraph=True)(x), model(x))
    assert "imported_once" not in sys.modules
