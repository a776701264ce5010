"""Functions under torch.vmap and torch.func transforms may change their arguments, or return views of them."""

from collections.abc import Callable

import pytest
import torch
from torch import func

import forge


def added(y: torch.Tensor) -> torch.Tensor:
    return y.add_(1)


def set_items(y: torch.Tensor) -> torch.Tensor:
    y[0] = 2
    y[1:] *= 3
    return y.sin()


def first(y: torch.Tensor) -> torch.Tensor:
    return y[:2]


def with_captured(x: torch.Tensor) -> torch.Tensor:
    total = x * 1

    def inside(y: torch.Tensor) -> torch.Tensor:
        total.add_(1)
        return y * 2

    return func.vmap(inside)(x) + total


def changed_and_read(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = torch.vmap(added)(y)
    z.mul_(3)
    return y + z


def changed_part(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    torch.vmap(set_items)(y[1:])
    return y


def gradient(x: torch.Tensor) -> torch.Tensor:
    def loss(w: torch.Tensor) -> torch.Tensor:
        w = w * 2
        w[0] = 3
        return w.mul_(5).square().sum()

    return func.grad(loss)(x)


FUNCTIONS: dict[str, Callable] = {
    "a value of the program": lambda x: torch.vmap(added)(x * 2),
    "an input": lambda x: torch.vmap(added)(x),
    "items": lambda x: torch.vmap(set_items)(x * 1),
    "another dim": lambda x: torch.vmap(added, in_dims=1, out_dims=1)(x * 1),
    "a captured tensor": with_captured,
    "what is read again": changed_and_read,
    "a part": changed_part,
    "in a gradient": gradient,
    "a view of a value": lambda x: torch.vmap(first)(x * 2).mul_(3),
    "a view of an input": lambda x: torch.vmap(first)(x),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.one_in(2)
def test_a_transformed_function_may_work_in_place(name: str, grad: bool) -> None:
    if grad and name == "an input":
        pytest.skip("torch refuses to change a leaf")
    function = FUNCTIONS[name]
    jitted = forge.jit(function, fullgraph=True)
    found = []
    for run in (jitted, function):
        x = torch.arange(6.0).view(2, 3).requires_grad_(grad)
        result = run(x)
        gradients = torch.autograd.grad(result.square().sum(), x) if grad else ()
        shares = result.untyped_storage()._cdata == x.untyped_storage()._cdata
        found.append((result.detach().clone(), x.detach().clone(), gradients, shares))
    torch.testing.assert_close(*found)
    explained = forge.explain(jitted)
    assert (explained.graphs, explained.eager, explained.opaque_calls) == (1, [], [])


def test_a_random_function_that_works_in_place_is_one_opaque_call() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return torch.vmap(lambda row: row.add_(torch.rand(3)), randomness="different")(y) + y

    jitted = forge.jit(function, fullgraph=True)
    found = []
    for run in (jitted, function):
        torch.manual_seed(0)
        found.append(run(torch.ones(2, 3)))
    torch.testing.assert_close(*found)
    assert forge.explain(jitted).opaque_calls
