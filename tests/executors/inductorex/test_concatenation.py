"""A concatenation that a region returns is written part by part if its parts read the same memory.

Inductor does so on a CPU anyway: here it is configured as for a GPU.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge.torch_internals.inductor import concatenation
from forge.torch_internals.inductor.concatenation import write_parts
from forge.torch_internals.inductor.config import inductor_config

pytestmark = pytest.mark.usefixtures("compiled_regions")


@pytest.fixture(autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    with inductor_config.patch(force_pointwise_cat=True):
        yield


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the numbers of parts of the concatenations that are computed as one kernel."""
    seen: list[int] = []

    def count(inputs: Any, dim: int = 0) -> Any:
        seen.append(len(inputs))
        return original(inputs, dim)

    original = write_parts.original
    monkeypatch.setattr(write_parts, "original", count)
    return seen


def run(function: Callable, *inputs: torch.Tensor) -> None:
    actual, expected = forge.jit(function, cache=False)(*inputs), function(*inputs)
    torch.testing.assert_close(actual, expected)


def halves(x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = x.chunk(2, -1)
    gate = F.gelu(a)
    return torch.cat([g * b * a.cos(), g * gate], -1), gate * b


def transposed(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return halves(x, g)[0].transpose(0, 1)


def read_on(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return halves(x, g)[0].sin()


def apart(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return torch.cat([g.sin(), x[:, :24].cos()], -1)


def unequal(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.sin(), x[:, :24].cos()], -1)


@pytest.mark.parametrize("function", [halves, transposed])
@pytest.mark.one_in(2)
def test_parts_that_read_the_same_memory_are_written_apart(function: Callable, whole: list[int]) -> None:
    run(function, torch.randn(40, 48), torch.randn(40, 24))
    assert not whole


@pytest.mark.parametrize("function", [read_on, apart, unequal])
@pytest.mark.one_in(2)
def test_others_are_computed_as_a_whole(function: Callable, whole: list[int]) -> None:
    run(function, torch.randn(40, 48), torch.randn(40, 24))
    assert whole == [2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.one_in(2)
def test_the_gradient_of_a_gated_layer(dtype: torch.dtype, whole: list[int]) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(16, 64), nn.Linear(32, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate, up = self.into(x).chunk(2, -1)
            return self.out(F.silu(gate) * up)

    torch.manual_seed(0)
    module, x = Gated().to(dtype), torch.randn(40, 16, dtype=dtype)
    gradients = []
    for each in (module, forge.jit(module, cache=False)):
        each(x).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in module.parameters()])
        module.zero_grad()
    torch.testing.assert_close(*gradients, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=2e-2)
    assert not whole
    assert concatenation.write_parts.inside == 0


def resized(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cat([F.interpolate(each, size=(6, 6), mode="bilinear") for each in (x, y)], 1)


def resized_and_read(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return resized(x, y).sin()


@pytest.mark.parametrize("function", [resized, resized_and_read])
def test_parts_that_are_long_to_compute_are_written_apart(function: Callable, whole: list[int]) -> None:
    run(function, torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 3))
    assert not whole
