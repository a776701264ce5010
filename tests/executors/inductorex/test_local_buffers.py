"""Values that Inductor's C++ kernels keep in local buffers inside tiled loops."""

from collections.abc import Callable

import pytest
import torch

import forge

Rows = torch.Tensor  # of a number for each row


def of_layer_norm(g: torch.Tensor, x: torch.Tensor, mean: Rows, rstd: Rows) -> torch.Tensor:
    normalized = (x - mean) * rstd
    inside = g * x.shape[-1] - g.sum(-1, True) - normalized * (g * normalized).sum(-1, True)
    return rstd / x.shape[-1] * inside


def of_rms_norm(g: torch.Tensor, x: torch.Tensor, mean: Rows, rstd: Rows) -> torch.Tensor:
    return rstd * (g - x * (g * x).mean(-1, True))


def of_softmax(g: torch.Tensor, x: torch.Tensor, mean: Rows, rstd: Rows) -> torch.Tensor:
    return x * (g - (g * x).sum(-1, True))


def centered(g: torch.Tensor, x: torch.Tensor, mean: Rows, rstd: Rows) -> torch.Tensor:
    return g * rstd - (g * rstd).amax(-1, True) + x


@pytest.mark.usefixtures("compiled_regions")
@pytest.mark.parametrize(
    ("rows", "width"),
    [(12, 16), pytest.param(5, 8, marks=pytest.mark.slow), pytest.param(40, 33, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("of", [of_layer_norm, of_rms_norm, of_softmax, centered])
@pytest.mark.one_in(2)
def test_a_reduction_of_a_sum_with_a_transposed_tensor(of: Callable, rows: int, width: int) -> None:
    """The sum is long enough that Inductor computes it once."""

    def function(transposed: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        *more, weight, x, mean, rstd = more
        return of((transposed + sum(more)) * weight, x, mean, rstd)

    torch.manual_seed(0)
    transposed = torch.randn(1, width, rows).transpose(1, 2)
    more = [torch.randn(1, rows, width) for _ in range(3)]
    others = torch.randn(width), torch.randn(1, rows, width), torch.randn(1, rows, 1), torch.rand(1, rows, 1)
    inputs = transposed, *more, *others
    torch.testing.assert_close(forge.jit(function, strict=True)(*inputs), function(*inputs))
