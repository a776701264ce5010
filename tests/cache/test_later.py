"""What a program from the disk compiles when it is first needed."""

from collections.abc import Callable

import pytest
import torch

import forge

PROGRAMS: dict[str, tuple[Callable, Callable]] = {
    "sinh": (lambda x: (x.sum(), x.sinh()), torch.cosh),
    "a length": (lambda x: (x.sum(), x.sin() * x.shape[0]), lambda x: x.cos() * x.shape[0]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_other_backwards_of_a_program_with_symbolic_sizes_are_right_at_every_size(name: str) -> None:
    function, slope = PROGRAMS[name]
    for turn in range(2):
        torch._dynamo.reset()
        jitted = forge.jit(function, executors=["torch"], dynamic=True)
        for size in (8, 9):
            x = torch.randn(size, requires_grad=True)
            torch.testing.assert_close(torch.autograd.grad(jitted(x)[1].sum(), x)[0], slope(x))
            (again,) = torch.autograd.grad(jitted(x)[1].sum(), x, create_graph=True)
            torch.testing.assert_close(again, slope(x))
        assert forge.explain(jitted).cached == turn
