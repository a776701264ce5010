"""A changed part of an input is written in place; the input is not copied."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
from forge.ir import Tag, Trace
from tests.executors import test_cuda_graphs
from tests.executors.test_cuda_graphs import graphs

device = test_cuda_graphs.device
POSITION = torch.tensor([3])


def index_copy(cache: torch.Tensor, new: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    cache.index_copy_(2, position, new)
    return cache.sum(-1)


def tensor_key(cache: torch.Tensor, new: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    cache[:, :, position] = new
    return cache.sum(-1)


def slices(cache: torch.Tensor, new: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    cache[:, :, 3:4] = new
    return cache.sum(-1)


def number(cache: torch.Tensor, new: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    cache[0, 1] = 2
    return cache.sum(-1)


def index_put(cache: torch.Tensor, new: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    cache.index_put_((torch.arange(2)[:, None], torch.arange(3), position), new[:, :, 0])
    return cache.sum(-1)


def scatter(cache: torch.Tensor, new: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    cache.scatter_(2, position.expand_as(new), new)
    return cache.sum(-1)


def slice_scatter(cache: torch.Tensor, new: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    cache.copy_(torch.slice_scatter(cache, new, -2, 3, 4))
    return cache.sum(-1)


def copied_slice(cache: torch.Tensor, new: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    cache.narrow(2, 3, 1).copy_(new)
    return cache.sum(-1)


def twice(cache: torch.Tensor, new: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    cache[:, :, position] = new
    cache[:, :, 5] = new[:, :, 0].sin()
    return cache.sum(-1)


def nothing_read(cache: torch.Tensor, new: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    cache[:, :, position] = new
    return new.sin()


def returned(cache: torch.Tensor, new: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    cache.index_copy_(2, position, new)
    return cache


def accumulated(cache: torch.Tensor, new: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    cache.index_put_((torch.arange(2)[:, None], torch.arange(3), position), new[:, :, 0], accumulate=True)
    return cache.sum(-1)


def reduced(cache: torch.Tensor, new: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    cache.scatter_(2, position.expand_as(new), new, reduce="add")
    return cache.sum(-1)


def read_before(cache: torch.Tensor, new: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    old = cache.sum(-1)
    cache.index_copy_(2, position, new)
    return old - cache.sum(-1)


def of_itself(cache: torch.Tensor, new: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    cache.index_copy_(2, position, cache[:, :, :1] + new)
    return cache.sum(-1)


def read_between(cache: torch.Tensor, new: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    cache[:, :, position] = new
    between = cache.sum(-1)
    cache[:, :, 5] = new[:, :, 0].sin()
    return between - cache.sum(-1)


def copied(cache: torch.Tensor, new: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    other = torch.index_copy(cache, 2, position, new)
    cache.copy_(other)
    return other


def permuted(cache: torch.Tensor, new: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    cache.copy_(torch.index_copy(cache, 2, torch.arange(8).flip(0), cache))
    return cache.sum(-1)


def written_with_what_was_there(cache: torch.Tensor, new: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    changed = torch.index_copy(cache, 2, position, new)
    cache.copy_(torch.index_copy(changed, 2, torch.arange(8).flip(0), cache))
    return cache.sum(-1)


IN_PLACE = [
    index_copy,
    tensor_key,
    slices,
    number,
    index_put,
    scatter,
    slice_scatter,
    copied_slice,
    twice,
    nothing_read,
]
COPIED = [accumulated, reduced, read_before, of_itself, read_between, copied, permuted, written_with_what_was_there]


def given(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, 8, 4, dtype=dtype), torch.randn(2, 3, 1, 4), POSITION.clone()


def writes(trace: Trace) -> int:
    return sum(Tag.IN_PLACE in bound.all_tags for bound in trace.bound_symbols)


def run(function: Callable, cache: torch.Tensor, *others: torch.Tensor) -> tuple[Any, torch.Tensor]:
    memory = cache.data_ptr(), cache._version
    result = function(cache, *others)
    assert cache.data_ptr() == memory[0] and cache._version > memory[1]
    return result, cache


@pytest.mark.filterwarnings("ignore:The reduce argument")
@pytest.mark.parametrize("executors", [["torch"], None], ids=["torch", "default"])
@pytest.mark.parametrize("function", [*IN_PLACE, returned, *COPIED])
def test_an_input_is_changed_as_in_eager(function: Callable, executors: list[str] | None) -> None:
    jitted = forge.jit(function, executors=executors)
    for _ in range(3):
        inputs = given()
        expected = run(function, inputs[0].clone(), *inputs[1:])
        torch.testing.assert_close(run(jitted, *inputs), expected)
    written = writes(forge.last_traces(jitted)[-1])
    assert written == (0 if function in COPIED else 2 if function is twice else 1)


def test_what_is_written_is_converted() -> None:
    cache, new, position = given(torch.bfloat16)
    jitted = forge.jit(slices)
    expected = slices(cache.clone(), new, position)
    torch.testing.assert_close(jitted(cache, new, position), expected)
    assert writes(forge.last_traces(jitted)[-1]) == 1


@pytest.mark.parametrize("steps", [(4, 1), (1, 4), (2, 3), (2, 1), (3, 2), (8, 2)])
def test_an_input_whose_elements_share_memory_is_changed_as_in_eager(steps: tuple[int, int]) -> None:
    def function(cache: torch.Tensor, new: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        cache[rows] = new
        return cache * 1

    jitted, rows = forge.jit(function, executors=["torch"]), torch.tensor([0, 2])
    for _ in range(2):
        memory, new = torch.randn(32), torch.randn(4)
        own = memory.clone()
        expected = function(memory.as_strided((4, 4), steps), new, rows)
        torch.testing.assert_close((jitted(own.as_strided((4, 4), steps), new, rows), own), (expected, memory))


def test_a_program_with_gradients_leaves_writes_to_autograd() -> None:
    def function(cache: torch.Tensor, new: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return index_copy(cache, new, position)

    (cache, new, position), jitted = given(), forge.jit(function)
    own, weights = cache.clone(), [new.clone().requires_grad_() for _ in range(2)]
    jitted(own, weights[0], position).sin().sum().backward()
    index_copy(cache, weights[1], position).sin().sum().backward()
    torch.testing.assert_close((own, weights[0].grad), (cache, weights[1].grad))
    assert not writes(forge.last_traces(jitted)[-1])


def test_an_index_out_of_range_leaves_the_input_as_eager_does() -> None:
    cache, new, _ = given()
    before, jitted = cache.clone(), forge.jit(index_copy)
    with pytest.raises(IndexError):
        jitted(cache, new, torch.tensor([9]))
    assert torch.equal(cache, before)


def test_a_cache_is_written_in_a_recording(device: str) -> None:
    """Its version counter informs autograd, and its memory does not move."""

    def step(x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        keys.index_copy_(2, position, x.sin())
        values[:, :, position] = x.cos()
        mask = torch.arange(8, device=x.device) <= position
        return x + F.scaled_dot_product_attention(x, keys, values, attn_mask=mask.expand(2, 3, 1, 8))

    caches = [[torch.zeros(2, 3, 8, 16, device=device) for _ in range(2)] for _ in range(2)]
    jitted = forge.jit(step)
    with torch.no_grad():
        for at in range(24):
            x, position = torch.randn(2, 3, 1, 16, device=device), torch.tensor([at % 8], device=device)
            versions = [each._version for each in caches[0]]
            torch.testing.assert_close(jitted(x, *caches[0], position), step(x, *caches[1], position))
            torch.testing.assert_close(caches[0], caches[1])
            assert all(each._version > before for each, before in zip(caches[0], versions, strict=True))
    (graph,) = graphs(jitted)
    assert graph.recordings and graph.failed is None
    assert len(graph._writes) == 2
