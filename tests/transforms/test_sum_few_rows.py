"""Gradients of tables of few rows are masked sums, on a GPU."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.nn import functional as F

import forge
from forge import transforms
from forge.transforms.sum_few_rows import adds_rows

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
INDEX = torch.arange(24) * 7 % 5 - 2
Read = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
READS: dict[str, Read] = {
    "rows": lambda x, index: x[index],
    "rows in a grid": lambda x, index: x[index.view(4, -1)],
    "columns": lambda x, index: x[:, index],
    "columns of a third dim": lambda x, index: x[:, :, None][:, index.view(4, -1)],
    "selected": lambda x, index: x.index_select(1, index + 2),
    "an embedding": lambda x, index: F.embedding(index + 2, x),
    "an embedding with padding": lambda x, index: F.embedding(index.view(4, -1) + 2, x, padding_idx=3),
    "twice": lambda x, index: x[index] * x[-index],
}


def is_summed(jitted: Callable) -> bool:
    """Return whether a backward has masked sums, after checking that it has no other sums."""
    sums = [trace for trace in forge.last_backward_traces(jitted) if trace.stage == "sum_few_rows"]
    assert not any(map(adds_rows, (bound for trace in sums for bound in trace.bound_symbols)))
    return bool(sums)


def gradient(read: Read, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    out = read(x, index)
    weights = torch.arange(out.numel(), device=out.device).view_as(out) % 9 - 4  # in every dtype
    return torch.autograd.grad((out * weights.to(out.dtype)).sum(), x)[0]


def check(read: Read, device: str, dtype: torch.dtype = torch.float32) -> Callable:
    jitted = forge.jit(read)
    for length in (24, 36, 48):
        x = torch.randn(5, 5, device=device, dtype=dtype, requires_grad=True)
        index = INDEX.repeat(2)[:length].to(device)
        actual, exact = gradient(jitted, x, index), gradient(read, x.double(), index)
        torch.testing.assert_close(actual, exact.to(dtype), rtol=8 * torch.finfo(dtype).eps, atol=1e-5)
    return jitted


@pytest.mark.parametrize("name", READS)
def test_gradients_are_eagers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transforms, "sum_few_rows", partial(transforms.sum_few_rows, on_cpu=True))
    jitted = check(READS[name], "cpu")
    assert is_summed(jitted) and "fusion" in str(forge.last_backward_traces(jitted)[-1])


def test_an_infinity_stays_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transforms, "sum_few_rows", partial(transforms.sum_few_rows, on_cpu=True))
    x = torch.randn(5, 5, requires_grad=True)
    weights = torch.ones(24, 5)
    weights[0, 0] = torch.inf
    jitted = forge.jit(lambda x, weights: x[INDEX] * weights)
    (found,) = torch.autograd.grad(jitted(x, weights).sum(), x)
    assert found.isinf().sum() == 1 and not found.isnan().any() and is_summed(jitted)


@pytest.mark.parametrize("name", READS)
def test_a_cpu_adds(name: str) -> None:
    assert not is_summed(check(READS[name], "cpu"))


def test_many_rows_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transforms, "sum_few_rows", partial(transforms.sum_few_rows, on_cpu=True))
    jitted, x = forge.jit(READS["rows"]), torch.randn(60, 5, requires_grad=True)
    gradient(jitted, x, INDEX)
    assert not is_summed(jitted)


@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", READS)
def test_a_gpu_sums(name: str, dtype: torch.dtype) -> None:
    assert is_summed(check(READS[name], "cuda", dtype))
