"""The reproduction script of forge.repro, which does not need the original program."""

import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.executors import OperatorExecutor
from forge.ir import Trace


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, ids: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.embedding(ids)).transpose(0, 1)
        h[0] = 0
        return F.gelu(h * scale).sum() * torch.tensor([1.0, 0.0, 1.0])


def compiled(function: Any, *inputs: torch.Tensor, **options: Any) -> Callable:
    jitted = forge.jit(function, executors=["torch"], **options)
    jitted(*inputs)
    return jitted


def printed(script: Path) -> str:
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=script.parent, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_script_runs_forward_and_backward_as_eager_does(tmp_path: Path) -> None:
    ids, scale = torch.randint(10, (3, 5)), torch.randn(4, 3)
    script = forge.repro(compiled(Model(), ids, scale.t()), tmp_path / "repro.py")
    text = script.read_text()
    assert "Model: " in text and "torch.nn.functional.gelu(" in text and "[1.0, 0.0, 1.0]" in text
    assert "OPTIONS = " in text and "'executors': ['torch']" in text
    told = re.findall(r"largest difference from eager (\S+)", printed(script))
    assert len(told) == 1 + 3  # the result, and the gradients of three parameters
    assert all(float(far) < 1e-5 for far in told)


def test_lengths_that_are_symbols_are_as_they_were(tmp_path: Path) -> None:
    jitted = compiled(lambda x: torch.softmax(x * x.shape[0], -1), torch.randn(5, 3), dynamic=True)
    script = forge.repro(jitted, tmp_path / "repro.py")
    assert "torch.empty((5, 3)" in script.read_text()
    assert "value 0: (5, 3) torch.float32, largest difference from eager 0\n" in printed(script)
    told = compiled(nn.LayerNorm(3), torch.randn(5, 3), dynamic=True)  # eps is a symbol, too
    with pytest.raises(ValueError, match="LayerNorm reads a number from a tensor"):
        forge.repro(told, tmp_path / "other.py")


def test_a_graph_is_chosen_by_its_number(tmp_path: Path) -> None:
    jitted = forge.jit(lambda x: x.sin() if x.shape[0] > 2 else x.cos(), executors=["torch"], dynamic=False)
    jitted(torch.randn(3))
    jitted(torch.randn(2))
    texts = [forge.repro(jitted, tmp_path / f"{graph}.py", graph=graph).read_text() for graph in (0, 1)]
    assert "torch.sin(" in texts[0] and "torch.cos(" in texts[1]
    with pytest.raises(ValueError, match="graph is 2, but <lambda> has 2 graphs"):
        forge.repro(jitted, tmp_path / "2.py", graph=2)


@pytest.mark.slow
def test_what_is_left_out_of_the_options_is_named_in_the_script_and_by_a_warning(tmp_path: Path) -> None:
    def as_it_is(trace: Trace) -> Trace:
        return trace

    mine = OperatorExecutor("mine")
    x = torch.randn(3)
    with torch.no_grad():
        jitted = forge.jit(nn.GELU(), executors=[mine, "torch"], transforms=[as_it_is], freeze=True)
        jitted(x)
    with pytest.warns(UserWarning, match="^forge.repro: the script leaves out .*: add them") as told:
        script = forge.repro(jitted, tmp_path / "repro.py")
    left_out = "executors (mine), transforms (as_it_is), freeze=True"
    assert f"Left out of forge.jit's options: {left_out}." in script.read_text()
    assert left_out in str(told[0].message)
    printed(script)


def test_where_nothing_is_left_out_nothing_is_said(tmp_path: Path) -> None:
    jitted = compiled(nn.GELU(), torch.randn(3), memory="speed")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        script = forge.repro(jitted, tmp_path / "repro.py")
    assert "Left out" not in script.read_text()


def test_what_was_not_compiled_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="<lambda> has compiled nothing yet: call it first"):
        forge.repro(forge.jit(lambda x: x), tmp_path / "repro.py")
    with pytest.raises(TypeError, match=r"was not made by forge\.jit"):
        forge.repro(len, tmp_path / "repro.py")
    assert not list(tmp_path.iterdir())
