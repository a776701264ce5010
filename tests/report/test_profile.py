"""The profile of forge.explain(profile=True): the time of each call."""

import json
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge


def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ weight).sum()


def trained(**options: object) -> forge.Explanation:
    jitted = forge.jit(step, **options)
    jitted(torch.randn(4, 8), torch.randn(8, 16, requires_grad=True)).backward()
    return forge.explain(jitted, profile=True)


def test_every_operation_of_torch_has_its_time_and_memory() -> None:
    told = trained(executors=["torch"])
    assert [(row.phase, row.operation) for row in told.costs] == [(row.phase, row.operation) for row in told.rows]
    assert all(row.seconds > 0 for row in told.costs)
    by_operation = {row.operation: row.bytes for row in told.costs if row.phase == "forward"}
    assert by_operation == {
        "torch.matmul": 4 * 16 * 4,
        "torch.nn.functional.gelu": 4 * 16 * 4,
        "torch.sum": 4,
    }
    assert next(row.bytes for row in told.costs if "broadcast" in row.operation) == 0  # a view


def test_a_fusion_is_one_call() -> None:
    told = trained(executors=["inductor", "torch"])
    regions = {region for _, _, region in told.regions}
    assert regions and regions <= {row.operation for row in told.costs}
    assert len({(row.phase, row.outputs) for row in told.costs}) == len(told.costs)


def test_the_text_says_where_the_time_goes_and_the_json_has_it() -> None:
    told = trained(executors=["torch"])
    lines = str(told).splitlines()
    (forward,) = [line for line in lines if line.startswith("forward: ")]
    assert forward.endswith(" (torch 100%)")
    head = lines[lines.index(forward) + 1].split()
    assert head[-3:] == ["time", "memory", "source"]
    assert json.loads(told.to_json())["costs"][0]["operation"] == "torch.matmul"
    assert "time" not in str(trained_without_profile())


def trained_without_profile() -> forge.Explanation:
    jitted = forge.jit(step, executors=["torch"])
    jitted(torch.randn(4, 8), torch.randn(8, 16, requires_grad=True)).backward()
    return forge.explain(jitted)


def test_nothing_of_the_user_changes() -> None:
    """Neither the statistics of a norm nor random numbers change."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    jitted = forge.jit(model, executors=["torch"])
    jitted(torch.randn(3, 4)).sum().backward()
    before = [each.clone() for each in model.buffers()]
    random = torch.get_rng_state()
    told = forge.explain(jitted, profile=True)
    assert {row.phase for row in told.costs} == {"forward", "backward"} and not told.unprofiled
    assert all(map(torch.equal, model.buffers(), before))
    assert torch.equal(torch.get_rng_state(), random)


def test_lengths_that_are_symbols_are_as_they_were() -> None:
    jitted = forge.jit(lambda x: F.softmax(x * 2, -1), executors=["torch"], dynamic=True)
    jitted(torch.randn(5, 7))
    assert [row.bytes for row in forge.explain(jitted, profile=True).costs] == [5 * 7 * 4] * 2


@torch.library.custom_op("forge_profile::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    calls.append(x)
    return x.clone()


@noisy.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


calls: list[torch.Tensor] = []


def test_what_may_do_more_than_compute_is_not_run_again() -> None:
    jitted = forge.jit(lambda x: noisy(x * 2))
    jitted(torch.randn(3))
    count = len(calls)
    told = forge.explain(jitted, profile=True)
    assert len(calls) == count
    assert [row.operation for row in told.costs] == ["torch.mul"]
    (reason,) = told.unprofiled
    assert reason.startswith("graph 0: torch.ops.forge_profile.noisy") and reason.endswith("may do more than compute")
    assert "not profiled: graph 0" in str(told)


SCALE, ZERO = torch.full((1,), 0.5), torch.zeros(1)


def differentiated(function: Callable) -> forge.Explanation:
    jitted = forge.jit(lambda x: function(x * 2).exp().sum(), executors=["torch"])
    jitted((torch.eye(3) * 2 + 1.5).requires_grad_()).backward()
    return forge.explain(jitted, profile=True)


def test_an_opaque_call_of_torchs_own_is_one_call() -> None:
    told = differentiated(lambda x: torch._fake_quantize_learnable_per_tensor_affine(x, SCALE, ZERO, -8, 7))
    assert told.opaque_calls and not told.unprofiled
    assert [(row.phase, row.operation) for row in told.costs] == [(row.phase, row.operation) for row in told.rows]
    random = differentiated(torch.vmap(lambda row: row * torch.rand_like(row), randomness="different"))
    assert random.opaque_calls and not random.unprofiled


def test_an_opaque_call_that_takes_no_random_values_is_left_out() -> None:
    """It is a random transform of a function that requires positive definite matrices."""
    random = torch.vmap(lambda x: torch.linalg.cholesky(x) * torch.rand_like(x), randomness="different")
    told = differentiated(lambda x: random((x - 3).expand(2, 3, 3)))
    of_others = [row.operation for row in told.costs]
    assert "torch.exp" in of_others and "torch.mul" in of_others
    (reason,) = told.unprofiled
    assert "is an opaque call: the function takes no random values: " in reason
    assert {row.phase for row in told.costs} == {"forward", "backward"}


def test_a_backward_that_gives_its_gradients_in_parts_is_measured_as_a_whole() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        jitted = forge.jit(nn.Sequential(*[nn.Linear(600, 600) for _ in range(3)]), executors=["torch"])
        model = nn.parallel.DistributedDataParallel(jitted, bucket_cap_mb=1)
        model(torch.randn(2, 600)).sum().backward()
        assert "yield" in str(forge.last_backward_traces(jitted)[-1])
        told = forge.explain(jitted, profile=True)
    finally:
        torch.distributed.destroy_process_group()
    assert not told.unprofiled
    backward = [row for row in told.rows if row.phase == "backward"]
    assert [row.operation for row in told.costs if row.phase == "backward"] == [row.operation for row in backward]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_cuda_graphs_are_not_taken_apart() -> None:
    jitted = forge.jit(step, cuda_graphs=True)
    for _ in range(8):
        jitted(torch.randn(4, 8, device="cuda"), torch.randn(8, 16, device="cuda", requires_grad=True)).backward()
    assert "CUDA graphs" in forge.explain(jitted, profile=True).unprofiled[0]


def test_a_position_that_each_call_moves_on_is_within_its_cache() -> None:
    def write(cache: torch.Tensor, position: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, position, new)
        position += 1
        return cache.sum()

    jitted = forge.jit(write, executors=["torch"])
    jitted(torch.zeros(2, 4), torch.tensor([0]), torch.ones(1, 4))
    told = forge.explain(jitted, profile=True)
    assert told.unprofiled == []
    assert [row.operation for row in told.costs if "index_copy" in row.operation]
