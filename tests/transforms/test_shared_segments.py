"""Gradients of scores that are gathered by an index that all heads share are sums of segments."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import forge
from forge import clang
from forge.executors.executor import OperatorExecutor
from forge.executors.registry import resolve_executors

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
HALVES = [torch.bfloat16, torch.float16]


def distances(queries: int, keys: int) -> torch.Tensor:
    return (torch.arange(queries)[:, None] - torch.arange(keys)[None]).clamp(-9, 9) + 9


def sum_segments(g: torch.Tensor, index: torch.Tensor, segments: int) -> torch.Tensor:
    is_in = index[..., None] == torch.arange(segments, device=g.device)
    return torch.einsum("...ij,ijs->...is", g.float(), is_in.float()).to(g.dtype)


summing = OperatorExecutor("segments-of-test")
summing.register_implementation(clang.segment_sums, sum_segments)


def one_batch(scores: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Scores (heads, queries, distances), as DeBERTa gathers them for queries."""
    return scores.gather(-1, index.expand(scores.shape[0], -1, -1)).softmax(-1)


def transposed(scores: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Scores that are gathered for keys."""
    return scores.gather(-1, index[None].expand(scores.shape[0], -1, -1)).mT.softmax(-1)


def batches_and_heads(scores: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    scores = scores.view(2, -1, *scores.shape[1:])
    return torch.gather(scores, 3, index[None, None].expand(*scores.shape[:2], -1, -1)).softmax(-1)


def calls(jitted: Callable) -> list[str]:
    return [bound.symbol.id for bound in forge.last_backward_traces(jitted)[-1].bound_symbols]


def check(function: Callable, device: str, dtype: torch.dtype, **options: Any) -> Callable:
    torch.manual_seed(0)
    jitted = forge.jit(function, **options)
    for queries, keys in ((24, 20), (26, 20), (31, 22)):
        scores = torch.randn(36, queries, 19, device=device, dtype=dtype, requires_grad=True)
        index = distances(queries, keys).to(device)
        weights = torch.randn_like(function(scores, index))
        actual, eager = ((each(scores, index) * weights).sum() for each in (jitted, function))
        (found,), (wanted,) = (torch.autograd.grad(each, scores) for each in (actual, eager))
        torch.testing.assert_close(found, wanted, rtol=3e-2, atol=3e-2)
    return jitted


FUNCTIONS = [one_batch, transposed, batches_and_heads]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_executor_sums_segments(function: Callable, dtype: torch.dtype) -> None:
    jitted = check(function, "cpu", dtype, executors=[summing, *resolve_executors(None)])
    assert calls(jitted).count("segments-of-test.clang.segment_sums") == 1
    assert not any("scatter" in call for call in calls(jitted))


def own_index(scores: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Each head has an index."""
    return scores.gather(-1, index.repeat(scores.shape[0], 1, 1))


def added(scores: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The scatter adds to other values than zeros."""
    return scores.scatter_add(-1, index.expand(scores.shape[0], -1, -1), scores[..., :1].expand(-1, -1, index.shape[1]))


@pytest.mark.parametrize("function", [own_index, added])
def test_other_scatters_stay(function: Callable) -> None:
    jitted = check(function, "cpu", torch.bfloat16, executors=[summing, *resolve_executors(None)])
    assert not any("segment" in call for call in calls(jitted))


def test_nothing_takes_it_on_a_cpu() -> None:
    assert not any("segment" in call for call in calls(check(one_batch, "cpu", torch.bfloat16)))


@NEEDS_GPU
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_gpu_multiplies(function: Callable, dtype: torch.dtype) -> None:
    jitted = check(function, "cuda", dtype)
    assert calls(jitted).count("cuda.clang.segment_sums") == 1


@NEEDS_GPU
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rows", "vectors", "length", "segments"), [(40, 5, 70, 30), (130, 4, 64, 200), (16, 1, 1, 1)])
def test_the_kernel_adds_as_scatter_does(
    rows: int, vectors: int, length: int, segments: int, dtype: torch.dtype
) -> None:
    from forge.executors.cudaex.segment_kernels import sum_segments as kernel

    g = torch.randn(2, rows, length, vectors, device="cuda", dtype=dtype).mT
    g[0, 1, 0, 0], g[0, 2, 0, 0], g[0, 3, 0, 0] = torch.inf, torch.nan, -torch.inf
    index = torch.randint(segments, (vectors, length), device="cuda")
    exact = torch.zeros(2, rows, vectors, segments, device="cuda", dtype=torch.float64)
    exact = exact.scatter_add(-1, index.expand(g.shape), g.double()).to(dtype)
    torch.testing.assert_close(kernel(g, index, segments), exact, equal_nan=True)
    assert kernel(g[:0], index, segments).shape == (0, rows, vectors, segments)
    assert not kernel(g[..., :0], index[:, :0], segments).any()
