"""Jitted models under DistributedDataParallel: gradients leave the backward in parts, so that communication
overlaps."""

import pytest
import torch
from distributed_programs import accumulated, compiled_at, in_buckets, parts_again, quantized
from two_processes import Pair


@pytest.mark.parametrize("executors", [["torch"], None], ids=["torch", "default executors"])
def test_gradients_are_sent_before_earlier_layers_have_theirs(executors: list[str] | None, pair: Pair) -> None:
    for found in pair.run(in_buckets, executors):
        assert found["broken"] == []
        for gradients in found["forge"]:
            torch.testing.assert_close(gradients, found["eager"], rtol=1e-4, atol=1e-5)
        events = found["events"]
        for layer in (3, 2, 1):  # its gradient is ready and being sent before the products of earlier layers
            there = events.index(f"layer {layer}")
            after = events[there : events.index(f"layer {layer - 1}")]
            assert "mm" in after
            assert "allreduce_" in after
            assert after.index("allreduce_") < after.index("mm")
        of_eager, of_forge = found["copies"]
        assert of_eager == of_forge > 0  # to the buckets and back: parameters own the backward's results


def test_small_gradients_leave_together(pair: Pair) -> None:
    for found in pair.run(in_buckets, ["torch"], 25.0):
        *_, last = (i for i, event in enumerate(found["events"]) if event == "mm")
        assert last > found["events"].index("layer 3")  # the first part is of a mebibyte
        assert {"layer 0", "layer 1", "layer 2"} <= set(found["events"][last + 1 :])
        for gradients in found["forge"]:
            torch.testing.assert_close(gradients, found["eager"])


def test_parts_are_computed_again_alone_and_with_a_history(pair: Pair) -> None:
    for found in pair.run(parts_again):
        torch.testing.assert_close(found["forge"], found["eager"], rtol=1e-4, atol=1e-4)


def test_gradients_accumulate_with_checkpoints_unused_parameters_and_autocast(pair: Pair) -> None:
    for found in pair.run(accumulated):
        assert len(found["eager"]) > 4
        torch.testing.assert_close(found["forge"], found["eager"])


HALVES = ["linear", "relu", "linear"]


@pytest.mark.filterwarnings("ignore:forge. nothing of")
@pytest.mark.parametrize(
    ("place", "operations"),
    [("DDP outside", HALVES), ("DDP outside, of a Sequential", []), ("DDP inside", HALVES)],
)
def test_what_of_a_data_parallel_model_is_compiled(place: str, operations: list[str], pair: Pair) -> None:
    for found in pair.run(compiled_at, place):
        assert found["operations"] == operations
        assert not found["outside"]


def test_what_runs_in_eager_around_sharded_blocks_is_told(pair: Pair) -> None:
    for found in pair.run(compiled_at, "FSDP, each block"):
        assert found["operations"] == HALVES * 2
        assert found["outside"] == ["forward (Blocks.forward)", "embed (Linear)"]
        assert "outside of what is jitted: forward (Blocks.forward)" in found["text"]
        assert found["breaks"] == []  # the hooks that gather parameters run around the compiled forward


def test_a_sharded_model_that_calls_its_blocks_in_a_loop_runs_in_eager_itself_and_that_is_told(pair: Pair) -> None:
    for found in pair.run(compiled_at, "FSDP outside"):
        assert "tanh" not in found["operations"] and "relu" in found["operations"]
        (reason,) = found["skipped"]
        assert reason.startswith("Blocks.forward (distributed_programs.py:") and "a graph break in a loop: " in reason
        assert "no graph of: Blocks.forward" in found["text"]


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_quantized_weights_are_sent_once_and_biases_are_trained(name: str, pair: Pair) -> None:
    first, second = pair.run(quantized, name)
    torch.testing.assert_close(first["weights"], second["weights"], rtol=0, atol=0)
    for found in (first, second):
        assert set(found["forge"]) == {"0.bias", "2.bias"}
        torch.testing.assert_close(found["forge"], found["eager"])
