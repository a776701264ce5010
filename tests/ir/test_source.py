"""The source of a call: the user's line, the module's path."""

from pathlib import Path

import pytest
import torch

from forge.ir import printing
from forge.ir.source import Source


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text("h = 1\n    y = x @ w\n")
    return path


def test_a_line_is_found_in_dynamos_stack_trace_and_in_a_short_form(model: Path) -> None:
    stack = f'  File "/nowhere/a.py", line 1, in f\n    x\n  File "{model}", line 2, in g\n    y'
    assert Source(stack).line == Source(f"{model}:2").line == "model.py:2  y = x @ w"
    assert Source("no line").line is None and Source().line is None


def test_the_line_is_the_innermost_that_is_neither_torchs_nor_forges(model: Path) -> None:
    stack = (
        f'  File "{printing.__file__}", line 1, in g\n  File "{model}", line 2, in g\n'
        f'  File "{torch.nn.functional.__file__}", line 3, in h'
    )
    assert Source(stack).line == "model.py:2  y = x @ w"
    assert Source(f'  File "{printing.__file__}", line 1, in g').line is None


@pytest.mark.parametrize(
    ("owner", "path"),
    [
        ("L['module']", ""),
        ("L['module'].model.layers.0", "model.layers.0"),
        ("L['self'].blocks['a'].up", "blocks.a.up"),
        ("L['module']._modules['a']._modules['0']", "a.0"),
        ("L['target'].__self__.net.0", "net.0"),
        ("L['target'].__closure__[1].cell_contents.net", "net"),
        ("G['__import_my_package_dot_models'].net.0", "net.0"),
        ("L['net'].0", "net.0"),
        ("L['fn'].0", "0"),
        (None, None),
    ],
)
def test_the_module_is_a_path_as_named_modules_has_them(owner: str | None, path: str | None) -> None:
    assert Source(None, owner).module == path


def test_what_is_known_of_a_place_is_one_text(model: Path) -> None:
    assert str(Source(f"{model}:2", "L['module'].up")) == "up  model.py:2  y = x @ w"
    assert str(Source(None, "L['module'].up")) == "up" and str(Source(f"{model}:1")) == "model.py:1  h = 1"
