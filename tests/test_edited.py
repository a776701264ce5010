"""Edited code under forge.jit(edit=folder): it runs in place of the generated code."""

import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import forge


class Gelu(torch.nn.Module):
    """A module that reads a constant without a name, so that it is an object of the file."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.linear(x)) + torch.arange(4.0).to(x)


def edit(folder: Path, name: str, change: Callable[[str], str]) -> Path:
    (path,) = folder.glob(f"{name}-*.py")
    path.write_text(change(path.read_text()))
    return path


def relu_for_gelu(text: str) -> str:
    assert "torch.nn.functional.gelu(" in text
    return text.replace("torch.nn.functional.gelu(", "torch.nn.functional.relu(")


def test_the_programs_are_written_and_an_edited_one_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, x = Gelu(), torch.randn(2, 4, requires_grad=True)
    jitted = forge.jit(model, executors=["torch"], edit=tmp_path / "programs")
    torch.testing.assert_close(jitted(x), model(x))
    jitted(x).sum().backward()
    assert sorted(path.name.partition("-")[0] for path in (tmp_path / "programs").iterdir()) == ["backward", "forward"]
    assert forge.explain(jitted).edited == []
    path = edit(tmp_path / "programs", "forward", relu_for_gelu)
    again = forge.jit(model, executors=["torch"], edit=tmp_path / "programs")
    with caplog.at_level(logging.WARNING, "forge.compile"):
        result = again(x)
    torch.testing.assert_close(result, F.relu(model.linear(x)) + torch.arange(4.0))
    assert f"{path} runs in place of what was generated" in caplog.text
    explained = forge.explain(again)
    assert explained.edited == [str(path)] and f"edited: {path}" in str(explained)
    assert str(forge.last_traces(again)[-1]) == path.read_text()
    result.sum().backward()  # of forge's generated code


def test_an_edited_backward_runs(tmp_path: Path) -> None:
    f = lambda x: (x * 3).sum()
    x = torch.ones(3, requires_grad=True)
    forge.jit(f, edit=tmp_path)(x).backward()
    edit(tmp_path, "backward", lambda text: text.replace("* 3", "* 5"))
    x.grad = None
    forge.jit(f, edit=str(tmp_path))(x).backward()
    assert x.grad.tolist() == [5, 5, 5]


@pytest.mark.slow
def test_another_process_runs_what_was_edited(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch, forge\n"
        "f = lambda x: torch.sin(x) + torch.tensor([1.0, 2.0])\n"
        "jitted = forge.jit(f, executors=['torch'], edit=sys.argv[1])\n"
        "print(jitted(torch.zeros(2)).tolist())\n"
    )

    def run() -> str:
        command = [sys.executable, str(program), str(tmp_path / "programs")]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()

    assert run() == "[1.0, 2.0]" == run()
    edit(tmp_path / "programs", "computation", lambda text: text.replace("torch.sin(", "torch.cos("))
    assert run() == "[2.0, 3.0]"


def test_an_edited_file_is_not_for_another_program(tmp_path: Path) -> None:
    options = {"executors": ["torch"], "edit": tmp_path}
    forge.jit(lambda x: torch.sin(x) + 1, **options)(torch.zeros(2))
    edit(tmp_path, "computation", lambda text: text.replace("torch.sin(", "torch.cos("))
    assert forge.jit(lambda x: torch.sin(x) + 2, **options)(torch.zeros(2)).tolist() == [2, 2]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_in_which_a_region_was_replaced_is_not_for_another_region(tmp_path: Path) -> None:
    """The files describe regions by their calls, which are listed below; the rest of the two programs is the same."""
    first, second = lambda x: (torch.sin(x) + 1).cos(), lambda x: (torch.sin(x) + 2).cos()
    forge.jit(first, edit=tmp_path)(torch.zeros(2))
    path = edit(tmp_path, "computation", lambda text: text.replace("cos, = fusion0([x])", "cos = torch.tan(x)"))
    assert "    #   cos = torch.cos(" in path.read_text()
    assert forge.jit(first, edit=tmp_path)(torch.ones(2)).tolist() == torch.ones(2).tan().tolist()
    torch.testing.assert_close(forge.jit(second, edit=tmp_path)(torch.ones(2)), second(torch.ones(2)))
    assert len(list(tmp_path.iterdir())) == 2


def test_nothing_else_is_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_CACHE", "1")
    monkeypatch.setenv("FORGE_CACHE_DIR", str(tmp_path / "cache"))
    for _ in range(2):
        jitted = forge.jit(lambda x: torch.sin(x) + 1, edit=tmp_path / "programs")
        jitted(torch.zeros(2))
        assert forge.explain(jitted).cached == 0
        shutil.rmtree(tmp_path / "programs")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda text: text.replace("def computation(", "def computation("[:-1]), "SyntaxError"),
        (lambda text: text.replace("def computation(", "def other("), "defines no function 'computation'"),
        (lambda text: f"import no_such_module\n{text}", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
    ids=["syntax", "name", "import"],
)
def test_a_file_that_is_no_program_is_an_error(tmp_path: Path, change: Callable[[str], str], text: str) -> None:
    forge.jit(lambda x: torch.sin(x) + 1, edit=tmp_path)(torch.zeros(2))
    path = edit(tmp_path, "computation", change)
    with pytest.raises(forge.EditError, match=text) as raised:
        forge.jit(lambda x: torch.sin(x) + 1, edit=tmp_path)(torch.zeros(2))
    assert str(path) in str(raised.value)


def test_edit_is_a_path() -> None:
    with pytest.raises(TypeError, match=r"forge\.jit: edit is True, but must be a folder's path"):
        forge.jit(torch.sin, edit=True)
