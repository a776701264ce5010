"""Operations of a training loop on a sharded model besides a step."""

import torch
from training_programs import averaged, penalized, products
from two_processes import Pair


def test_a_parameter_is_transposed_when_it_is_there(pair: Pair) -> None:
    """A view of a parameter is not part of the message that gathers it: nothing would order it after the wait."""
    for found in pair.run(products):
        torch.testing.assert_close(found["forge"], found["fsdp2"], rtol=1e-4, atol=1e-5)


def test_a_gradient_has_a_gradient(pair: Pair) -> None:
    for found in pair.run(penalized):
        torch.testing.assert_close(found["forge"], found["plain"], rtol=1e-4, atol=1e-5)


def test_an_average_of_a_model_is_a_model(pair: Pair) -> None:
    """A copy gathers during its own forward, in eager and between graphs, too."""
    for found in pair.run(averaged):
        torch.testing.assert_close(found["eager"], found["plain"])
        torch.testing.assert_close(found["forge"], found["plain"])
