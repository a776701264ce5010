"""Regions that write to the memory of products that nothing reads after them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import forge
from forge.compiler import donation
from forge.executors.inductorex import lower

W = torch.randn(6, 6)


@pytest.fixture
def donated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The positions of the donated inputs of each region that is compiled."""
    seen: list[tuple[int, ...]] = []
    of = donation.Donations.of

    def note(*args: Any) -> tuple[int, ...]:
        seen.append(of(*args))
        return seen[-1]

    monkeypatch.setattr(donation.Donations, "of", note)
    yield seen


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.relu(self.inner(self.norm(x))))


def test_a_step_with_donated_memory_is_eagers(donated: list[tuple[int, ...]]) -> None:
    model = nn.Sequential(*[Block() for _ in range(3)])
    jitted = forge.jit(model, cache=False)
    for rows in (16, 16, 24, 5):
        x = torch.randn(rows, 8, requires_grad=True)
        weights = [x, *model.parameters()]
        losses = jitted(x).square().sum(), model(x).square().sum()
        for _ in range(2):  # what a backward reads was not written to
            found, wanted = (torch.autograd.grad(loss, weights, retain_graph=True) for loss in losses)
            torch.testing.assert_close(found, wanted)
    assert any(donated)


def test_a_region_writes_to_the_memory_of_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[str] = []
    compile_graph = lower.compile_graph

    def note(*args: Any, **options: Any) -> Any:
        compiled = compile_graph(*args, **options)
        codes.append(compiled.source_code)
        return compiled

    monkeypatch.setattr(lower, "compile_graph", note)
    x = torch.randn(64, 64)
    jitted = forge.jit(lambda x: torch.sigmoid(x @ x) * 3 - 1, cache=False)
    torch.testing.assert_close(jitted(x), torch.sigmoid(x @ x) * 3 - 1)
    assert ["in_out_ptr" in code for code in codes] == [True]


OWNED: dict[str, Callable[[torch.Tensor], Any]] = {
    "a product": lambda x: torch.tanh(x @ W) + 1,
    "a product as a vector": lambda x: torch.tanh((x @ W).view(-1)) + 1,
    "a transposed product": lambda x: torch.tanh((x @ W).T) + 1,
    "of which a region makes more": lambda x: torch.tanh((x @ W)[:, None].expand(6, 3, 6)) + 1,
    "of which a region reads a part": lambda x: torch.tanh((x @ W)[1:]) + 1,
    "read by a product before": lambda x: torch.tanh((y := x @ W) + (y @ W).mean()) + 1,
}
SHARED: dict[str, Callable[[torch.Tensor], Any]] = {
    "an input": lambda x: torch.tanh(x) + 1,
    "a result": lambda x: ((y := x @ W), torch.tanh(y) + 1),
    "a view of a result": lambda x: ((y := x @ W)[0], torch.tanh(y) + 1),
    "read by a product after": lambda x: (y := x @ W) @ (torch.tanh(y) + 1),
    "a view that a product reads": lambda x: (y := x @ W).T @ (torch.tanh(y) + 1),
    "two views": lambda x: torch.tanh(y := x @ W) + y.flip(0) * y.T,
}


@pytest.mark.parametrize("name", OWNED)
def test_memory_that_dies_is_donated(name: str, donated: list[tuple[int, ...]]) -> None:
    x = torch.randn(6, 6)
    torch.testing.assert_close(forge.jit(OWNED[name], cache=False)(x), OWNED[name](x))
    assert any(donated)


@pytest.mark.parametrize("name", SHARED)
def test_memory_that_is_read_again_is_not_overwritten(name: str, donated: list[tuple[int, ...]]) -> None:
    x = torch.randn(6, 6)
    before = x.clone()
    jitted = forge.jit(SHARED[name], cache=False)
    for _ in range(2):
        torch.testing.assert_close(jitted(x), SHARED[name](x))
    assert torch.equal(x, before)
    if name != "two views":  # which one region reads, as one input
        assert donated and not any(donated)


def test_values_that_are_compared_with_eagers_are_not_donated(donated: list[tuple[int, ...]]) -> None:
    x = torch.randn(6, 6)
    torch.testing.assert_close(forge.jit(OWNED["a product"], check="eager")(x), OWNED["a product"](x))
    assert not any(donated)
