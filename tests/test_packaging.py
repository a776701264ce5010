"""The metadata of an installed forge: the entry point of torch.compile's backends, types, one version."""

import os
import platform
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import forge
from forge import cli

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROGRAM = """
import sys, torch
assert "forge" not in sys.modules
{before}
compiled = torch.compile(lambda x: x.sin() + 1, backend="forge")
x = torch.ones(2)
torch.testing.assert_close(compiled(x), x.sin() + 1)
assert "forge" in sys.modules and "forge" in torch._dynamo.list_backends()
"""
AFTER = ("import forge", "torch._dynamo.list_backends(); import forge")


@pytest.mark.parametrize("before", ["", *(pytest.param(each, marks=pytest.mark.slow) for each in AFTER)])
def test_torch_compile_finds_an_installed_forge(before: str, tmp_path: Path) -> None:
    """It holds whether forge was imported before or not: torch refuses a name that is registered twice."""
    points = PROJECT["project"]["entry-points"]["torch_dynamo_backends"]
    folder = tmp_path / "forge_jit-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: forge-jit\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (folder / "entry_points.txt").write_text("\n".join(["[torch_dynamo_backends]", *lines, ""]))
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "FORGE_EXECUTORS": "torch"}
    command = [sys.executable, "-c", PROGRAM.format(before=before)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr


def test_types_are_declared() -> None:
    assert (ROOT / "forge/py.typed").exists()
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["forge"]


def test_version_names_forge_torch_and_python(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    versions = f"forge {forge.__version__}, torch {metadata.version('torch')}, Python {platform.python_version()}\n"
    assert (caught.value.code, capsys.readouterr().out) == (0, versions)


def test_a_wheel_has_every_file_of_the_package(tmp_path: Path) -> None:
    """It is built from a copy, because setuptools writes beside its sources."""
    build_meta = pytest.importorskip("setuptools.build_meta", reason="needs the extra: pip install forge-jit[test]")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "forge", source / "forge", ignore=shutil.ignore_patterns("__pycache__"))
    program = f"from {build_meta.__name__} import build_wheel; print(build_wheel({str(tmp_path)!r}))"
    ran = subprocess.run([sys.executable, "-c", program], cwd=source, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    (wheel,) = tmp_path.glob("*.whl")
    files = {str(path.relative_to(source)) for path in (source / "forge").rglob("*") if path.is_file()}
    hidden = {name for name in files if Path(name).name.startswith(".")}
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if name.startswith("forge/")}
        top = {name for name in archive.namelist() if "/" not in name}
    assert top == set()
    assert files - hidden <= inside
    assert inside <= files


def test_a_new_kernel_repository_of_the_examples_is_not_ignored(tmp_path: Path) -> None:
    """Its files are in build/torch-universal, as the Kernel Hub has them; the project's own build/ is ignored."""
    shutil.copy(ROOT / ".gitignore", tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    paths = ["build/site", "examples/kernels/new/build/torch-universal/__init__.py"]
    found = subprocess.run(["git", "check-ignore", *paths], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.stdout.split() == paths[:1]


def test_pytest_says_how_many_tests_passed_also_when_it_is_quiet(request: pytest.FixtureRequest) -> None:
    """Passing -q twice omits the last line."""
    assert "-q" not in request.config.getini("addopts")
