"""Programs on DTensors are compiled to local calls and collectives, for every function of DTensors."""

from typing import Any

import pytest
import torch
from dtensor_programs import (
    FUNCTIONS,
    added_parts_of_several_lengths,
    changed_buffers,
    drawn,
    drawn_beside_a_tracker,
    drawn_by_part,
    gathered_parts_of_several_lengths,
    loss_of_a_cut_vocabulary,
    of_dtensors,
    of_varying_parts,
    uneven,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from two_processes import Pair

import forge
from forge.torch_internals.versions import TORCH

_VIEW = pytest.param(
    "view of a cut dim",
    marks=pytest.mark.skipif(TORCH < (2, 13), reason="torch's DTensors refuse such a view before torch 2.13"),
)


@pytest.mark.parametrize("what", [_VIEW if what in _VIEW.values else what for what in FUNCTIONS])
def test_functions_of_dtensors_are_local_calls_and_collectives(what: str, pair: Pair) -> None:
    for found in pair.run(of_dtensors, what):
        assert found["broken"] == [] and found["opaque"] == []
        assert found["placed"] == found["expected"]
        torch.testing.assert_close(found["forge"], found["eager"])


@pytest.mark.parametrize("how", [{}, {"reduction": "sum"}, {"reduction": "none"}, {"ignore_index": 7}], ids=str)
def test_the_loss_of_a_cut_vocabulary_sends_no_logits(how: dict[str, Any], pair: Pair) -> None:
    for found in pair.run(loss_of_a_cut_vocabulary, how):
        assert found["broken"] == [] and found["opaque"] == []
        assert found["sums"] and not found["gathers"]
        torch.testing.assert_close(found["forge"], found["eager"])


@pytest.mark.parametrize(("place", "seed", "alike"), [(Shard(0), 1, False), (Replicate(), 0, True)], ids=str)
def test_processes_drop_parts_of_their_own_and_what_all_have_together(
    place: Any, seed: int, alike: bool, pair: Pair
) -> None:
    """On CPUs each process draws from its own generator, as in eager."""
    both = pair.run(drawn, place, seed)
    for found in both:
        assert found["broken"] == [] and found["opaque"] == []
        torch.testing.assert_close(found["forge"], found["eager"])
        kept, _, gradient = found["forge"]
        torch.testing.assert_close(kept, gradient)
    for one, other in zip(*[found["forge"] for found in both], strict=True):
        assert torch.equal(one, other) is alike


@pytest.mark.parametrize("place", [Shard(0), Shard(2), Replicate()], ids=str)
def test_parts_are_drawn_by_their_place_where_generators_have_offsets(place: Any, pair: Pair) -> None:
    """The 512 numbers of a part belong to 1024. Attention on CPUs drops scores, whose number differs from that of
    results."""
    for rank, found in enumerate(pair.run(drawn_by_part, place)):
        assert found["broken"] == []
        assert found["opaque"] == ["torch.nn.functional.scaled_dot_product_attention of DTensors"]
        assert found["moves"] == [100, 100 if place.is_replicate() else 100 + 512 * rank, 100 + 1024]
        torch.testing.assert_close(found["forge"], found["eager"])


def test_random_functions_are_captured_once_dtensors_track_generators(pair: Pair) -> None:
    for found in pair.run(drawn_beside_a_tracker):
        assert found["broken"] == [] and found["moves"][-1] == 100 + 1024
        torch.testing.assert_close(found["forge"], found["eager"])


@pytest.mark.parametrize("place", [Shard(0), Replicate()], ids=str)
@pytest.mark.parametrize("lengths", [(8,), (8, 12, 5)], ids=str)
def test_dropout_on_a_gpu_draws_what_eager_does(place: Any, lengths: tuple[int, ...], nccl: None) -> None:
    mesh = init_device_mesh("cuda", (1,))

    def twice(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.dropout(x, 0.5) * 2, 0.25)

    jitted = forge.jit(twice)
    for length in lengths:
        results = []
        for function in (twice, jitted):
            torch.manual_seed(0)
            x = distribute_tensor(torch.ones(4, length, device="cuda"), mesh, [place]).requires_grad_()
            out = function(x)
            out.sum().backward()
            results.append([out.to_local(), x.grad.to_local(), torch.rand(3, device="cuda")])
        torch.testing.assert_close(*results, rtol=0, atol=0)
    told = forge.explain(jitted)
    assert told.opaque_calls == [] and told.graph_breaks + told.eager == []


def test_buffers_that_are_dtensors_change_in_place(pair: Pair) -> None:
    for found in pair.run(changed_buffers):
        assert found["broken"] == [] and found["opaque"] == []
        torch.testing.assert_close(found["forge"], found["eager"])


@pytest.mark.parametrize("plan", ["columns and rows", "sequence"])
@pytest.mark.one_in(2)
def test_a_model_of_uneven_words_trains_as_in_eager(plan: str, pair: Pair) -> None:
    for found in pair.run(uneven, plan):
        assert found["broken"] == [] and found["opaque"] == []
        torch.testing.assert_close(found["forge"], found["eager"])


def test_uneven_parts_of_several_lengths_run_in_eager_with_the_reason(pair: Pair) -> None:
    for values, expected, told in pair.run(of_varying_parts):
        assert len(told) == 1 and "whose length varies has uneven or strided parts" in told[0]
        torch.testing.assert_close(values, expected)


def test_lengths_of_local_tensors_are_read_in_the_backward(pair: Pair) -> None:
    for gradients, graphs in pair.run(gathered_parts_of_several_lengths):
        assert graphs == 2  # the second is of all lengths
        for gradient in gradients:
            torch.testing.assert_close(gradient, torch.arange(float(gradient.shape[1])).expand(2, -1))


def test_operators_of_dtensors_are_found_for_several_lengths(pair: Pair) -> None:
    for found in pair.run(added_parts_of_several_lengths):
        assert found["broken"] == []
        torch.testing.assert_close(found["forge"], found["eager"])
