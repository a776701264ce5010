"""The examples that are scripts run, for a few steps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("script", "told"),
    [
        pytest.param("train.py", "loss", id="train"),
        pytest.param("train_vit.py", "right of unseen images", id="train_vit", marks=SLOW),
        pytest.param(
            "per_sample_gradients.py", "the longest gradient of a sample", id="per_sample_gradients", marks=SLOW
        ),
        pytest.param("ensemble.py", "the members' predictions between them", id="ensemble", marks=SLOW),
    ],
)
@pytest.mark.parametrize("how", [(), pytest.param(("--eager",), marks=SLOW)], ids=["jitted", "eager"])
def test_an_example_runs(script: str, told: str, how: tuple[str, ...]) -> None:
    if script == "train_vit.py":
        pytest.importorskip("accelerate", reason="needs the extra: pip install forge-jit[test]")
    command = [sys.executable, f"examples/{script}", "--steps", "3", *how]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert told in ran.stdout


def test_the_example_of_a_kernel_for_some_values_runs_it() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "examples/rotary_kernel.py"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.stdout == "run by by_halves\n", ran.stderr


@SLOW
def test_the_example_of_a_simulation_prints_a_table_for_each_number_of_ranks() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "examples/simulate.py", "--layers", "2", "--ranks", "64", "512"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "3.81 billion parameters on 64 H100 SXM, 8 nodes" in ran.stdout
    assert "GB of them by rank  0-509: 0.030, 510: 0.029, 511: 0.013" in ran.stdout
    assert ran.stdout.count("exposed communication") == 2
