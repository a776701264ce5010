"""The commands forge kernels list | lock | check; build and verify have their own test files."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from forge import cli, hub
from forge.testing.hub_server import Hub
from tests.hub.kernels import kernel, write


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = cli.main(["kernels", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_lock_then_check_then_list(server: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit = server.publish("acme/rms", kernel())
    lock = tmp_path / "kernels.lock"
    assert run(capsys, "lock", "acme/rms@v1", "-o", lock)[:2] == (0, f"{lock}: 1 kernel, 3 files\n")
    ok = f"ok      acme/rms (commit {commit[:12]}, variant torch-universal): 3 files are as locked\n"
    assert run(capsys, "check", "--lock", lock)[:2] == (0, ok)
    assert run(capsys, "list")[1] == f"acme/rms  v1  {commit[:12]}  torch-universal\n"
    assert run(capsys, "list", "--lock", lock)[1] == f"acme/rms  v1  {commit[:12]}  torch-universal\n"
    (hub.resolve("acme/rms", version=1).folder / "ops.py").resolve().write_text("x = 1")
    status, out, _ = run(capsys, "check", "--lock", lock)
    assert status == 1 and out.startswith("failed  acme/rms") and "ops.py is sha256:" in out


def test_the_layers_of_a_repository_of_the_hub_are_listed(server: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    layer = "from torch import nn\n\nclass Same(nn.Module):\n    def forward(self, x):\n        return x\n"
    server.publish("acme/rms", kernel({"layers.py": layer, "__init__.py": "from . import layers"}))
    status, out, err = run(capsys, "list", "acme/rms@v1", "--allow", "acme")
    assert (status, err) == (0, "") and out.splitlines()[1].split()[:3] == ["rms.Same", "x", "yes"]


def test_check_says_which_variant_and_why_not_each_other(server: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    commit = server.publish("acme/rms", kernel() | kernel(variant="torch-cpu") | kernel(variant="torch-metal"))
    status, out, _ = run(capsys, "check", "acme/rms@v1", "acme/none@v1", "--backend", "cpu")
    lines = out.splitlines()
    assert status == 1
    assert lines[0] == f"ok      acme/rms@v1 (commit {commit[:12]}, variant torch-cpu)"
    assert lines[1] == "  fit as well: torch-universal"
    assert lines[2].startswith("  torch-metal: backend (metal) does not match")
    assert lines[3].startswith("failed  acme/none")
    assert not any("/resolve/" in request for request in server.requests)


def test_an_error_is_one_message_and_status_1(server: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.publish("stranger/rms", kernel())
    status, out, err = run(capsys, "lock", "stranger/rms@v1", "-o", tmp_path / "x.lock")
    assert (status, out) == (1, "") and err.startswith("forge: stranger/rms@v1: 'stranger' is not among")
    assert run(capsys, "lock", "stranger/rms@v1", "-o", tmp_path / "x.lock", "--allow", "stranger")[0] == 0


def test_a_folder_on_the_command_line_is_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "rms", kernel())
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "lock", "./rms")[:2] == (0, "forge-kernels.lock: 1 kernel, 3 files\n")
    assert run(capsys, "check", "--lock", "forge-kernels.lock")[0] == 0


def test_a_usage_error_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(capsys, "lock", "--nonsense")
    assert caught.value.code == 2


def test_the_command_is_forge_and_python_m_forge(tmp_path: Path) -> None:
    root = Path(cli.__file__).parents[2]
    assert tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"] == {"forge": "forge.cli:main"}
    environment = os.environ | {"KERNELS_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "forge", "kernels", "list"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=root)
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr


def test_check_without_anything_to_check_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, "check")
    assert (status, out) == (2, "") and "nothing to check: give a folder or org/name@v1" in err
    hub.Lock(tmp_path / "forge-kernels.lock").write()
    for arguments in ((), ("--lock", "forge-kernels.lock")):
        status, out, err = run(capsys, "check", *arguments)
        assert (status, out) == (2, "") and "nothing to check: forge-kernels.lock holds no kernels" in err


def test_list_says_that_the_cache_is_empty(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "list") == (
        0,
        "",
        "forge: the cache holds no kernels of the Hub; forge kernels list SOURCE shows those of SOURCE\n",
    )


def test_lock_without_anything_to_lock_is_a_usage_error_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, "lock")
    assert (status, out) == (2, "") and "nothing to lock: give a folder or org/name@v1" in err
    assert not (tmp_path / "forge-kernels.lock").exists()


def test_lock_without_sources_locks_what_the_file_holds_anew(
    server: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.publish("acme/rms", kernel())
    lock = tmp_path / "kernels.lock"
    run(capsys, "lock", "acme/rms@v1", "-o", lock)
    assert run(capsys, "lock", "-o", lock)[:2] == (0, f"{lock}: 1 kernel, 3 files\n")
