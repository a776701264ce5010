"""Sums of products that broadcast run as matrix products."""

from collections.abc import Callable

import pytest
import torch

import forge

A, B, C = (2, 9, 3, 10), (2, 12, 3, 10), (2, 9, 10)  # (batch, rows, heads, contracted), …
PROGRAMS: dict[str, Callable[..., torch.Tensor]] = {
    "scores": lambda a, b, c: (a[:, :, None] * b[:, None]).sum(-1),
    "scores, kept dim": lambda a, b, c: (b[:, None] * a[:, :, None]).sum(dim=[-1], keepdim=True),
    "expanded": lambda a, b, c: (a.unsqueeze(2).expand(-1, -1, 12, -1, -1) * b[:, None].expand(-1, 9, -1, -1, -1)).sum(
        (4,)
    ),
    "values": lambda a, b, c: (a[:, :, :, None] * b.movedim(1, 3)[:, None, :, :, :].movedim(4, 3)).sum(-1),
    "two dims": lambda a, b, c: (a[:, :, None] * b[:, None]).sum((3, 4)),
    "over the batch": lambda a, b, c: (a[:, :, None] * b[:, None]).sum((0, -1)),
    "states": lambda a, b, c: (a[..., None] * c[:, :, None, None, :]).sum(1),
}
OTHER: dict[str, Callable[..., torch.Tensor]] = {
    "no columns": lambda a, b, c: (a * a.sin()).sum(-1),
    "summed in one factor": lambda a, b, c: (a[:, :, None] * b[:, None]).sum((1, 4)),
    "few columns": lambda a, b, c: (a[:, :, None] * b[:, None, :3]).sum(-1),
    "read twice": lambda a, b, c: (p := a[:, :, None] * b[:, None]).sum(-1) + p.amax(-1),
    "both expanded": lambda a, b, c: (
        a[:, :, None].expand(5, 2, 9, 12, 3, 10) * b[:, None].expand(5, 2, 9, 12, 3, 10)
    ).sum((0, -1)),
    "both expanded in a dim that stays": lambda a, b, c: (
        a[:, :, None].expand(5, 2, 9, 12, 3, 10) * b[:, None].expand(5, 2, 9, 12, 3, 10)
    ).sum(-1),
    "in another dtype": lambda a, b, c: (a[:, :, None] * b[:, None]).sum(-1, dtype=torch.float64),
    "of integers": lambda a, b, c: (a.long()[:, :, None] * b.long()[:, None]).sum(-1),
    "without a gradient": lambda a, b, c: under_no_grad(lambda: a[:, :, None] * b[:, None]).sum(-1) + a.sum(),
}


def under_no_grad(function: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return function()


def compiled(
    name: str,
    dtype: torch.dtype,
    executors: list[str] | None = None,
    requires_grad: bool = True,
    numerics: str = "fast",
) -> bool:
    """Return whether a program has a matrix product; check its result and gradients against eager."""
    program = {**PROGRAMS, **OTHER}[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape, dtype=dtype, requires_grad=requires_grad) for shape in (A, B, C)]
    jitted = forge.jit(program, executors=executors, numerics=numerics, cache=False)
    actual, expected = jitted(*inputs), program(*inputs)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=10 * tolerance)
    assert actual.stride() == expected.stride()
    if expected.requires_grad:
        gradients = [torch.autograd.grad(each.sin().sum(), inputs, allow_unused=True) for each in (actual, expected)]
        torch.testing.assert_close(*gradients, rtol=tolerance, atol=10 * tolerance)
    return "contract" in [stage.stage for stage in forge.last_traces(jitted)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_sum_of_products_is_a_matrix_product(name: str, dtype: torch.dtype) -> None:
    assert compiled(name, dtype)


@pytest.mark.parametrize("name", OTHER)
def test_what_stays(name: str) -> None:
    assert not compiled(name, torch.float32)


def test_unfused_programs_stay() -> None:
    assert not compiled("scores", torch.float32, ["torch"])


def test_products_that_may_be_rounded_stay() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        assert not compiled("scores", torch.float32, requires_grad=False)
        assert compiled("scores", torch.bfloat16, requires_grad=False)
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch has no such setting")
def test_products_that_one_library_may_round_stay() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert not compiled("scores", torch.float32, requires_grad=False)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_programs_that_round_as_eager_stay() -> None:
    assert not compiled("scores", torch.bfloat16, numerics="eager")
