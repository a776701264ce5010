"""Every command line in the help of forge kernels runs."""

import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge import cli
from forge.cli import help
from forge.hub import builder
from forge.support import timing
from forge.testing.hub_server import Hub
from tests.hub.kernels import metadata, process_restored, write

NORM = """
import torch.nn.functional as F


def rms_norm(x, weight, eps):
    return F.rms_norm(x, weight.shape, weight, eps)
"""
MANIFEST = """
forge_kernels: 1
library: {name: my-norms}
ops:
- pattern: rms_norm
  type_alias: {T: [float32]}
  kernels:
  - name: rms_norm
    kernel_name: rms_norm
    grad: composite
    device: cpu
    arg_meta: {x: T, weight: T}
    shape: {x: "[..., H]", weight: "[H]"}
    where: "H % 8 == 0"
"""
LONG = ("forge kernels verify", "forge kernels bench", "forge kernels build")  # processes of their own, compilers
LINES = [
    pytest.param(line, marks=[pytest.mark.slow] if command in LONG else [], id=line)
    for command, lines in help.EXAMPLES.items()
    for line in lines
    if command.startswith("forge kernels")
]


@pytest.fixture
def place(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder with the files that the examples name: a kernel, here and on a Hub, and a lock file of it."""
    names = {"name": "my-norms", "kernel_id": "_my_norms_v1"}
    files = {"__init__.py": NORM, "forge_kernels.yaml": MANIFEST, "metadata.json": metadata(**names)}
    write(tmp_path / "my-norms", {f"torch-universal/{path}": text for path, text in files.items()})
    server.publish_folder("acme/my-norms", tmp_path / "my-norms")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["kernels", "lock", "./my-norms"]) == 0
    with process_restored():
        yield tmp_path


@pytest.mark.parametrize("line", LINES)
def test_the_examples_of_the_help_run(
    line: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "SECONDS", 0.01)
    name, *arguments = shlex.split(line, comments=True)
    assert name == "forge"
    if "build" in arguments and shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("there is no C++ compiler")
    if "new" not in arguments and any("my-gate" in each for each in arguments):
        builder.write_new("my-gate", place / "my-gate", "cpp")
    capsys.readouterr()
    assert cli.main(arguments) == 0, capsys.readouterr().err
    said = capsys.readouterr()
    assert said.out or "the cache holds no kernels" in said.err
