"""The report of forge doctor on the machine, and the problems it finds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import forge
from forge import cli
from forge.debug import doctor
from forge.executors.registry import known_executors

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORGE_CACHE_DIR", str(tmp_path / "forge"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path / "hub"))
    return tmp_path


def found(section: str) -> dict[str, doctor.Finding]:
    return {each.item: each for each in doctor.examine() if each.section == section}


def test_versions_executors_and_the_reasons_of_those_that_are_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_EXECUTORS", "hub,torch")
    assert found("versions")["torch"].detail == torch.__version__
    executors = found("executors")
    assert executors["default order"].detail == "hub, torch"
    assert known_executors().keys() <= executors.keys()
    if not torch.cuda.is_available():
        assert executors["nvfuser"] == doctor.Finding("executors", "nvfuser", "absent", "there is no CUDA device")


def test_the_forge_that_is_imported_comes_first_with_its_version_and_place() -> None:
    first = doctor.examine()[0]
    assert (first.item, first.detail) == ("forge", f"{forge.__version__}, {Path(forge.__file__).parent}")


def test_a_folder_that_others_can_write_to_is_a_problem(_caches: Path) -> None:
    programs = _caches / "forge/programs"
    programs.mkdir(parents=True)
    assert found("caches")["programs"].state == "ok"
    programs.chmod(0o777)
    assert found("caches")["programs"].state == "problem"
    assert "the folder can be written to by other users" in found("caches")["programs"].detail
    assert cli.main(["doctor"]) == 1


def test_a_link_in_the_place_of_forges_own_cache_is_a_problem(_caches: Path, tmp_path: Path) -> None:
    """Nothing is stored there, nor trusted."""
    (_caches / "forge").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (_caches / "forge/programs").symlink_to(tmp_path / "elsewhere")
    assert found("caches")["programs"].state == "problem"
    assert "the folder is a link" in found("caches")["programs"].detail


def test_a_missing_compiler_is_a_problem_with_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    finding = found("compilers")["C++"]
    assert finding.state == "problem" and "torch runs what would be fused on a CPU" in finding.detail


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    cli.main(["doctor"])
    assert "hf_secret" not in capsys.readouterr().out
    assert found("environment")["HF_TOKEN"].detail == "is set; its value is not shown"


def test_a_question_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no such driver")

    monkeypatch.setitem(doctor.SECTIONS, "devices", fail)
    (finding,) = found("devices").values()
    assert finding.state == "problem" and finding.detail == "cannot be told: RuntimeError: no such driver"


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture) -> None:
    status = cli.main(["doctor", "--json"])
    findings = json.loads(capsys.readouterr().out)
    assert status == int(any(each["state"] == "problem" for each in findings))
    assert {each["section"] for each in findings} >= {"versions", "devices", "compilers", "caches", "executors"}
    cli.main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "versions" and any("torch " in line for line in lines)


@pytest.mark.slow
def test_who_reads_may_stop_reading() -> None:
    command = f"{sys.executable} -m forge doctor | head -1"
    ran = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout == "versions\n" and "Error" not in ran.stderr
