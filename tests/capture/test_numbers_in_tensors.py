"""NumPy numbers and 0-d tensors that torch's functions take as lengths, dims and indices."""

from collections.abc import Callable

import numpy
import pytest
import torch
import torch.nn.functional as F

import forge

TAKE_A_NUMBER: dict[str, Callable] = {
    "full": lambda x, n: torch.full((2, n), 2.0) + x.sum(),
    "full of one dim": lambda x, n: torch.full((n,), 1),
    "new_full": lambda x, n: x.new_full((2, n), 1.0),
    "zeros by name": lambda x, n: torch.zeros(size=(n, 2)),
    "ones": lambda x, n: torch.ones((n, n)),
    "rand": lambda x, n: torch.rand(2, n) * 0,
    "randint": lambda x, n: torch.randint(0, 1, (2, n)),
    "empty_strided": lambda x, n: torch.empty_strided((2, n), (n, 1)).zero_(),
    "eye": lambda x, n: torch.eye(2, n),
    "arange": lambda x, n: torch.arange(0, n, 1),
    "linspace": lambda x, n: torch.linspace(0, 1, n),
    "repeat": lambda x, n: x.repeat(1, n),
    "tile": lambda x, n: x.tile((1, n)),
    "view": lambda x, n: x.repeat(1, 3).view(n, -1),
    "unflatten": lambda x, n: x.repeat(1, 3).unflatten(1, (n, -1)),
    "expand": lambda x, n: torch.broadcast_to(x[0], (n, 8)) + x[0].expand(n, 8),
    "split": lambda x, n: x.split([n, 8 - n], 1),
    "chunk": lambda x, n: x.chunk(n, 1),
    "narrow": lambda x, n: (x.narrow(1, 0, n), x.narrow(1, n, 2)),
    "select": lambda x, n: x.select(1, n),
    "diagonal": lambda x, n: x.diagonal(n),
    "unfold": lambda x, n: x.unfold(1, n, 1),
    "pad": lambda x, n: F.pad(x, (0, n)),
    "roll": lambda x, n: torch.roll(x, shifts=(n,), dims=(1,)),
    "rot90": lambda x, n: torch.rot90(x, n),
    "sum": lambda x, n: x.sum(dim=(n - 2)),
    "topk": lambda x, n: x.topk(n, 1),
    "one_hot": lambda x, n: F.one_hot(torch.arange(2), n),
    "interpolate": lambda x, n: F.interpolate(x[None], size=(n,)),
    "adaptive_avg_pool1d": lambda x, n: F.adaptive_avg_pool1d(x, n),
    "max_pool1d": lambda x, n: F.max_pool1d(x, n),
    "layer_norm": lambda x, n: F.layer_norm(x.repeat(1, 3)[:, :3], (n,)),
}
NUMBERS: dict[str, Callable] = {"of NumPy": lambda: numpy.lcm(3, 1), "a tensor": lambda: torch.tensor(3)}


@pytest.mark.parametrize("name", TAKE_A_NUMBER)
@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.one_in(4)
def test_a_known_number_is_read(name: str, kind: str) -> None:
    run, make = TAKE_A_NUMBER[name], NUMBERS[kind]

    def with_number(x: torch.Tensor) -> object:
        return run(x, make())

    jitted = forge.jit(with_number, executors=["torch"], fullgraph=True)
    x = torch.randn(2, 8)
    torch.testing.assert_close(jitted(x), with_number(x), rtol=0, atol=0)
    told = forge.explain(jitted)
    assert (told.graphs, told.opaque_calls, told.eager) == (1, [], [])


@pytest.mark.parametrize(
    "change",
    [
        lambda n: n.add_(1),
        lambda n: n.view(1).add_(1),
        lambda n: n.__setitem__(..., 4),
        lambda n: torch.add(n, 1, out=n),
    ],
    ids=["in place", "through a view", "by an assignment", "as a result"],
)
def test_a_number_that_changes_is_read_where_it_is_used(change: Callable) -> None:
    """Dynamo keeps only the last value of a tensor."""

    def parts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n = torch.tensor(3)
        before = x.narrow(1, n, 2), torch.full((2, n), 2.0)
        change(n)
        return *before, x.narrow(1, n, 2), torch.full((2, n), 2.0)

    x = torch.randn(2, 8)
    torch.testing.assert_close(forge.jit(parts, executors=["torch"])(x), parts(x), rtol=0, atol=0)


def test_arithmetic_of_numpy_on_lengths() -> None:
    """Reformer pads to the least common multiple of its chunks in this way."""

    def padded(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        multiple = numpy.lcm(4, 6)
        missing = multiple - x.shape[-1] % multiple
        rows = int(numpy.ceil(x.shape[-1] / 3))
        return torch.cat([x, torch.full((x.shape[0], missing), 0.5)], -1), torch.zeros(rows, 2)

    jitted = forge.jit(padded, executors=["torch"], dynamic=False)
    for length in (8, 10, 13):
        x = torch.randn(2, length)
        torch.testing.assert_close(jitted(x), padded(x))
    assert not forge.explain(jitted).eager and not forge.explain(jitted).graph_breaks
