"""Branches on random numbers that are the same for all draws, such as layers dropped at random in speech models."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import forge

COMPARISONS: list[tuple[Callable, bool]] = [
    (lambda draw: draw < 0.0, True),
    (lambda draw: draw >= 0.0, True),
    (lambda draw: draw < 1.0, True),
    (lambda draw: draw > -1, True),
    (lambda draw: draw < 1.0, True),
    (lambda draw: draw <= 0.0, False),
    (lambda draw: draw > 0.0, False),
    (lambda draw: draw < 0.5, False),
]


class Dropping(nn.Module):
    """A stack of linear layers that are dropped with a probability in training."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.training and torch.rand([]) < self.probability:
                continue
            x = layer(x)
        return x


@pytest.mark.parametrize("probability", [0.0, 1.0, 0.5])
def test_layers_are_dropped_as_in_eager(probability: float) -> None:
    module, x = Dropping(probability), torch.ones(2, 4)
    jitted = forge.jit(module, executors=["torch"])
    for seed in range(4):
        torch.manual_seed(seed)
        found, drawn_later = jitted(x), torch.rand(3)
        torch.manual_seed(seed)
        torch.testing.assert_close(found, module(x))
        assert torch.equal(drawn_later, torch.rand(3))  # as many numbers were drawn
    assert (not forge.explain(jitted).graph_breaks) is (probability != 0.5)


def test_a_changed_probability_is_seen() -> None:
    module, x = Dropping(0.0), torch.ones(2, 4)
    jitted = forge.jit(module, executors=["torch"])
    torch.testing.assert_close(jitted(x), module(x))
    module.probability = 1.0
    torch.testing.assert_close(jitted(x), x)


@pytest.mark.parametrize(("compare", "is_decided"), COMPARISONS)
def test_a_branch_is_decided_only_where_all_draws_agree(compare: Callable, is_decided: bool) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if compare(torch.rand([])) else x - 1

    jitted, x = forge.jit(program, executors=["torch"]), torch.ones(3)
    for seed in range(4):
        torch.manual_seed(seed)
        found = jitted(x)
        torch.manual_seed(seed)
        assert torch.equal(found, program(x))
    assert (not forge.explain(jitted).graph_breaks) is is_decided


def test_a_comparison_that_is_no_branch_stays_a_tensor() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        never = torch.rand([]) < 0.0
        y = x * 2 if never else x - 1
        return torch.where(never, y, x) + never.float()

    jitted, x = forge.jit(program, executors=["torch"], fullgraph=True), torch.ones(3)
    assert torch.equal(jitted(x), program(x))
