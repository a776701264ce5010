"""The demo make demo-kernels: an example is built, verified, and used by a Llama from a folder, from a Hub and
offline."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo_kernels.py"


def run(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the demo with a separate home folder that must stay empty."""
    home = folder / "home"
    home.mkdir()
    places = {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "HF_HOME": str(home / "hub")}
    command = [sys.executable, DEMO, *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, **places}, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_demo_shows_what_it_says(tmp_path: Path) -> None:
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("there is no C++ compiler to build norms-cpu with")
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("norms-cpu.rms_norm_cpu  9 of 9 forward, 9 of 9 backward") == 4
    assert done.stdout.count("norms-cpu.swiglu_cpu    4 of 4 forward, 4 of 4 backward") == 4
    assert "wrong.swiglu_without_silu of swiglu is not used: failed verification on gate: float32[" in done.stdout
    assert re.search(r"\d+ requests of forge/hub; hf_hub/", done.stdout)
    left = [path.relative_to(tmp_path / "home") for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert not left, "the demo writes to the user's caches"


@pytest.mark.slow
def test_the_demo_fails_where_a_site_is_not_taken(tmp_path: Path, repository: Callable) -> None:
    made = repository("gelu", "def f(x):\n    return F.gelu(x)", op="torch.nn.functional.gelu", args="{x: input}")
    done = run(tmp_path, "--kernels", made.folder)
    assert done.returncode == 1
    assert "norms-cpu.rms_norm_cpu  0 of 9 forward, 0 of 9 backward" in done.stdout, done.stderr
