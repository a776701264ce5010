"""Elementwise functions in a region on a CPU for which Inductor is inaccurate near 0."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import forge

FUNCTIONS: dict[str, Callable] = {
    "expm1": torch.expm1,
    "atanh": torch.atanh,
    "erf": torch.erf,
    "elu": F.elu,
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.3),
    "ndtr": torch.special.ndtr,
    "gelu": F.gelu,
}
SMALL = torch.logspace(-30, 0, 301)
SPECIAL = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 88.0, 1e30, -1e30])
NUMBERS = torch.cat((SPECIAL, SMALL, -SMALL, torch.linspace(-5, 12, 705)))  # no whole number of vectors


def all_of(x: torch.Tensor) -> list[torch.Tensor]:
    x = x * 1.0
    return [function(x) for function in FUNCTIONS.values()]


def largest_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest relative error of finite, nonzero results."""
    errors = ((found.double() - exact) / exact).abs()
    return errors[exact.isfinite() & (exact != 0)].max().item()


@pytest.mark.usefixtures("compiled_regions")
def test_errors_are_at_most_twice_those_of_eager() -> None:
    found = forge.jit(all_of, strict=True)(NUMBERS)
    count = len(SPECIAL)
    for name, here, eager, exact in zip(FUNCTIONS, found, all_of(NUMBERS), all_of(NUMBERS.double()), strict=True):
        torch.testing.assert_close(here, exact.float(), equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")
        # eager's gelu has no negative zero on a processor with only AVX2
        signs = eager[:2].signbit(), NUMBERS[:2].signbit()
        assert any(torch.equal(here[:2].signbit(), each) for each in signs), f"{name} of zeros"
        assert largest_error(here[count:], exact[count:]) <= 2 * largest_error(eager[count:], exact[count:]), name


@pytest.mark.usefixtures("compiled_regions")
def test_beside_other_dtypes() -> None:
    """A loop over numbers of several widths has vectors of vectors."""

    def function(x: torch.Tensor, half: torch.Tensor, wide: torch.Tensor, whole: torch.Tensor) -> list[torch.Tensor]:
        return [each(value) * whole for value in (x, half, wide) for each in (torch.expm1, torch.erf, torch.atanh)]

    x = torch.logspace(-9, -1, 37).bfloat16()
    whole = torch.arange(37)
    found = forge.jit(function, strict=True)(x.float(), x, x.double(), whole)
    exact = function(x.double(), x.double(), x.double(), whole)
    for index, (here, right) in enumerate(zip(found, exact, strict=True)):
        rtol = 0.01 if here.dtype == torch.bfloat16 else 2e-7 if here.dtype == torch.float32 else 1e-15
        torch.testing.assert_close(here.double(), right, atol=0, rtol=rtol, msg=lambda text, i=index: f"{i}: {text}")


@pytest.mark.parametrize("name", ["pow", "acosh"])
def test_special_values_are_those_of_torchs_kernels(name: str) -> None:
    function = {"pow": lambda x: (x * 1.0) ** -0.5 * 2, "acosh": lambda x: (x * 1.0).acosh() * 2}[name]
    x = torch.tensor([-0.0, 0.0, -math.inf, math.inf, -1.0, 4.0, 3e38, math.nan] * 4)
    torch.testing.assert_close(forge.jit(function)(x), function(x), equal_nan=True)


def test_erfinv_near_one_is_as_exact_as_torchs_kernel() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 1.0).erfinv() * 1.0

    x = 1 - 10 ** -torch.linspace(0.1, 6, 1000)
    errors = []
    for call in (function, forge.jit(function)):
        given, exact = x.clone().requires_grad_(), x.double().requires_grad_()
        result, expected = call(given), function(exact)
        pairs = (
            (result, expected),
            (torch.autograd.grad(result.sum(), given)[0], torch.autograd.grad(expected.sum(), exact)[0]),
        )
        errors.append([((one - other) / other).abs().max().item() for one, other in pairs])
    eager, compiled = errors
    assert all(ours <= 2 * theirs for ours, theirs in zip(compiled, eager, strict=True))
