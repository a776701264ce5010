"""Fixtures of the distributed tests: all tests of this folder in one pytest process share two processes, because
starting them takes seconds."""

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


@pytest.fixture
def nccl() -> Iterator[None]:
    """Yield a process group of this process alone, on a GPU."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    if torch.distributed.is_initialized():
        pytest.skip("the process has a process group")
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
