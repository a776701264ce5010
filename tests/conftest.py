"""What every test shares: a fixed seed, the options `--op` and `--update-golden`, hypothesis profiles.

Programs run by torch's own functions unless a test names executors: compiling each test's regions would take an hour.
Tests of fusion name them. Nothing is kept on disk for another process, or in a user's home, unless a test asks for it.
"""

import importlib
import os
import traceback
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

os.environ.setdefault("FORGE_EXECUTORS", "hub,torch")
if os.environ.setdefault("FORGE_CACHE", "0") == "0":
    os.environ.pop("FORGE_CACHE_DIR", None)  # a test's own cache is where XDG_CACHE_HOME says
settings.register_profile(
    "default", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=False
)
settings.load_profile("default")


def pytest_configure(config: pytest.Config) -> None:
    """A mistake in forge's own files that keeps it from being imported is told once, not by every file of tests."""
    try:
        importlib.import_module("forge")
    except Exception:
        pytest.exit(f"forge cannot be imported:\n{traceback.format_exc()}", returncode=pytest.ExitCode.USAGE_ERROR)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--op", action="append", default=[], help="run the tests of the OpInfo of this exact name (repeatable)"
    )
    parser.addoption("--update-golden", action="store_true", help="write what the stages print now to tests/golden")


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
