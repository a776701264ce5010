"""Sharding by forge.distributed.shard: parameters are DTensors, gathered and freed by the program; FSDP2 is the
reference."""

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_programs import PLANS
from sharded_programs import (
    MODELS,
    REFUSED,
    checkpointed,
    checkpoints_of_two_dims,
    converted_inputs,
    copied,
    higher_gradients,
    messages_in_text,
    order_of_messages,
    refused,
    trained,
    trained_as_replicas,
    trained_on_two_dims,
    trained_small_transformer,
    transformed_by_torch_func,
    unequal_batches,
    with_a_graph_break,
    with_a_number,
    without_gradients,
)
from torch import nn
from two_processes import Pair

from forge.distributed import ShardPolicy, shard
from forge.torch_internals.versions import TORCH

HALF = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def _check(found: dict[str, Any], **tolerances: float) -> None:
    assert found["broken"] == [] and found["opaque"] == [] and found["graphs"] == 1
    torch.testing.assert_close(found["eager"], found["fsdp2"], **tolerances)
    torch.testing.assert_close(found["forge"], found["fsdp2"], **tolerances)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.one_in(4)
def test_a_sharded_model_trains_as_under_fsdp2(kind: str, pair: Pair) -> None:
    for found in pair.run(trained, kind):
        _check(found, rtol=1e-4, atol=1e-5)


def test_gradients_accumulate(pair: Pair) -> None:
    for found in pair.run(trained, "Llama", 2):
        _check(found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["Llama", "Uneven"])
def test_parameters_are_read_in_half_precision_and_gradients_reduced_in_float32(kind: str, pair: Pair) -> None:
    for found in pair.run(trained, kind, 1, HALF, ["torch"]):
        _check(found, rtol=1e-5, atol=1e-6)


def test_inputs_are_converted_to_the_dtype_of_parameters(pair: Pair) -> None:
    for found in pair.run(converted_inputs):
        assert found == [torch.bfloat16, torch.float32, torch.float32]


def test_a_model_of_transformers_is_one_graph(pair: Pair) -> None:
    for found in pair.run(trained_small_transformer):
        assert found["broken"] == [] and found["opaque"] == [] and found["graphs"] == 1
        torch.testing.assert_close(found["forge"], found["fsdp2"], rtol=1e-4, atol=1e-5)


def test_a_parameter_without_dims_is_whole_in_every_process(pair: Pair) -> None:
    for averaged, eager, ours in pair.run(with_a_number):
        torch.testing.assert_close([eager, ours], [averaged, averaged])


