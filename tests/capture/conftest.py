"""Fixtures of the tests of `generate`."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from forge.runtime.decoding_state import State, places_of


@pytest.fixture
def left(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return a function that returns the reasons why generations were left to transformers' loop."""
    caplog.set_level(logging.INFO, logger="forge.generate")
    return lambda: [each.getMessage() for each in caplog.records if each.name == "forge.generate"]


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the positions in all caches made from now on."""
    places: list[int] = []
    create = State.__init__

    def noted(self: State, cache: Any, *others: Any) -> None:
        places.append(places_of(cache))
        create(self, cache, *others)

    monkeypatch.setattr(State, "__init__", noted)
    return places
