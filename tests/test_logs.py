"""The variable FORGE_LOGS and the loggers below "forge"."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import forge
from forge.support import logs

PROGRAM = """
import torch, forge
def f(x):
    y = x * 2
    print(end="")
    return y + 1
jitted = forge.jit(f, executors=["torch"], cache=False, dynamic=False)
jitted(torch.ones(2)), jitted(torch.ones(3))
"""


def run(wanted: str) -> list[str]:
    environment = {"FORGE_LOGS": wanted, "PATH": "", "PYTHONPATH": ":".join(sys.path), "HOME": "/nonexistent"}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=True)
    return [line for line in done.stderr.splitlines() if "forge" in line.lower()]


def test_what_is_named_is_written_and_nothing_else() -> None:
    lines = run("capture,compile")
    assert {line.split("]")[0] for line in lines} == {"[forge.capture", "[forge.compile"}
    assert any("f: graph break: " in line for line in lines)
    assert any("f: recompile: tensor x size mismatch at index 0. expected 2, actual 3" in line for line in lines)
    assert any("1 operations (torch 1); record " in line for line in lines)


@pytest.fixture
def _as_before() -> Iterator[None]:
    tree = [logging.getLogger("forge"), *(logging.getLogger(f"forge.{name}") for name in logs.NAMES)]
    before = [(log.level, list(log.handlers), log.propagate) for log in tree]
    yield
    for log, (level, handlers, propagate) in zip(tree, before, strict=True):
        log.setLevel(level)
        log.handlers[:] = handlers
        log.propagate = propagate


@pytest.mark.usefixtures("_as_before")
def test_a_plus_tells_who_declined(capfd: pytest.CaptureFixture) -> None:
    logs.set_up("+claim")
    forge.jit(lambda x: x.exp(), executors=["hub", "torch"])(torch.ones(2))
    told = capfd.readouterr().err
    assert "[forge.claim] <lambda>: torch.exp by torch" in told and "test_logs.py" in told


@pytest.mark.usefixtures("_as_before")
def test_a_program_from_disk_is_told_with_its_claims(
    capfd: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_CACHE", "1")
    monkeypatch.setenv("FORGE_CACHE_DIR", str(tmp_path))
    logs.set_up("compile,+claim")

    def told() -> list[str]:
        forge.jit(lambda x: x.exp(), executors=["torch"])(torch.ones(2))
        return capfd.readouterr().err.splitlines()

    (first, *claims), (again, *found) = told(), told()
    assert "<lambda>: 1 operations (torch 1); record " in first
    assert "<lambda>: 1 operations (torch 1); found on disk; load " in again
    assert claims == found and len(found) == 1 and "[forge.claim] <lambda>: torch.exp by torch" in found[0]


@pytest.mark.usefixtures("_as_before")
def test_a_name_that_there_is_not_is_a_warning_with_the_near_one() -> None:
    with pytest.warns(UserWarning, match="FORGE_LOGS: forge has no log 'clam'; did you mean claim?"):
        logs.set_up("clam")


def test_a_program_may_configure_them_itself(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="forge"):
        forge.jit(lambda x: x.exp(), executors=["torch"])(torch.ones(2))
    assert [record.name for record in caplog.records if record.name == "forge.compile"]
