"""Arguments and results that the caller changes before the backward, in the default configuration.

If eager accepts the change, so does forge, with eager's gradients. If eager raises because its backward would read the
changed values, forge raises, or computes the gradients of the forward's values.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
from forge.runtime import autograd

PROGRAMS: dict[str, Callable] = {
    "views of an argument": lambda x, w: (x.t(), x[1:], x.sin() * w[0, 0]),
    "an argument and its function": lambda x, w: (x, torch.tanh(x), x.view(2, 12)),
    "a value and its view": lambda x, w: (y := (x @ w).sigmoid(), y.t(), y[0]),
    "a value and a function of its view": lambda x, w: (y := x @ w, y.view(-1) ** 2),
    "a view and a function of it": lambda x, w: (v := x.t(), v * v),
    "chunks of a value": lambda x, w: (x + 1).exp().chunk(2),
    "functions that save their result": lambda x, w: (y := F.softmax(x @ w, -1), y.log(), x.exp()),
    "functions that save their argument": lambda x, w: (x.cos(), F.gelu(x), x * w.sum()),
    "functions that save nothing": lambda x, w: (x * 2, x.t() + w.sum(), x.sum()),
    "normalized": lambda x, w: (y := F.layer_norm(x, (6,)), y.view(-1), F.silu(y)),
    "expanded": lambda x, w: (y := x.sum(0), y.expand(4, 6), y.unsqueeze(0) * x),
    "a quotient": lambda x, w: (x / w[0], x @ w / (x + 1), w.reciprocal()),
    "written through a view": lambda x, w: (y := x * 1, y[0].mul_(2), y.t()),
    "a loss": lambda x, w: (y := x @ w, F.mse_loss(y, x)),
    "detached": lambda x, w: (y := x.sin(), y.detach(), y.view(-1)),
}


def in_place(x: torch.Tensor) -> None:
    x.mul_(2)


def without_grad(x: torch.Tensor) -> None:
    with torch.no_grad():
        x.add_(1)


def of_a_part(x: torch.Tensor) -> None:
    (x[0] if x.ndim else x).add_(1)


def through_detach(x: torch.Tensor) -> None:
    x.detach().neg_()


CHANGES = (in_place, without_grad, of_a_part, through_detach)


def cases() -> Iterator[tuple[Callable, int, tuple[int, ...]]]:
    """Return (change, index of the changed value, results with an incoming gradient) for each case."""
    return itertools.product(CHANGES, range(5), ((0,), (1,), (0, 1, 2)))


def observed(
    function: Callable, leaf: bool, change: Callable, place: int, used: tuple[int, ...], *, apart: bool = False
) -> Any:
    """Return the results, the arguments, their versions and the gradients, or the error. apart: whether clones are
    changed."""
    torch.manual_seed(0)
    leaves = [torch.rand(4, 6).add(0.5).requires_grad_(), torch.rand(6, 6).add(0.5).requires_grad_()]
    x, w = leaves if leaf else [each * 1 for each in leaves]
    try:
        results = function(x, w)
        if apart:
            if any(each._is_view() for each in results):
                return None
            results = [each.clone() for each in results]
        tensors = [*results, x, w]
        if place >= len(tensors):
            return None
        change(tensors[place])
        wanted = [results[i] for i in used if i < len(results) and results[i].requires_grad]
        if not wanted:
            return None
        weights = [torch.linspace(1, 2, each.numel()).view(each.shape) for each in wanted]
        total = sum((weight * each).sum() for weight, each in zip(weights, wanted, strict=True))
        gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    except RuntimeError as error:
        return str(error)
    seen = [each.detach().clone() for each in tensors]
    return seen, [each.requires_grad for each in tensors], [x._version, w._version], gradients


@pytest.mark.parametrize("leaf", [False, True], ids=["values", "leaves"])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.one_in(4)
def test_a_change_is_as_in_eager(name: str, leaf: bool) -> None:
    function = PROGRAMS[name]
    jitted = forge.jit(function)
    for case in cases():
        expected, found = observed(function, leaf, *case), observed(jitted, leaf, *case)
        if not isinstance(expected, str):
            assert not isinstance(found, str), (case, found)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        elif not isinstance(found, str):
            unread = observed(function, leaf, *case, apart=True)
            if isinstance(unread, tuple):
                torch.testing.assert_close(found[-1], unread[-1], rtol=1e-4, atol=1e-4)


def test_a_torch_that_unpacks_all_saved_tensors_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd, "_UNPACKS_EACH", False)  # as before torch 2.13
    jitted = forge.jit(lambda x, w: (x.sin() * w, w * w))
    x, w = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
    first, second = jitted(x, w)
    without_grad(x)
    torch.testing.assert_close(torch.autograd.grad(second.sum(), w, retain_graph=True)[0], 2 * w)
    torch.testing.assert_close(torch.autograd.grad(second.sum(), w, retain_graph=True)[0], 2 * w)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward(retain_graph=True)
    without_grad(w)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.sum().backward()
