"""Pooling windows that cover the whole image, or extend beyond it."""

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import forge
from forge.executors.inductorex import lower
from forge.executors.inductorex.aten_graph import decompositions
from forge.torch_internals.versions import TORCH

POOLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "larger": lambda x: F.avg_pool2d(x, 1280, ceil_mode=True),
    "larger, small steps": lambda x: F.avg_pool2d(x, 9, stride=5, ceil_mode=True),
    "larger in one dim": lambda x: F.avg_pool2d(x, (1280, 2), ceil_mode=True),
    "larger, padded": lambda x: F.avg_pool2d(x, 20, padding=4, ceil_mode=True, count_include_pad=False),
    "larger, with a divisor": lambda x: F.avg_pool2d(x, 1280, ceil_mode=True, divisor_override=3),
    "larger, of signals": lambda x: F.avg_pool1d(x.flatten(0, 1), 1280, ceil_mode=True),
    "larger, maxima": lambda x: F.max_pool2d(x, 1280, ceil_mode=True),
    "larger, powers": lambda x: F.lp_pool2d(x.abs() / 9, 2, 1280, ceil_mode=True) / 1280,
    "whole": lambda x: F.avg_pool2d(x, x.shape[2:]),
    "whole and larger": lambda x: F.avg_pool2d(x, (x.shape[2], 1280), ceil_mode=True),
}


@pytest.mark.parametrize("name", POOLS)
def test_pools_are_eagers_at_every_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORGE_CHECK", raising=False)
    failures: list[Exception] = []
    monkeypatch.setattr(lower.compile_wait, "notice", failures.append)
    torch._dynamo.reset()

    def function(x: torch.Tensor) -> torch.Tensor:
        return POOLS[name](x.relu() + 1).sin()

    jitted = forge.jit(function, cache=False)
    for size in ((7, 7), (6, 8), (8, 7)):
        x = torch.randn(2, 3, *size, requires_grad=True)
        actual, expected = jitted(x), function(x)
        torch.testing.assert_close(actual, expected)
        cotangent = torch.randn_like(expected)
        gradients = [torch.autograd.grad(each, x, cotangent)[0] for each in (actual, expected)]
        torch.testing.assert_close(*gradients)
        assert gradients[0].stride() == gradients[1].stride()
    is_dynamic = "whole" not in name  # torch's functions take windows of known sizes
    if TORCH < (2, 13):  # torch's fake implementation guards on a remainder
        is_dynamic = is_dynamic and name != "larger in one dim"
    assert not failures and (len(forge.explain(jitted).recompiles) == 1 or not is_dynamic)


def test_loops_visit_no_place_outside_of_the_image() -> None:
    def targets(function: Callable) -> dict[object, tuple]:
        graph = make_fx(function, decomposition_table=decompositions())(torch.randn(2, 3, 7, 8))
        return {node.target: node.args for node in graph.graph.nodes}

    pool = torch.ops.aten.avg_pool2d.default
    assert pool not in targets(POOLS["larger"]) and pool not in targets(POOLS["whole"])
    assert targets(POOLS["larger in one dim"])[pool][1] == [7, 2]
    assert targets(lambda x: F.avg_pool2d(x, 3, ceil_mode=True))[pool][1] == [3, 3]
