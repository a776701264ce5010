"""What tests of `generate` have in common."""

import logging
from collections.abc import Callable

import pytest


@pytest.fixture
def left(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return a function that returns why generations were left to transformers' loop."""
    caplog.set_level(logging.INFO, logger="forge.generate")
    return lambda: [each.getMessage() for each in caplog.records if each.name == "forge.generate"]
