"""Index tensors on a CPU are moved to the device of the indexed tensor; the meta device stands in for a GPU."""

import pytest
import torch

import forge
from forge import torchlang
from forge.ir import Trace
from forge.ir.pytree import tensors
from forge.transforms import fold_constants, move_indices

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
TABLE = torch.empty(5, 7, device="meta")


def read(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(4) + 1
    written = table.clone()
    written[positions] = 0
    pairs = table[:, index.flatten()[:4]].T + table[positions, index.flatten()[0]][:, None]
    return written[positions] * 2 + table[positions] + pairs.sum()


def moves(trace: Trace) -> list[str]:
    return [bound.args[0].name for bound in trace.bound_symbols if bound.symbol is torchlang.to]


def test_each_index_is_moved_once() -> None:
    moved = move_indices(forge.trace(read, TABLE, torch.tensor([[0, 1], [2, 3]])))
    assert len(moves(moved)) == len(set(moves(moved))) == 2  # the number is not among them
    indexed = [bound for bound in moved.bound_symbols if bound.symbol in (torchlang.getitem, torchlang.setitem)]
    indices = [leaf for bound in indexed for leaf in tensors(bound.args[1]) if leaf.ndim]
    assert len(indices) == 5 and {leaf.device.type for leaf in indices} == {"meta"}


def test_positions_become_constants_on_the_device() -> None:
    moved = move_indices(forge.trace(lambda table: table[torch.arange(4) + 1], TABLE))
    folded = fold_constants(moved, run=lambda trace: [torch.empty(4, dtype=torch.long, device="meta")])
    assert [bound.symbol for bound in folded.bound_symbols] == [torchlang.getitem]


def test_indices_on_the_device_stay() -> None:
    trace = forge.trace(read, torch.empty(5, 7), torch.tensor([[0, 1], [2, 3]]))
    assert move_indices(trace) is trace


@pytest.mark.parametrize("freeze", [False, True])
def test_a_constant_has_no_name_of_a_result_that_is_a_view(freeze: bool) -> None:
    """The epilogue makes the returned view, and was named before the constant."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(4, 7, device="meta"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight.T[torch.arange(3).flip(0)] @ x).transpose(0, 1)

    with torch.no_grad():
        assert forge.jit(Model(), freeze=freeze)(torch.empty(4, 5, device="meta")).shape == (5, 3)


@NEEDS_GPU
@pytest.mark.parametrize("size", [5, 6])
def test_results_are_eagers(size: int) -> None:
    table = torch.randn(size, 7, device="cuda", requires_grad=True)
    index = torch.tensor([[0, 1], [2, 3]])
    jitted = forge.jit(read)
    actual, expected = jitted(table, index), read(table, index)
    torch.testing.assert_close(actual, expected)
    found, wanted = (torch.autograd.grad(each.sum(), table)[0] for each in (actual, expected))
    torch.testing.assert_close(found, wanted)
