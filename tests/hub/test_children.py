"""Processes that forge starts never run files of the current folder."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forge.executors.hubex import gather, operators
from forge.executors.hubex.verification import process, verification_cache
from forge.executors.hubex.verification.messages import Question
from forge.hub import Policy, build_kernels
from forge.hub.manifest import read_manifest
from forge.support import child_processes

FORGE = Path(__file__).parents[2]
MODULES = ("torch", "json", "sitecustomize", "usercustomize", "filelock", "ninja", "setuptools", "numpy", "expecttest")


@pytest.fixture
def cloned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with modules in it that report when they run."""
    folder = tmp_path / "cloned"
    folder.mkdir()
    for name in MODULES:
        (folder / f"{name}.py").write_text(
            f"open({str(tmp_path)!r} + '/ran-{name}', 'w')\nraise SystemExit('ran {name}')\n"
        )
    monkeypatch.chdir(folder)
    return folder


def ran(cloned: Path) -> list[str]:
    return sorted(path.name for path in cloned.parent.glob("ran-*"))


@pytest.mark.parametrize("entry", ["", ".", "../cloned"])
def test_a_python_process_finds_nothing_in_the_current_folder(
    cloned: Path, entry: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [entry, *sys.path])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([entry, "/nowhere"]))
    program = tmp_path / "program.py"
    program.write_text("import sys, json, filelock\nprint(*sys.argv[1:])\n")
    done = subprocess.run(
        child_processes.run_file(str(program)),
        env=child_processes.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, ran(cloned)) == (0, []), done.stderr


def test_a_folder_on_the_path_does_not_customize_the_start_of_a_process(
    cloned: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in set(MODULES) - {"sitecustomize", "usercustomize"}:
        (cloned / f"{name}.py").unlink()
    monkeypatch.setattr(sys, "path", [*sys.path, str(cloned)])
    program = tmp_path / "program.py"
    program.write_text("import sys\nassert sys.argv[1:] == []\n")
    subprocess.run(child_processes.run_file(str(program)), env=child_processes.environment(), check=True)
    assert ran(cloned) == []


@pytest.mark.parametrize("name", ["PATH", "LD_LIBRARY_PATH", "PYTHONPYCACHEPREFIX", "PYTHONUSERBASE"])
def test_what_is_verified_finds_no_program_library_or_bytecode_in_the_current_folder(
    name: str, monkeypatch: pytest.MonkeyPatch, repository: Callable
) -> None:
    made = repository("right", "def f(x):\n    return F.gelu(x)\n", op="torch.nn.functional.gelu", args="{x: input}")
    [kernel] = gather([made.folder])
    question = Question(torch.device("cpu"), torch.float32)
    for value, left in ((os.pathsep.join(["", "/bin", "tools"]), "/bin"), ("tools", "")):
        monkeypatch.setenv(name, value)
        assert process._request(kernel, question, 1.0, "").environment[name] == left


def test_the_worker_runs_nothing_of_the_current_folder(
    cloned: Path, monkeypatch: pytest.MonkeyPatch, repository: Callable
) -> None:
    made = repository("right", "def f(x):\n    return F.gelu(x)\n", op="torch.nn.functional.gelu", args="{x: input}")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(verification_cache, "worker", verification_cache.Worker())
    try:
        [kernel] = gather([made.folder])
        row = next(verification_cache.verify_all(kernel, verification_cache.Verifier()))
        assert (row[-1], ran(cloned)) == ("ok", [])
    finally:
        verification_cache.worker.stop()


def test_forge_as_a_program_runs_nothing_of_the_current_folder(cloned: Path) -> None:
    (cloned / "json.py").unlink()  # Python's own start imports what it wants before forge
    environment = {**os.environ, "PYTHONPATH": str(FORGE)}
    done = subprocess.run(
        [sys.executable, "-X", "frozen_modules=on", "-Bm", "forge", "kernels", "--help"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, ran(cloned)) == (0, []), done.stderr


def test_a_build_runs_nothing_of_the_current_folder(
    cloned: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    (kernels / "forge_kernels.yaml").write_text(
        "forge_kernels: 1\nlibrary: {name: acme}\nbuild: {cpp: [a.cpp]}\nops: []\n"
    )
    (kernels / "a.cpp").write_text("int a;\n")
    for name in ("c++", "ninja"):
        (cloned / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/ran-{name}\nexit 1\n")
        (cloned / name).chmod(0o755)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setenv("FORGE_CACHE_DIR", str(tmp_path / "built"))
    monkeypatch.setenv("PATH", os.pathsep.join(["", ".", os.environ["PATH"]]))
    build_kernels(read_manifest(kernels / "forge_kernels.yaml", operators()), policy=Policy(local=True))
    assert ran(cloned) == []
