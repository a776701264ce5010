"""The shared configuration of the tests: a fixed seed, the options `--op` and `--update-golden`, hypothesis profiles.

Programs are compiled as for a user: fused, cached on disk, in the default order of executors; tests of torch's own
calls, or of the text of traces, name their executors. There is one difference: with FORGE_CHECK=regions, torch's
operators run each region, between checks of the assumptions of its code, because compiling all regions would take
hours. Tests of Inductor's code use the fixture `compiled_regions`. The programs are cached in a folder of the test run,
never in a user's home. The last lines of a run report the number of tests that compiled programs with a fusion
executor, and the number of those with regions.

A region that Inductor cannot compile is replaced by torch's calls, with correct results; a test with such a region
fails, unless it has the marker `failing_regions`.
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
    """Report an error in forge's own files that prevents its import once, not for every file of tests."""
    try:
        fusion = importlib.import_module("forge.compiler.fusion")
    except Exception:
        pytest.exit(f"forge cannot be imported:\n{traceback.format_exc()}", returncode=pytest.ExitCode.USAGE_ERROR)
    fusion.fuse_regions = _counted(fusion.fuse_regions)
    waits = importlib.import_module("forge.executors.inductorex.compile_wait")
    waits.notice = _recorded(waits.notice)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Freeze the garbage collector during collection: traversing tens of thousands of tests takes a second each
    time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _freeze_leftovers() -> Iterator[None]:
    """Freeze the leftovers of each file of tests: traversing them takes seconds after some thousand tests."""
    yield
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark all but one in n of a test's cases as `slow` if the test has the marker `one_in(n)`; none for an op of
    --op."""
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


_regions: list[int] = []  # the number of regions of each trace, while one test runs
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
    """Reset the notices of failing regions, so that a failure in one test affects neither caching nor warnings in
    another."""
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
    """Make Inductor compile the regions of this test's programs, as for a user."""
    monkeypatch.delenv("FORGE_CHECK", raising=False)