@pytest.mark.skipif(TORCH < (2, 13), reason="the gradient of DTensor.to_local has no derivative in this torch")
@pytest.mark.parametrize("order", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_gradients_have_gradients_as_in_one_process(order: int, pair: Pair) -> None:
    for found in pair.run(higher_gradients, order):
        for how in ("eager", "forge"):
            torch.testing.assert_close(found[how], found["one"], rtol=1e-4, atol=1e-5)


def test_transforms_of_torch_func_are_those_of_one_process(pair: Pair) -> None:
    for found in pair.run(transformed_by_torch_func):
        for how in ("eager", "forge"):
            torch.testing.assert_close(found[how], found["one"], rtol=1e-4, atol=1e-5)


def test_what_runs_in_eager_between_graphs_reads_whole_parameters(pair: Pair) -> None:
    for found in pair.run(with_a_graph_break):
        assert found["broken"]
        assert found["outside"] == ["DTensor", "DTensor"]
        torch.testing.assert_close(found["forge"], found["eager"], rtol=1e-4, atol=1e-5)


def test_a_sharded_model_computes_without_gradients(pair: Pair) -> None:
    for found in pair.run(without_gradients):
        assert found["broken"] == []
        torch.testing.assert_close(found["forge"], found["eager"])


@pytest.mark.slow
def test_a_copy_is_a_model_of_its_own(pair: Pair) -> None:
    for first, second in pair.run(copied):
        torch.testing.assert_close(first, second)


# messages


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("bucket_mb", [0.001, pytest.param(0.004, marks=pytest.mark.slow)])
@pytest.mark.one_in(3)
def test_processes_send_in_one_order_whatever_their_executors(kind: str, bucket_mb: float, pair: Pair) -> None:
    first, second = pair.run(order_of_messages, kind, bucket_mb)
    assert first[0] == second[0] and len(first[0]) > 2
    torch.testing.assert_close(first[1], second[1], rtol=1e-4, atol=1e-5)


def _starts(calls: list[tuple[str, list[str]]], name: str) -> list[list[str]]:
    return [names for called, names in calls if called == name]


def test_messages_gather_several_parameters_ahead_of_their_use(pair: Pair) -> None:
    for found in pair.run(messages_in_text, bucket_mb=0.004, prefetch_mb=0.004):
        for phase in ("forward", "backward"):
            calls = found[phase]
            started = _starts(calls, "start_unshard")
            assert len(started) > 3 and max(map(len, started)) > 1
            products = [i for i, (name, _) in enumerate(calls) if name in ("linear", "matmul", "mm")]
            places = {name: [i for i, (each, _) in enumerate(calls) if each == name] for name in dict(calls)}
            pairs = list(zip(places["start_unshard"], places["finish_unshard"], strict=True))
            overlapped = [any(start < i < finish for i in products) for start, finish in pairs]
            assert sum(overlapped) >= len(pairs) - 2  # the first has nothing to overlap with
            assert all(sum(other < start < end for other, end in pairs) <= 1 for start, _ in pairs)  # one is ahead
        reduced = _starts(found["backward"], "start_reduce")
        assert len(reduced) > 3 and found["backward"][-1][0] == "finish_reduce"
        pairs = list(zip(places["start_reduce"], places["finish_reduce"], strict=True))
        assert {sum(start < other < end for other, _ in pairs) for start, end in pairs} == {0, 1}  # one follows
        gathered = {name for names in _starts(found["forward"], "start_unshard") for name in names}
        again = {name for names in _starts(found["backward"], "start_unshard") for name in names}
        assert again and again < gathered  # the embedding's weight is not read


@pytest.mark.parametrize("reshard", [True, False])
def test_the_backward_gathers_again_what_the_policy_says(reshard: bool, pair: Pair) -> None:
    for found in pair.run(messages_in_text, reshard_after_forward=reshard):
        assert bool(_starts(found["backward"], "start_unshard")) is reshard
        assert _starts(found["backward"], "start_reduce")


def test_what_fits_a_bucket_is_one_message(pair: Pair) -> None:
    for found in pair.run(messages_in_text):
        assert len(_starts(found["forward"], "start_unshard")) == 1
        assert len(_starts(found["backward"], "start_reduce")) == 1


@pytest.mark.parametrize(
    ("policy", "gathered", "processes", "bucket", "prefetch"),
    [
        (ShardPolicy(), 2**30, 8, 64, 128),
        (ShardPolicy(), 2**37, 8, 64, 128),
        (ShardPolicy(), 2**37, 64, 512, 1024),
        (ShardPolicy(), 2**37, 4096, 1024, 2048),
        (ShardPolicy(), 2**31, 4096, 128, 256),
        (ShardPolicy(bucket_mb=3), 2**37, 64, 3, 6),
        (ShardPolicy(bucket_mb=3, prefetch_mb=1), 2**37, 64, 3, 1),
    ],
)
def test_buckets_grow_with_the_processes_up_to_a_part_of_the_model(
    policy: ShardPolicy, gathered: int, processes: int, bucket: int, prefetch: int
) -> None:
    assert policy.limits(gathered, processes) == (bucket * 2**20, prefetch * 2**20)


def test_processes_have_unequal_batches(pair: Pair) -> None:
    for found in pair.run(unequal_batches):
        torch.testing.assert_close(found["shard"], found["fsdp2"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found["ddp"], found["fsdp2"], rtol=1e-4, atol=1e-5)


# meshes of two dims


def _check_on_two_dims(found: dict[str, Any]) -> None:
    _check(found, rtol=1e-4, atol=1e-5)
    placements = found["placements"]
    assert placements["forge"] == placements["eager"] == placements["fsdp2"]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "shape", [pytest.param((1, 2), id="tensor", marks=pytest.mark.slow), pytest.param((2, 1), id="data")]
)
@pytest.mark.one_in(3)
def test_parallel_products_are_sharded_as_under_fsdp2(shape: tuple[int, int], plan: str, pair: Pair) -> None:
    for found in pair.run(trained_on_two_dims, shape, plan):
        _check_on_two_dims(found)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_a_mesh_of_two_by_two(plan: str, tmp_path: Path) -> None:
    processes = Pair(tmp_path, size=4)
    try:
        for found in processes.run(trained_on_two_dims, (2, 2), plan):
            _check_on_two_dims(found)
    finally:
        processes.end()


@pytest.mark.parametrize("kind", ["Uneven", "Mixed"])
def test_gradients_are_averaged_over_replicas(kind: str, pair: Pair) -> None:
    for found in pair.run(trained_as_replicas, (2, 1), kind):
        _check_on_two_dims(found)
        assert found["rows"].count(("reduce_scatter", 1)) == found["rows"].count(("all_reduce", 2)) > 0


@pytest.mark.slow
def test_parameters_are_sharded_over_replicas(tmp_path: Path) -> None:
    processes = Pair(tmp_path, size=4)
    try:
        for found in processes.run(trained_as_replicas, (2, 2)):
            _check_on_two_dims(found)
    finally:
        processes.end()


def test_checkpoints_of_parallel_products_are_those_of_fsdp2(pair: Pair, tmp_path: Path) -> None:
    assert pair.run(checkpoints_of_two_dims, str(tmp_path)) == [True, True]


# checkpoints and errors


def test_checkpoints_are_those_of_fsdp2_and_of_plain_models(pair: Pair, tmp_path: Path) -> None:
    for found in pair.run(checkpointed, str(tmp_path)):
        assert found == dict.fromkeys(("to forge", "from forge", "whole", "names", "whole again"), True)


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_sharded_is_refused(what: str, pair: Pair) -> None:
    for message in pair.run(refused, what):
        assert REFUSED[what][2] in message


def test_a_process_group_is_needed() -> None:
    with pytest.raises(RuntimeError, match="shard: there is no process group"):
        shard(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"param_dtype": torch.int8}, "param_dtype is torch.int8, but must be a floating point dtype"),
        ({"reduce_dtype": "float32"}, "reduce_dtype is 'float32'"),
        ({"reshard_after_forward": 2}, "reshard_after_forward is 2, but must be a bool or None"),
        ({"bucket_mb": 0}, "bucket_mb is 0, but must be a positive number"),
        ({"reshard_after_forward": 1}, "reshard_after_forward is 1"),
        ({"bucket_mb": True}, "bucket_mb is True"),
        ({"bucket_mb": float("inf")}, "bucket_mb is inf"),
        ({"prefetch_mb": "1"}, "prefetch_mb is '1', but must be a positive number or None"),
    ],
)
def test_a_policy_is_checked(options: dict[str, Any], match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        ShardPolicy(**options)
