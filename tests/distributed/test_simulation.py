"""Simulation by forge.distributed.simulate: a training step of many processes in one that allocates and sends
nothing."""

import dataclasses
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import forge
from forge import torchlang
from forge.distributed import Hardware, ShardPolicy, Simulation, fake_processes, shard, simulate
from forge.executors.executor import OperatorExecutor

WIDTH, LAYERS, RANKS = 1024, 6, 8
HALF = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
ALL = LAYERS * 2 * 4 * WIDTH * WIDTH


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[Block(width) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).float().square().mean()


def simulated(model: type[nn.Module] = Stack, ranks: int = RANKS, rank: int = 0, **options: Any) -> Simulation:
    """Simulate a step of a model on `ranks` processes. options: of the policy, `hardware` and `executors`."""
    hardware, executors = options.pop("hardware", None), options.pop("executors", None)
    with fake_processes(ranks, rank):
        with torch.device("meta"):
            jitted = forge.jit(shard(model(), policy=ShardPolicy(**{**HALF, **options})), executors=executors)
            x = torch.empty(512, WIDTH)
        return simulate(jitted, (x,), hardware=hardware)


# bytes


def test_a_ring_sends_all_but_one_part_of_what_is_gathered_and_reduced() -> None:
    simulation = simulated()
    share = (RANKS - 1) / RANKS
    assert simulation.parameters == ALL
    first = 4 * WIDTH * WIDTH  # whose weight is not read by any gradient
    assert simulation.sent_bytes("all_gather") == (2 * ALL - first) * 2 * share
    assert simulation.sent_bytes("reduce_scatter") == ALL * 4 * share


def test_parameters_that_are_not_gathered_again_are_sent_once() -> None:
    simulation = simulated(reshard_after_forward=False)
    assert simulation.sent_bytes("all_gather") == ALL * 2 * (RANKS - 1) / RANKS
    assert simulation.phases[0].peak_bytes > simulated().phases[0].peak_bytes


