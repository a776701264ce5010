"""Indexed reads with indices within bounds, which may be part of a CPU region."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

import forge
from forge.ir import Tag, Trace
from forge.transforms import fold_constants, mark_bounded

Read = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
BOUNDED: dict[str, Read] = {
    "clamped": lambda x, i: x[i.clamp(0, 4)],
    "clamped and moved": lambda x, i: x[1 - i.clamp(-2, 3)],
    "from the end": lambda x, i: x[i.clamp(-5, -1)],
    "the largest": lambda x, i: x.gather(1, x.topk(2, 1).indices),
    "sorted": lambda x, i: torch.take_along_dim(x, x.sort(1)[1], 1),
    "an argmax": lambda x, i: x[:, x.argmax(1)],
    "the place of a maximum": lambda x, i: F.embedding(x.max(1)[1].clamp(max=4), x),
    "a remainder": lambda x, i: torch.index_select(x, 0, (i * 3) % 5),
    "a choice": lambda x, i: x[torch.where(i > 2, i.clamp(0, 2), (i > 0).long())],
    "joined": lambda x, i: x[torch.cat([i.clamp(0, 1), i.minimum(torch.tensor(4)).maximum(torch.tensor(0))])],
    "products": lambda x, i: x[(i.clamp(0, 2) * 2).view(-1, 1).int().flip(0)],
    "two": lambda x, i: x[i.clamp(0, 4), i.clamp(0, 1)],
    "an index of an index": lambda x, i: x[torch.arange(5)[i.clamp(0, 4)]],
}
UNBOUNDED: dict[str, Read] = {
    "given": lambda x, i: x[i],
    "clamped on one side": lambda x, i: x[i.clamp(min=0)],
    "too large": lambda x, i: x[i.clamp(0, 5)],
    "too small": lambda x, i: x[i.clamp(-6, 0)],
    "from the end of an embedding": lambda x, i: F.embedding(i.clamp(-1, 4), x),
    "an overflow": lambda x, i: x[(i.clamp(0, 2**62) * 4).clamp(max=4)],
    "a remainder of a negative number": lambda x, i: F.embedding(i % -5, x),
    "of a number that is none": lambda x, i: x[x[0].clamp(0, 4).long()],
    "a mask": lambda x, i: x * (i.sum() > 0),
    "a second one": lambda x, i: x[i.clamp(0, 4), i],
    "a quotient": lambda x, i: x[i.clamp(0, 8) // 2],
    "written to": lambda x, i: x.index_put((i.clamp(0, 4),), x[0]),
}


def is_marked(trace: Trace) -> bool:
    return any(Tag.IN_BOUNDS in bound.tags for bound in trace.bound_symbols)


@pytest.mark.parametrize("name", BOUNDED)
def test_reads_within_bounds_are_in_regions(name: str) -> None:
    read = BOUNDED[name]
    jitted = forge.jit(lambda x, i: read(x * 2, i).exp())
    for length in (5, 3, 4):
        x, i = torch.randn(5, 5, requires_grad=True), torch.randint(-9, 9, (length,))
        actual, expected = jitted(x, i), read(x * 2, i).exp()
        torch.testing.assert_close(actual, expected)
        (found,), (wanted,) = (torch.autograd.grad(each.sum(), x) for each in (actual, expected))
        torch.testing.assert_close(found, wanted)
    assert is_marked(mark_bounded(forge.trace(read, x, i)))
    calls = [bound.symbol.id for bound in forge.last_traces(jitted)[-1].bound_symbols]
    assert not any(word in call for call in calls for word in ("getitem", "gather", "embedding", "index", "take"))


@pytest.mark.parametrize("name", UNBOUNDED)
def test_other_reads_are_not(name: str) -> None:
    trace = forge.trace(UNBOUNDED[name], torch.randn(5, 5), torch.arange(5))
    assert mark_bounded(trace) is trace


@pytest.mark.parametrize("name", ["given", "too large", "too small", "a second one"])
def test_an_index_out_of_bounds_raises_as_in_eager(name: str) -> None:
    jitted = forge.jit(lambda x, i: UNBOUNDED[name](x * 2, i).exp())
    with pytest.raises(IndexError, match="out of"):
        jitted(torch.randn(5, 5), torch.tensor([9, -9]))


def test_constants_that_a_program_folds_are_known() -> None:
    trace = forge.trace(lambda x: x[torch.arange(3).pow(2)] * 2, torch.randn(5, 5))
    folded = fold_constants(trace, run=lambda each: [torch.tensor([0, 1, 4])])
    assert is_marked(mark_bounded(folded, folded.constants))
    assert mark_bounded(folded) is folded  # the other holders of the tensor are not known
    folded = fold_constants(trace, run=lambda each: [torch.tensor([0, 1, 5])])
    assert mark_bounded(folded, folded.constants) is folded


def test_a_tensor_of_a_closure_may_change() -> None:
    index = torch.tensor([0, 1])
    jitted = forge.jit(lambda x: x[index] * 2)
    torch.testing.assert_close(jitted(torch.ones(3)), torch.full((2,), 2.0))
    index[0] = 7
    with pytest.raises(IndexError, match="out of"):
        jitted(torch.ones(3))


def test_an_operator_that_reads_otherwise_is_not_marked() -> None:
    """Inductor's loops for it do not clamp, although those of its decomposition do."""
    mask, index = torch.ones(3, dtype=torch.bool), torch.tensor([0, 7, -9])
    trace = forge.trace(lambda x: torch._unsafe_masked_index(x, mask, [index], 0.0), torch.randn(5))
    assert mark_bounded(trace) is trace
