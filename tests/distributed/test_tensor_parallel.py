"""Tensor parallelism: programs on DTensors are compiled as programs on the tensors inside."""

from pathlib import Path

import pytest
import torch
from distributed_programs import (
    CUT,
    PLANS,
    of_cut_tensors,
    of_several_lengths,
    other_mesh,
    tensor_parallel,
    without_gradients,
)
from plan_programs import FAMILIES, planned
from two_processes import Pair

from tests.markers import slow_except


@pytest.mark.parametrize("plan", PLANS)
def test_a_parallel_model_trains_as_in_eager(plan: str, pair: Pair) -> None:
    for found in pair.run(tensor_parallel, plan):
        assert found["broken"] == []
        assert found["opaque"] == []
        assert {"torch.nn.functional.silu", "prims.wait_tensor"} <= found["operations"] and found["regions"]
        torch.testing.assert_close(found["forge"], found["eager"])


@pytest.mark.parametrize("plan", slow_except(PLANS, "columns and rows"))
@pytest.mark.slow
def test_sizes_are_symbolic_in_a_parallel_model(plan: str, pair: Pair) -> None:
    for found in pair.run(of_several_lengths, plan):
        assert found["broken"] == [] and found["opaque"] == []
        assert found["graphs"] == 2  # the second is of all lengths
        torch.testing.assert_close(found["forge"], found["eager"])


@pytest.mark.parametrize("what", CUT)
@pytest.mark.one_in(3)
def test_functions_of_cut_tensors_are_those_of_the_tensors_inside(what: str, pair: Pair) -> None:
    for found in pair.run(of_cut_tensors, what):
        assert found["broken"] == [] and found["opaque"] == []
        torch.testing.assert_close(found["forge"], found["eager"])


# transformers' own operator, which it calls if torch has no kernel for the dtype on the device
_TRANSFORMERS = {"torch.ops.transformers.grouped_mm_fallback"}


@pytest.mark.parametrize("family", slow_except(["llama", "qwen3", "mixtral"], "llama"))
def test_plans_of_transformers_compile(family: str, pair: Pair, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers loads parts of weights by accelerate")
    for found in pair.run(planned, family, str(tmp_path)):
        assert found["broken"] == [] and set(found["opaque"]) <= _TRANSFORMERS
        torch.testing.assert_close(found["forge"], found["eager"])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_all_plans_of_transformers_compile(family: str, pair: Pair, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers loads parts of weights by accelerate")
    for found in pair.run(planned, family, str(tmp_path), ["torch"]):
        assert found["broken"] == [] and set(found["opaque"]) <= _TRANSFORMERS
        torch.testing.assert_close(found["forge"], found["eager"])


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_regions_of_a_parallel_model_have_the_tensors_inside(plan: str, pair: Pair) -> None:
    for found in pair.run(tensor_parallel, plan, ["inductor", "torch"]):
        torch.testing.assert_close(found["forge"], found["eager"], rtol=1e-4, atol=1e-5)


def test_the_processes_programs_are_kept_apart(pair: Pair, tmp_path: Path) -> None:
    """A program contains its process's rank in the group, so the other process must not find it on disk."""
    for again in (False, True):
        for found in pair.run(tensor_parallel, "columns and rows", None, str(tmp_path)):
            assert found["cached"] is again
            torch.testing.assert_close(found["forge"], found["eager"])


def test_a_parallel_model_computes_without_gradients(pair: Pair) -> None:
    for found in pair.run(without_gradients):
        assert found["broken"] == []
        torch.testing.assert_close(found["forge"], found["eager"])


def test_another_mesh_is_another_program(pair: Pair) -> None:
    for values, expected in pair.run(other_mesh):
        torch.testing.assert_close(values, expected)
