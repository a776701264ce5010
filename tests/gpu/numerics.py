"""The cases of numerics="eager" in half precision: regions equal torch's functions except for rare last bits."""

from collections.abc import Callable
from functools import partial

import torch

import forge
from tests.executors.inductorex.test_numerics import PROGRAMS
from tests.gpu.cases import DTYPES, Case
from tests.gpu.measure import WITHIN

SHARE = (
    0.002  # of elements that may differ, by one unit in the last place: an exponential's approximation, a sum's order
)
SHAPE = (257, 512)


def cases() -> dict[str, Case]:
    """Return every case by name."""
    return {
        f"numerics/{name}/{dtype}": Case(partial(_run, function, DTYPES[dtype]))
        for name, function in PROGRAMS.items()
        for dtype in ("bfloat16", "float16")
    }


def _run(function: Callable, dtype: torch.dtype, device: torch.device) -> tuple[str, str]:
    torch.manual_seed(0)
    leaves = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in (SHAPE, SHAPE, SHAPE[1:])]
    gradient = torch.randn(function(*leaves).shape, device=device).to(dtype)

    def flow(**options: object) -> list[torch.Tensor]:
        result = forge.jit(function, **options)(*leaves)
        return [result.detach(), *torch.autograd.grad(result, leaves, gradient, materialize_grads=True)]

    pairs = list(zip(flow(numerics="eager"), flow(executors=["torch"]), strict=True))
    for place, (ours, theirs) in enumerate(pairs[:3]):  # the last is a sum over rows
        differ = (ours != theirs).float().mean().item()
        near = torch.isclose(ours, theirs, rtol=4 * torch.finfo(dtype).eps, atol=1e-2).all()
        if differ > SHARE or not near:
            return (
                "beyond",
                f"result {place} of {len(pairs)}: {differ:.2%} of its elements are not those of torch's functions",
            )
    return WITHIN, ""
