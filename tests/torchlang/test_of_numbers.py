"""The functions of torch with two numbers (sizes), and with sizes that are 0-d tensors."""

from collections.abc import Callable

import numpy
import pytest
import torch

import forge

PROGRAMS: dict[str, Callable] = {
    "a size by two": lambda x: x + torch.div(x.shape[0], 2, rounding_mode="floor"),
    "towards zero": lambda x: x + torch.div(-x.shape[1], 2, rounding_mode="trunc"),
    "floor_divide": lambda x: x * torch.floor_divide(x.shape[0], 2),
    "a sum and a true division": lambda x: x * torch.add(x.shape[0], x.shape[1]) + torch.true_divide(x.shape[1], 2),
    "a product and a difference": lambda x: x * torch.mul(x.shape[0], 0.5) - torch.sub(x.shape[1], 1),
    "a size of a view": lambda x: x.view(torch.div(x.shape[0], 2, rounding_mode="floor"), 2, -1) * 2,
    "a view that is returned": lambda x: x.reshape(torch.div(x.shape[0], 2, rounding_mode="floor"), 2, -1),
    "a size less one": lambda x: x.new_ones(torch.div(x.shape[0], 2, rounding_mode="trunc") - 1, 3) * x.sum(),
}


@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_torch_functions_of_sizes_are_eagers(name: str, dynamic: bool | None) -> None:
    function = PROGRAMS[name]
    jitted = forge.jit(function, dynamic=dynamic)
    for shape in ((4, 3), (6, 5)):
        x = torch.randn(shape, requires_grad=True)
        ours, eager = jitted(x), function(x)
        torch.testing.assert_close(ours, eager)
        torch.testing.assert_close(*[torch.autograd.grad(y.sum(), x) for y in (ours, eager)])
    torch._dynamo.reset()


def changed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    own = torch.tensor(x * 2)
    own.add_(1)
    return own, x * own


COPIES: dict[str, Callable] = {
    "a copy": lambda x: torch.tensor(x) * x,
    "a copy of another dtype": lambda x: (torch.tensor(x, dtype=torch.bool), torch.tensor(x > 0, dtype=x.dtype) * x),
    "a copy of a transpose": lambda x: torch.tensor(x.t(), dtype=torch.float64),
    "a copy of another's dtype": lambda x: (x.new_tensor(x.long()) * x, x.long().new_tensor(x * 3)),
    "a copy that is written to": changed,
    "a list": lambda x: torch.tensor([x.sum(), x[0, 1] * 2]) + x[0, :2],
    "a list with numbers": lambda x: torch.tensor([[x.sum(), 2], [3, x.shape[0]]]) * x.sum(),
    "a list of several dtypes": lambda x: (
        torch.tensor([x.long().sum(), 2.5, True]),
        torch.as_tensor([x.sum() > 0, 1]),
    ),
    "a list of one element each": lambda x: (torch.tensor([x[:1, 0], x[0, :1]]), x.new_tensor([x[:1, :1], 1])),
}


@pytest.mark.filterwarnings("ignore:To copy construct", "ignore:Converting a tensor")
@pytest.mark.parametrize("name", COPIES)
def test_a_tensor_of_tensors_is_in_the_graph_and_has_no_history(name: str) -> None:
    function = COPIES[name]
    jitted = forge.jit(function, executors=["torch"])
    for shape in ((4, 3), (6, 5)):
        x = torch.randn(shape, requires_grad=True)
        ours, eager = ([each] if isinstance(each, torch.Tensor) else each for each in (jitted(x), function(x)))
        for one, other in zip(ours, eager, strict=True):
            torch.testing.assert_close(one, other)
            assert one.stride() == other.stride() and one.requires_grad == other.requires_grad
            if other.requires_grad:
                torch.testing.assert_close(*[torch.autograd.grad(y.sum(), x) for y in (one, other)])
    told = forge.explain(jitted)
    assert told.opaque_calls == told.eager == told.graph_breaks == []
    torch._dynamo.reset()


def written(x: torch.Tensor) -> torch.Tensor:
    added = torch.from_numpy(numpy.zeros(3, dtype=numpy.float32))
    added += x[0]
    return added * 2


OF_NUMPY: dict[str, Callable] = {
    "a product": lambda x: x * numpy.prod([2, 3]),
    "a range": lambda x: x + torch.tensor(numpy.arange(3)),
    "a line": lambda x: x * torch.as_tensor(numpy.linspace(0, 1, 3), dtype=x.dtype),
    "a matrix": lambda x: x @ torch.from_numpy(numpy.eye(3, dtype=numpy.float32)),
    "a mean": lambda x: x * numpy.mean([1.0, 4.0]),
    "infinities": lambda x: torch.minimum(x, torch.from_numpy(numpy.full(3, numpy.inf, dtype=numpy.float32))),
    "zeros that are written to": written,
}


@pytest.mark.parametrize("name", OF_NUMPY)
def test_what_numpy_makes_of_constants_is_a_constant_of_the_graph(name: str) -> None:
    function = OF_NUMPY[name]
    jitted = forge.jit(function, executors=["torch"])
    for rows in (4, 4, 6):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(jitted(x), function(x))
    told = forge.explain(jitted)
    assert told.opaque_calls == told.eager == told.graph_breaks == []
    torch._dynamo.reset()


def test_what_numpy_makes_of_sizes_that_change_or_of_many_numbers_is_eagers() -> None:
    functions = (
        lambda x: x * torch.from_numpy(numpy.arange(x.shape[0])) + numpy.prod(x.shape),
        lambda x: x.sum() + torch.from_numpy(numpy.arange(100)),
    )
    for function in functions:
        jitted = forge.jit(function, executors=["torch"])
        for length in (4, 6, 8):
            x = torch.randn(length)
            torch.testing.assert_close(jitted(x), function(x), check_dtype=False)
        torch._dynamo.reset()
