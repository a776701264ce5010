"""A process that waits for a collective reports the other processes' locations, in a warning and in the final error."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hanging_programs import asked, one_dies, one_hangs, one_is_slow
from two_processes import Pair

LINE = r"hanging_programs\.py:\d+"


@pytest.fixture
def own_pair(tmp_path: Path) -> Iterator[Pair]:
    """Yield two processes for a single test, which ends them."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    made = Pair(tmp_path)
    yield made
    made.end()


def test_a_warning_says_for_whom_a_process_waits(pair: Pair) -> None:
    """The right result follows, because the other process was only late."""
    (warnings, result), (others, other) = pair.run(one_is_slow)
    assert result == other == [5.0, 5.0, 5.0]
    assert others == []
    assert re.search(rf"rank 0 waits for a collective for \d+ s\nrank 0 is at {LINE} in one_is_slow", warnings[0])
    assert re.search(
        rf"all_reduce of float\[3\] in .*, running for \d+ s, at {LINE}  .*all_reduce\(x \* 2", warnings[0]
    )
    assert re.search(rf"rank 1 is at {LINE} in _work_alone; its last collectives:\n", warnings[0])


def test_an_error_names_the_last_collectives_of_each_rank(own_pair: Pair) -> None:
    message, other = own_pair.run(one_hangs)
    assert other == "no error"
    assert "Timed out" in message
    assert re.search(rf"rank 0 is at {LINE} in one_hangs; its last collectives:\n", message)
    assert re.search(
        rf"rank 1 is at {LINE} in one_hangs; its last collectives:\n(  .*\n)*  .*barrier.*, running", message
    )


@pytest.mark.slow
def test_an_error_says_which_process_has_ended(own_pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(EOFError):
        own_pair.run(one_dies, str(tmp_path))
    message = (tmp_path / "error").read_text()
    assert re.search(rf"rank 0 is at {LINE} in one_dies", message)
    assert "rank 1 does not answer: its process has ended, or holds Python's lock" in message


def test_last_collectives_of_a_process_that_waits(pair: Pair) -> None:
    found, _ = pair.run(asked)
    assert re.search(rf"^rank 0 is at {LINE} in asked; its last collectives:\n", found)
    assert re.search(rf"\nrank 1 is at {LINE} in asked; its last collectives:\n", found)
