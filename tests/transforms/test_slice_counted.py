"""An index that counts becomes a slice, whose gradient neither sorts nor adds one by one."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.nn import functional as F

import forge
from forge import prims
from forge.transforms import slice_counted
from forge.transforms.makers import innermost

READS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relative positions": lambda x: torch.index_select(x, 2, torch.arange(x.shape[1])),
    "positions": lambda x: F.embedding((torch.arange(x.shape[1]) + 1).unsqueeze(0), x[0].T),
    "positions of each sample": lambda x: F.embedding(torch.arange(x.shape[1])[None].expand(3, -1), x[0]),
    "positions after a mask": lambda x: F.embedding(torch.ones(3, x.shape[1]).cumsum(1).long() + 2, x[0].T),
    "every second column": lambda x: x[:, :, torch.arange(0, x.shape[1], 2, dtype=torch.int32)],
    "of a transposed tensor": lambda x: x.mT[:, torch.arange(2, x.shape[1])],
    "of a column": lambda x: x.mT[:, torch.arange(x.shape[1]).view(-1, 1)],
    "in a list": lambda x: torch.ops.aten.index(x, [None, None, 3 * torch.arange(3).to(x.device) + 1]),
    "the rest of a range": lambda x: x[0].T[(torch.arange(x.shape[1]) + 1)[1:]],
}


def reads(trace: forge.ir.Trace) -> list[object]:
    """Return the calls that read with an index."""
    calls = [call for bound in trace.bound_symbols for call in innermost(bound)]
    return [call for call in calls if call.symbol in (prims.index, prims.embedding)]


@pytest.mark.parametrize("name", READS)
def test_results_and_gradients_are_eagers(name: str) -> None:
    read = READS[name]
    jitted = forge.jit(read)
    for length in (6, 7, 9):
        x = torch.randn(4, length, 12).requires_grad_()
        actual, expected = jitted(x), read(x)
        assert actual.stride() == expected.stride()
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        weights = torch.randn_like(expected)
        found, wanted = (torch.autograd.grad((each * weights).sum(), x)[0] for each in (actual, expected))
        torch.testing.assert_close(found, wanted)
    (sliced,) = [trace for trace in forge.last_traces(jitted) if trace.stage == "slice_counted"]
    assert not reads(sliced)


NOT_SLICES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "backwards": lambda x: x[torch.arange(4, -1, -1)],
    "from the end": lambda x: x[torch.arange(-3, 0)],
    "fractions": lambda x: x[(torch.arange(3) * 0.5).long()],
    "a sum of two dims": lambda x: x[torch.arange(2)[:, None] + torch.arange(2)],
    "with a row without gradient": lambda x: F.embedding(torch.arange(3), x, padding_idx=1),
    "two indices": lambda x: x[torch.arange(3), torch.arange(3)],
    "one element again and again": lambda x: x[torch.zeros(3, dtype=torch.long)],
    "after a number": lambda x: x[0, torch.arange(3)],
    "rounded sums": lambda x: x[(torch.arange(3.0) + 2.0**25 - 2.0**25).long()],
    "a rounded range": lambda x: x[(torch.arange(2.0**25, 2.0**25 + 3) - 2.0**25).long()],
    "wrapped": lambda x: x[torch.arange(4).view(2, 2)],
}


@pytest.mark.parametrize("name", NOT_SLICES)
def test_other_indices_stay(name: str) -> None:
    x = torch.randn(6, 6)
    trace = forge.trace(NOT_SLICES[name], x)
    assert slice_counted(trace) is trace
    torch.testing.assert_close(forge.jit(NOT_SLICES[name])(x), NOT_SLICES[name](x))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)])
def test_what_is_read_lies_in_memory_as_in_eager(order: tuple[int, ...]) -> None:
    """The order in memory is random."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        read = x[:, torch.arange(x.shape[1] - 1)]
        return read, F.dropout(read) * 2, x.mT.index_select(2, torch.arange(2))

    jitted = forge.jit(function)
    for length in (4, 5, 6):
        laid = [(3, length, 6)[dim] for dim in order]
        x, found = torch.randn(laid).permute([order.index(dim) for dim in range(3)]), []
        for call in (jitted, function):
            torch.manual_seed(1)
            found.append(call(x))
        torch.testing.assert_close(*found)
        actual, expected = ([each.stride() for each in results] for results in found)
        assert actual == expected


def test_an_index_out_of_range_raises_as_in_eager() -> None:
    jitted = forge.jit(lambda x, table: F.embedding(torch.arange(x.shape[0]), table) + 1)
    table = torch.randn(6, 3)
    for length in (4, 5, 6):
        torch.testing.assert_close(jitted(torch.ones(length), table), table[:length] + 1)
    with pytest.raises(IndexError, match="out of range"):
        jitted(torch.ones(7), table)


def test_a_kernel_keeps_its_call() -> None:
    trace = forge.trace(partial(F.embedding, torch.arange(3)), torch.randn(6, 6))
    assert slice_counted(trace, in_torch=lambda bound: False) is trace


def test_what_is_written_to_later_was_copied() -> None:
    def read(x: torch.Tensor) -> torch.Tensor:
        y = x[torch.arange(2)]
        x.add_(1)
        return y * y

    x = torch.ones(3, requires_grad=True).clone().detach()
    torch.testing.assert_close(forge.jit(read)(x), torch.ones(2))