def test_gradients_of_half_precision_are_half_the_bytes() -> None:
    assert simulated(reduce_dtype=None).sent_bytes("reduce_scatter") == ALL * 2 * (RANKS - 1) / RANKS


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(WIDTH, 9, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.only(x).float().mean()


def test_ranks_of_uneven_parts_differ_in_memory_and_send_alike() -> None:
    first, last = simulated(Uneven, ranks=4), simulated(Uneven, ranks=4, rank=3)
    assert first.parameter_bytes == last.parameter_bytes == [3 * WIDTH * 4] * 3 + [0]
    assert first.optimizer_bytes == [2 * size for size in first.parameter_bytes]
    assert "GB of them by rank  0-3: 0.000" in str(first)
    assert first.sent_bytes("all_gather") == last.sent_bytes("all_gather") == 3 * 3 * WIDTH * 2
    assert last.rank == 3
    assert last.phases[-1].peak_bytes < first.phases[-1].peak_bytes


# the policy


def test_larger_buckets_are_fewer_messages_and_expose_less() -> None:
    small, large = simulated(bucket_mb=1), simulated(bucket_mb=32)
    assert len(large.messages) < len(small.messages)
    assert large.exposed_seconds < small.exposed_seconds
    assert large.seconds < small.seconds


def test_gathering_ahead_exposes_less_and_takes_memory() -> None:
    near, far = simulated(bucket_mb=8, prefetch_mb=1), simulated(bucket_mb=8, prefetch_mb=64)
    assert far.phases[0].exposed_seconds < near.phases[0].exposed_seconds
    assert far.phases[0].peak_bytes > near.phases[0].peak_bytes


def test_more_nodes_take_longer_to_gather() -> None:
    near, far = simulated(ranks=8), simulated(ranks=64)
    assert len(near.messages) == len(far.messages)
    for one, other in zip(near.messages, far.messages, strict=True):
        assert other.end - other.start > one.end - one.start
    assert far.exposed_seconds > near.exposed_seconds


# other collectives


def test_a_tensor_parallel_model_sums_its_results_within_the_step() -> None:
    """A block's result is all-reduced, in a ring with twice as many steps."""
    with fake_processes(RANKS):
        with torch.device("meta"):
            model, x = Stack(layers=2), torch.empty(512, WIDTH)
        plan = {}
        for name in ("layers.0", "layers.1"):
            plan |= {f"{name}.up": ColwiseParallel(), f"{name}.down": RowwiseParallel()}
        mesh = torch.distributed.init_device_mesh("cpu", (RANKS,))
        simulation = simulate(forge.jit(parallelize_module(model, mesh, plan)), (x,))
    size, share = 512 * WIDTH * 4, (RANKS - 1) / RANKS
    forward = [each for each in simulation.messages if each.phase == "forward"]
    assert [(each.operation, each.sent) for each in forward] == [("all_reduce", 2 * size * share)] * 2
    assert forward[0].exposed == forward[0].end - forward[0].start  # nothing overlaps with it
    assert simulation.parameter_bytes[0] == 2 * 2 * 4 * WIDTH * WIDTH * 4 / RANKS


# time


def test_a_message_takes_a_latency_for_each_step_of_its_ring_and_its_bytes() -> None:
    hardware = Hardware(link_efficiency=1, message_seconds=1, node_step_seconds=10, network_step_seconds=100)
    assert hardware.message_time(900e9, 7, range(8)) == 1 + 7 * 10 + 2
    assert hardware.message_time(800e9, 15, range(16)) == 1 + 14 * 10 + 100 + 2  # 8 cards are slower than NVLink
    assert hardware.message_time(100e9, 1, [0, 8]) == 1 + 100 + 2  # one ring, through one card


def test_a_message_of_a_program_takes_the_steps_of_its_ring() -> None:
    hardware = Hardware(node_bandwidth=1e30, message_seconds=1, node_step_seconds=10)
    assert {each.end - each.start for each in simulated(hardware=hardware).messages} == {1 + 7 * 10}


def test_messages_take_their_turn() -> None:
    messages = simulated(bucket_mb=1).messages
    assert all(one.end <= other.start for one, other in pairwise(messages))
    assert any(one.end == other.start for one, other in pairwise(messages))


def test_a_device_that_never_waits_exposes_nothing() -> None:
    free = {"link_efficiency": 1, "message_seconds": 0, "node_step_seconds": 0, "network_step_seconds": 0}
    hardware = Hardware(node_bandwidth=1e30, network_bandwidth=1e30, **free)
    simulation = simulated(hardware=hardware)
    assert simulation.exposed_seconds < 1e-9
    assert simulation.seconds == pytest.approx(sum(each.compute_seconds for each in simulation.phases))


def test_products_take_as_long_as_their_operations() -> None:
    """Two products of 2 × 512 × 4 × WIDTH² operations per layer and forward; twice that in the backward, except for the
    gradient of the input."""
    hardware = Hardware(flops=1e9, flops_efficiency=1, memory_bandwidth=1e30, kernel_seconds=0)
    forward, backward, _ = simulated(hardware=hardware).phases
    product = 2 * 512 * 4 * WIDTH**2 / 1e9
    assert forward.compute_seconds == pytest.approx(LAYERS * 2 * product)
    assert backward.compute_seconds == pytest.approx((2 * LAYERS * 2 - 1) * product)


def test_a_function_of_others_does_not_run_and_takes_as_long_as_its_bytes() -> None:
    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a kernel reads memory, which a fake tensor does not have")

    mine = OperatorExecutor("mine")
    mine.register_implementation(torchlang.silu, refuse)
    own, torchs = (simulated(executors=[*first, "torch"]).phases[0] for first in ([mine], []))
    assert own.compute_seconds == pytest.approx(torchs.compute_seconds)
    assert own.peak_bytes == torchs.peak_bytes


def test_hardware_is_of_positive_numbers() -> None:
    with pytest.raises(ValueError, match="Hardware: memory_bandwidth is -1, but must be a positive number"):
        Hardware(memory_bandwidth=-1)


# memory


class Tracker(MemTracker):
    """A memory tracker of torch under which forge runs its programs, without hooks on all modules."""

    def __init__(self) -> None:
        super().__init__()
        self._mod_tracker = mock.MagicMock(parents=set(), is_bw=False)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


@pytest.fixture
def processes() -> Iterator[None]:
    with fake_processes(4):
        yield


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("rows", [4, 256], ids=["parameters", "activations"])
@pytest.mark.parametrize("width", [64, 66], ids=["even", "uneven"])
def test_the_peak_is_what_torchs_memory_tracker_sees(width: int, rows: int) -> None:
    """The step runs with torch's functions only, because the tracker does not see the allocations of Inductor's code.
    With few rows, most memory is that of parameters; with many, that of activations."""
    policy = ShardPolicy(**HALF, bucket_mb=0.1, prefetch_mb=0.1)
    model = forge.jit(shard(Stack(width, 4), policy=policy), executors=["torch"], cache=False)
    x = torch.randn(rows, width)
    simulation = simulate(model, (x,), optimizer_tensors=0)
    model(x).backward()  # compiled
    model.zero_grad()
    tracker = Tracker()
    tracker.track_external(model, x)
    with tracker:
        model(x).backward()
    seen = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert simulation.peak_bytes == pytest.approx(seen, rel=0.01)


class WithResult(Stack):
    """A model that also returns a value that the step does not need, like the logits of transformers' models."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.layers(x)
        return x.float().square().mean(), torch.cat([x] * 256)


def test_results_that_are_no_loss_are_freed_before_the_backward() -> None:
    plain, more = simulated(), simulated(WithResult)
    assert more.phases[0].peak_bytes > plain.phases[0].peak_bytes
    assert more.phases[1].peak_bytes == plain.phases[1].peak_bytes


class Wide(nn.Module):
    rows = 8 * WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(WIDTH, self.rows, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.only(x).float().mean()


class Wider(Wide):
    rows = Wide.rows + 1


def test_a_gradient_whose_rows_are_uneven_is_copied_once() -> None:
    assert simulated(Wider).peak_bytes < 1.01 * simulated(Wide).peak_bytes


def _exposed(simulation: Simulation) -> list[str]:
    """Return the last line of the table: the milliseconds of each phase and of the step, and a fraction."""
    seconds = [each.exposed_seconds for each in simulation.phases]
    share = sum(seconds) / simulation.seconds
    return [*[f"{each * 1e3:.1f}" for each in (*seconds, sum(seconds))], f"{share:.1%}"]


def test_the_table_and_the_figures_are_the_same() -> None:
    simulation = simulated()
    figures, table = simulation.to_dict(), str(simulation)
    assert [phase["name"] for phase in figures["phases"]] == ["forward", "backward", "optimizer"]
    assert figures["hardware"] == dataclasses.asdict(Hardware())
    assert f"{simulation.phases[1].peak_bytes / 1e9:.2f}" in table
    last = table.splitlines()[-1]
    assert last.split() == ["exposed", "communication", *_exposed(simulation)]


# refusals


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.only(x) if x.sum() > 0 else x


def test_what_is_not_a_jitted_module_is_refused() -> None:
    with pytest.raises(TypeError, match="was not made by"):
        simulate(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="must be a jitted"):
        simulate(forge.jit(torch.sin), (torch.empty(2, device="meta"),))


def test_a_tensor_is_no_tuple_of_arguments() -> None:
    """Otherwise its first row would be the argument."""
    with pytest.raises(TypeError, match="args is a Tensor, but must be a tuple of the arguments"):
        simulate(forge.jit(nn.Linear(2, 2)), torch.empty(1, 2, device="meta"))


def test_parameters_in_host_memory_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="copies are not simulated"):
        simulated(cpu_offload=True)


def test_a_model_without_gradients_is_refused() -> None:
    with pytest.raises(ValueError, match="no gradient flows"), torch.no_grad():
        simulate(forge.jit(nn.Linear(2, 2)), (torch.empty(2, 2, device="meta"),))


def test_fake_processes_are_none_beside_others() -> None:
    with fake_processes(2), pytest.raises(RuntimeError, match="there is a process group"), fake_processes(4):
        pass


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ((-1,), ValueError, "fake_processes: size is -1, but must be an integer of at least 1"),
        ((0,), ValueError, "size is 0"),
        (("2",), TypeError, "size is '2', but must be an integer"),
        ((True,), TypeError, "size is True"),
        ((2, 2), ValueError, "fake_processes: rank is 2, but must be an integer from 0 to 1"),
        ((2, -1), ValueError, "rank is -1"),
        ((2, 0.0), TypeError, "rank is 0.0"),
    ],
)
def test_the_numbers_of_fake_processes_are_checked(given: tuple, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match), fake_processes(*given):
        pass
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"name": 1}, TypeError, "Hardware: name is 1, but must be a str"),
        ({"flops": 0}, ValueError, "Hardware: flops is 0, but must be a positive number"),
        ({"memory": float("nan")}, ValueError, "memory is nan"),
        ({"memory_bandwidth": "1"}, TypeError, "memory_bandwidth is '1'"),
        ({"kernel_seconds": -1}, ValueError, "kernel_seconds is -1, but must be a number of seconds"),
        ({"node_size": 8.0}, TypeError, "Hardware: node_size is 8.0, but must be an integer of at least 1"),
        ({"node_size": 0}, ValueError, "node_size is 0"),
    ],
)
def test_hardware_is_checked(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        Hardware(**options)


def test_messages_may_take_no_time_to_start() -> None:
    assert Hardware(message_seconds=0).message_time(0, 0, [0, 1]) == 0


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"hardware": "H100"}, TypeError, "simulate: hardware is 'H100', but must be a forge.distributed.Hardware"),
        ({"kwargs": [1]}, TypeError, "simulate: kwargs is a list, but must be a dict"),
        ({"optimizer_tensors": -1}, ValueError, "simulate: optimizer_tensors is -1, but must be an integer of at"),
        ({"optimizer_tensors": 1.5}, TypeError, "optimizer_tensors is 1.5"),
    ],
)
def test_the_options_of_simulate_are_checked(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        simulate(forge.jit(nn.Linear(2, 2)), (torch.empty(2, 2, device="meta"),), **options)


def test_a_graph_break_is_refused_as_by_fullgraph() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported):
        simulate(forge.jit(Branching()), (torch.empty(4, WIDTH, device="meta"),))
