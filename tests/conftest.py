"""Shared configuration of the tests: a fixed seed, the options `--op` and `--update-golden`, hypothesis profiles.

Programs are compiled as a user's are: fused, kept on disk, in the default order of executors; tests that are about
torch's own calls or the text of their traces name their executors. One thing is different: FORGE_CHECK=regions has
torch's operators run each region, between checks of what its code would be compiled for, since compiling all regions
would take hours. Tests of what Inductor generates ask for the fixture `compiled_regions`. The programs are kept in a
folder of the test run's own, never in a user's home. The last lines of a run say how many tests compiled programs with
a fusion executor among theirs, and how many of these programs with regions.

A region that Inductor cannot compile is replaced by torch's calls, so that results are right; a test in which that
happens fails, unless it has the marker `failing_regions`.
"""

import gc
import importlib
import os
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.seeding import seed

os.environ.setdefault("FORGE_CHECK", "regions")
for name in ("FORGE_EXECUTORS", "FORGE_CACHE", "FORGE_CACHE_DIR"):
    os.environ.pop(name, None)
_cache = tempfile.TemporaryDirectory(prefix="forge-tests-", ignore_cleanup_errors=True)
os.environ["XDG_CACHE_HOME"] = _cache.name  # of this process; a worker of pytest-xdist has its own
settings.register_profile(
    "default", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=False
)
settings.load_profile("default")


def pytest_configure(config: pytest.Config) -> None:
    """A mistake in forge's own files that keeps it from being imported is told once, not by every file of tests."""
    try:
        fusion = importlib.import_module("forge.compiler.fusion")
    except Exception:
        pytest.exit(f"forge cannot be imported:\n{traceback.format_exc()}", returncode=pytest.ExitCode.USAGE_ERROR)
    fusion.fuse_regions = _counted(fusion.fuse_regions)
    waits = importlib.import_module("forge.executors.inductorex.compile_wait")
    waits.notice = _recorded(waits.notice)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Keep the garbage collector from looking at tens of thousands of tests, which takes a second each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _freeze_leftovers() -> Iterator[None]:
    """Keep the garbage collector from looking at what each file of tests leaves behind: seconds, after some thousand
    tests."""
    yield
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give the marker `slow` to all but one in n of a test's cases, where the test has the marker `one_in(n)`; to none
    of an op that --op names."""
    counts: Counter[str] = Counter()
    for item in items:
        share = item.get_closest_marker("one_in")
        if share is None or config.getoption("--op") or item.get_closest_marker("slow") is not None:
            continue
        name = item.nodeid.partition("[")[0]
        if counts[name] % share.args[0]:
            item.add_marker(pytest.mark.slow)
        counts[name] += 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--op", action="append", default=[], help="run the tests of the OpInfo of this exact name (repeatable)"
    )
    parser.addoption("--update-golden", action="store_true", help="write what the stages print now to tests/golden")


_regions: list[int] = []  # how many each trace was cut into, while one test runs
_fused: set[str] = set()  # tests that compiled with a fusion executor
_with_regions: set[str] = set()
_errors: list[Exception] = []  # of regions that Inductor could not compile, while one test runs


def _counted(fuse_regions: Callable) -> Callable:
    def fuse_and_count(*args: Any, **options: Any) -> Any:
        fused = fuse_regions(*args, **options)
        _regions.append(len(fused.regions))
        return fused

    return fuse_and_count


def _recorded(notice: Callable) -> Callable:
    def record(error: Exception) -> None:
        _errors.append(error)
        notice(error)

    return record


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    _regions.clear()
    _errors.clear()
    try:
        outcome = yield
    finally:
        if _regions:
            item.user_properties.append(("regions", sum(_regions)))
    if _errors and item.get_closest_marker("failing_regions") is None:
        raise AssertionError(f"Inductor could not compile a region: {_errors[0]}") from _errors[0]
    return outcome


@pytest.fixture(autouse=True)
def _noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A region that fails in one test keeps no program of another from being written to disk, and no warning back."""
    waits = importlib.import_module("forge.executors.inductorex.compile_wait")
    monkeypatch.setattr(waits, "_noticed", threading.Lock())
    monkeypatch.setattr(importlib.import_module("forge.compiler.fusion"), "_warnings", {})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    regions = dict(report.user_properties).get("regions")
    if report.when == "call" and regions is not None:
        _fused.add(report.nodeid)
        if regions:
            _with_regions.add(report.nodeid)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(
        f"{len(_fused)} tests compiled programs with a fusion executor, {len(_with_regions)} of them with regions"
    )


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    seed(0)
    yield


@pytest.fixture
def compiled_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor compiles the regions of this test's programs, as it does a user's."""
    monkeypatch.delenv("FORGE_CHECK", raising=False)
