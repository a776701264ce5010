"""Gradients of extrema in fused programs: equal values share them, or the first one takes all, as in eager.

An extremum equals one of its inputs. Code in another region or loop may recompute them with another rounding, and would
find no equal value.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import forge
from forge.torch_internals.versions import TORCH

pytestmark = pytest.mark.usefixtures("compiled_regions")


def gradients(function: Callable, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result and the gradient with respect to an input, with different weights for the elements of the
    result."""
    x = x.clone().requires_grad_()
    out = function(x)
    weights = torch.linspace(1, 2, out.numel()).view(out.shape).to(out.dtype)
    return out.detach(), torch.autograd.grad((out * weights).sum(), x)[0]


SHARED = {
    "amax": lambda x: x.amax(1),
    "amin of two dims": lambda x: x.amin((0, 2)),
    "aminmax": lambda x: x.aminmax(dim=1)[1],
    "max of all": lambda x: x.max(),
    "median of all": lambda x: x.median(),
    "infinity norm": lambda x: torch.linalg.vector_norm(x, float("inf"), 1),
    "scatter_reduce": lambda x: torch.zeros(7, 5, 21, dtype=x.dtype).scatter_reduce(
        1, torch.arange(x.numel()).view(x.shape) * 7 % 5, x, "amax", include_self=False
    ),
}
if TORCH < (2, 13):
    del SHARED["aminmax"]  # which has no derivative there
FIRST = {
    "max over a dim": lambda x: x.max(1).values,
    "min over a dim": lambda x: x.min(2).values,
    "max over windows": lambda x: x[:, :12].reshape(7, 4, 3, 21).max(dim=1).values,
    "argmax": lambda x: x.gather(1, x.argmax(1, keepdim=True)),
}


@pytest.mark.parametrize("name", [*SHARED, *FIRST])
def test_equal_values_get_what_they_get_in_eager(name: str) -> None:
    choose = (SHARED | FIRST)[name]

    def program(x: torch.Tensor) -> torch.Tensor:
        return choose(x * 2 + 1).sin() * 3

    x = torch.randn(7, 13, 21).round()
    (out, found), (wanted_out, wanted) = gradients(forge.jit(program), x), gradients(program, x)
    torch.testing.assert_close(out, wanted_out)
    torch.testing.assert_close(found, wanted)
    assert torch.equal(found != 0, wanted != 0)
    several = (wanted != 0).sum() > wanted_out.numel()
    assert bool(several) is (name in SHARED)


@pytest.mark.parametrize(
    "memory", ["balanced", *(pytest.param(each, marks=pytest.mark.slow) for each in ("smallest", "speed"))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHARED)
def test_an_extremum_is_found_among_the_values_that_it_was_made_of(name: str, dtype: torch.dtype, memory: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return SHARED[name](F.gelu(x * 1.3)).sin()

    x = torch.randn(7, 13, 21).to(dtype)
    (_, found), (_, wanted) = gradients(forge.jit(program, memory=memory), x), gradients(program, x)
    # in bfloat16 a region rounds its results once, so that other values may tie
    assert ((found != 0) != (wanted != 0)).sum() <= (0 if dtype == torch.float32 else 4)
    within = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found.double().sum(), wanted.double().sum(), rtol=within, atol=within)


def test_within_a_checkpoint_too() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x * 1.3).amax(1).sin()

    def program(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(inner, x * 1.7, use_reentrant=False) * 2

    x = torch.randn(7, 13, 21)
    torch.testing.assert_close(gradients(forge.jit(program), x), gradients(program, x), rtol=1e-4, atol=1e-5)
