"""Two processes for all tests of this folder that one process of pytest runs: to start them takes seconds."""

from collections.abc import Iterator

import pytest
import torch
from two_processes import Pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    made = Pair(tmp_path_factory.mktemp("processes"))
    yield made
    made.end()
