"""Functional collectives in programs: values, gradients, and the same order of communication in every process."""

import pytest
import torch
from distributed_programs import COLLECTIVES, collective, of_a_result, order_of_collectives
from two_processes import Pair

from forge.torch_internals.versions import TORCH

OPAQUE = {
    "several at once": ["torch.ops._c10d_functional.all_reduce_coalesced"],
    "broadcast": ["torch.ops._c10d_functional.broadcast"],
}
_BROKEN = () if TORCH >= (2, 13) else ("all_gather along dim 1",)  # before torch 2.13, Dynamo does not trace it


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_has_the_values_and_the_gradient_of_eager(name: str, pair: Pair) -> None:
    for found in pair.run(collective, name):
        torch.testing.assert_close(found["forge"], found["eager"])
        assert found["broken"] == [] or name in _BROKEN
        assert found["opaque"] == OPAQUE.get(name, [])


def test_a_result_under_way_is_an_input_as_any_other(pair: Pair) -> None:
    for found in pair.run(of_a_result):
        assert found["broken"] == [] and found["warned"] == []
        assert found["regions"] == 5  # two forwards and their backwards, and one without gradients
        torch.testing.assert_close(found["forge"], found["eager"])


def test_no_pass_drops_merges_or_reorders_collectives(pair: Pair) -> None:
    """Neither equal calls, nor unused results, nor the executors change that. Waits may move."""
    found, other = pair.run(order_of_collectives)
    started = [[name for name in calls if name != "wait_tensor"] for calls in found]
    assert started == [[name for name in calls if name != "wait_tensor"] for calls in other]
    assert started[0] == ["all_reduce", "all_reduce", "all_reduce", "all_gather_into_tensor"]
    assert started[1] == ["reduce_scatter_tensor", "all_reduce", "all_reduce"]
    for calls in (*found, *other):
        assert calls.count("wait_tensor") == len(calls) // 2
