"""as_strided, unfold and views of another dtype of inputs with a storage offset, and writes through them, in the
default configuration: one compiled function is called with inputs at several offsets."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import forge


def through(show: Callable, write: Callable) -> Callable:
    """Return a program that writes through a view and returns the changed input."""

    def program(x: torch.Tensor) -> tuple:
        write(show(x))
        return x * 1, x

    return program


READ: dict[str, Callable] = {
    "from the start of the memory": lambda x: ((x.as_strided((2, 2), (2, 1), 1) * 2 + 1).sigmoid(), x.sin() * 2),
    "a copy": lambda x: torch.as_strided_copy(x, (2, 2), (1, 2), 1).exp() + 1,
    "of a view": lambda x: x[1:].as_strided((2, 2), (1, 2), 3) * x[0, 0],
    "transposed": lambda x: x.as_strided((2, 2), (2, 1), 4).t().exp() + 1,
    "from the input on": lambda x: x.t().as_strided((2, 2), (1, 2)).cos() * 2,
    "windows": lambda x: (x.view(-1).unfold(0, 3, 2), x.unfold(1, 2, 2).sin() * 2),
    "integers": lambda x: (x.view(torch.int32).as_strided((2,), (1,), 5) + 1, x.view(torch.int16)),
    "halves": lambda x: x.view(torch.int16).as_strided((2, 2), (1, 2), 9) * 2 + 1,
    "a view of halves": lambda x: x.view(torch.int16).as_strided((2, 2), (1, 2), 1),
    "complex": lambda x: (torch.view_as_complex(x.view(-1, 2)) * 2j, torch.view_as_complex(x.view(-1, 2))),
}
WRITTEN: dict[str, Callable] = {
    "from the start of the memory": through(lambda x: x.as_strided((2,), (1,), 4), lambda v: v.mul_(3)),
    "of a view": through(lambda x: x[1:].as_strided((2,), (1,), 4), lambda v: v.mul_(3)),
    "of a row of a transpose": through(lambda x: x.t().split(1)[1].as_strided((2,), (1,)), lambda v: v.mul_(3)),
    "of what is detached": through(lambda x: x.detach()[1:].as_strided((2,), (1,), 4), lambda v: v.mul_(3)),
    "from the input on": through(lambda x: x.as_strided((2, 2), (1, 2)), lambda v: v.mul_(3)),
    "a window": through(lambda x: x.view(-1).unfold(0, 2, 3)[1], lambda v: v.add_(3)),
    "integers": through(lambda x: x.view(torch.int32), lambda v: v.bitwise_and_(-65536)),
    "halves": through(lambda x: x.view(torch.int16).as_strided((2,), (2,), 12), lambda v: v.zero_()),
    "complex": through(lambda x: torch.view_as_complex(x.view(-1, 2)), lambda v: v.mul_(2j)),
}


def observed(program: Callable, start: int, requires_grad: bool) -> Any:
    memory = torch.arange(1.0, 25.0, requires_grad=requires_grad)
    x = (memory * 1 if requires_grad else memory)[start : start + 8].view(2, 4)
    try:
        results = tree_leaves(program(x))
    except RuntimeError as error:
        return type(error)
    flowing = [each for each in results if each.requires_grad]
    gradient = None
    if flowing:
        total = sum((each.abs() * torch.arange(each.numel()).view(each.shape)).sum() for each in flowing)
        (gradient,) = torch.autograd.grad(total, memory)
    places = [(each.data_ptr() - x.data_ptr(), each.stride()) for each in results if each._is_view()]
    return [each.detach().resolve_conj().clone() for each in results], memory.detach(), places, gradient


@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    "program", [*READ.values(), *WRITTEN.values()], ids=[*READ, *(f"written {name}" for name in WRITTEN)]
)
def test_an_input_may_begin_anywhere_in_its_memory(program: Callable, requires_grad: bool) -> None:
    jitted = forge.jit(program)
    for start in (0, 4, 2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = observed(jitted, start, requires_grad)
        expected = observed(program, start, requires_grad)
        assert isinstance(found, type) == isinstance(expected, type), (found, expected)
        if not isinstance(found, type):
            torch.testing.assert_close(found, expected)


RANDOM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rrelu in training": lambda x: torch.rrelu(x, 0.1, 0.3, True),
    "rrelu in evaluation": lambda x: torch.rrelu(x, 0.1, 0.3, False),
    "normal": lambda x: torch.normal(x, x.abs()),
    "poisson": lambda x: torch.poisson(x.abs() * 5),
}


@pytest.mark.usefixtures("compiled_regions")
@pytest.mark.parametrize("name", RANDOM)
def test_a_region_reads_a_result_as_it_lies_in_memory(name: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return RANDOM[name](x.t()).sin() * 2

    x, found = torch.randn(5, 7), []
    for call in (program, forge.jit(program)):
        torch.manual_seed(1)
        found.append(call(x))
    torch.testing.assert_close(found[1], found[0])
    assert found[1].stride() == found[0].stride()


@pytest.mark.parametrize(
    "view",
    [lambda x: x.flatten()[:2], lambda x: x[0, :2], lambda x: x.view(-1)[1::2], lambda x: x[:, 1]],
    ids=["the first elements", "a row's", "every other", "a column"],
)
def test_a_backward_reads_a_copy_of_a_view_with_gaps(view: Callable) -> None:
    """A small part of an input is copied for the backward; the copy has no gaps."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.outer((y * 4).flatten()[:3], view(x))
        return out * out

    x, y = torch.randn(2, 6)[..., ::2].detach().requires_grad_(), torch.randn(2, 3)
    found = [torch.autograd.grad(run(x, y).sum(), x) for run in (function, forge.jit(function))]
    torch.testing.assert_close(*found)


AS_IT_IS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nn.Dropout in evaluation": nn.Dropout().eval(),
    "torch.dropout in evaluation": lambda x: torch.dropout(x, 0.5, False),
    "dropout of no probability": lambda x: F.dropout(x, 0.0, True),
}


@pytest.mark.usefixtures("compiled_regions")
@pytest.mark.parametrize("name", AS_IT_IS)
def test_what_an_input_is_returned_as_lies_where_the_input_does(name: str) -> None:
    """torch's function for fake tensors returns a copy, in row-major order and without an offset."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept = AS_IT_IS[name](x)
        return (kept * 2 + 1).exp(), kept.sin().sum(0) * 3, kept.as_strided((2,), (1,)) + 1

    jitted = forge.jit(program)
    for length in (3, 4, 5):
        memory = torch.randn(length, 4, 6)
        for x in (memory[:, 1:, ::2], memory[1:, :1].expand(-1, 4, -1), memory.permute(2, 0, 1)[1:]):
            torch.testing.assert_close(jitted(x), program(x))


def test_what_a_turned_index_reads_lies_as_in_eager() -> None:
    """The order of an index of symbolic sizes is that of its result, unlike with torch's fake tensors."""

    def read(x: torch.Tensor) -> torch.Tensor:
        return x[x.clamp(0, x.shape[0] - 1).long()]

    jitted = forge.jit(read)
    for rows in (2, 5, 4):
        x = torch.randn(3, rows).mT
        actual, expected = jitted(x), read(x)
        assert actual.stride() == expected.stride()
        torch.testing.assert_close(actual, expected)
