"""Samples of torch.distributions that one operator of torch draws."""

from collections.abc import Callable

import pytest
import torch
from torch.distributions import Beta, Dirichlet, Gamma

import forge
from tests.seeding import seed


@pytest.mark.parametrize("samples_of", [lambda a: Gamma(a, 2.0), lambda a: Beta(a, 3.0), Dirichlet])
def test_samples_are_no_opaque_calls(samples_of: Callable) -> None:
    """Values and gradients are eager's."""

    def program(concentration: torch.Tensor) -> torch.Tensor:
        return samples_of(concentration).rsample() * torch.arange(3)

    concentration = torch.tensor([0.5, 2.0, 7.0], requires_grad=True)
    jitted = forge.jit(program, executors=["torch"])
    results = []
    for function in (program, jitted):
        seed(1)
        result = function(concentration)
        results.append([result, *torch.autograd.grad(result.sum(), concentration)])
    torch.testing.assert_close(results[1], results[0])
    explained = forge.explain(jitted)
    assert (explained.opaque_calls, explained.eager, explained.graph_breaks) == ([], [], [])
