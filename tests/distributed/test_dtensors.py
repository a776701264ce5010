"""Programs on DTensors are programs of local calls and collectives, whatever DTensors do for a function."""

import pytest
import torch
from dtensor_programs import FUNCTIONS, of_dtensors
from two_processes import Pair


@pytest.mark.parametrize("what", FUNCTIONS)
def test_functions_of_dtensors_are_local_calls_and_collectives(what: str, pair: Pair) -> None:
    for found in pair.run(of_dtensors, what):
        assert found["broken"] == [] and found["opaque"] == []
        assert found["placed"] == found["expected"]
        torch.testing.assert_close(found["forge"], found["eager"])
