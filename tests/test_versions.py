"""The versions of torch that forge is tested with: stated in one place, with a warning above them."""

import re
import tomllib
import warnings
from pathlib import Path

import pytest

from forge.torch_internals import versions

ROOT = Path(__file__).parent.parent
SHOWN = [".".join(map(str, each)) for each in (versions.OLDEST, versions.NEWEST)]


def test_what_is_installed_is_in_the_range() -> None:
    assert versions.OLDEST <= versions.TORCH <= versions.NEWEST


def test_the_package_asks_for_the_oldest() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={SHOWN[0]}" in project["dependencies"]


def test_the_readme_says_the_range() -> None:
    assert f"torch {SHOWN[0]} to {SHOWN[1]}" in (ROOT / "README.md").read_text()


def test_the_pinned_version_is_in_the_range() -> None:
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert versions.OLDEST <= versions.parse(pinned[1]) <= versions.NEWEST


def test_a_newer_torch_is_warned_of_and_others_are_not() -> None:
    with pytest.warns(UserWarning, match=r"tested with torch 2\.11 to 2\.15, and this is 2\.99"):
        versions.warn_if_untested((2, 99))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.warn_if_untested(versions.NEWEST)
        versions.warn_if_untested(versions.parse("2.11.0+cpu"))
