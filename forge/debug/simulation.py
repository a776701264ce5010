"""Simulation of a training step of many processes in one: memory, messages and exposed communication.

The program is compiled as usual, for a CPU, and runs on fake tensors (forge/debug/fake_execution.py). A roofline model
gives the time of each call, on one stream; messages queue on another, from their start call on. A wait is exposed if
its message has not arrived.

Source: S. Williams et al., Roofline (2009); NCCL's model of a ring with the protocol Simple (src/graph/tuning.cc,
ncclTopoTuneModel), for latencies.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn

from forge.capture.handles import handle_of
from forge.compiler.collectives import Collective
from forge.compiler.report import CompileReport
from forge.debug.fake_execution import (
    ACTIVATIONS,
    GRADIENTS,
    FakeRun,
    Kernel,
    PlannedRegions,
    run_on_fake_tensors,
)
from forge.executors.executor import Executor, FusionExecutor
from forge.executors.registry import resolve_executors
from forge.ir import check
from forge.ir.checks import check_integer, check_number
from forge.prims.distributed import chunk_rows
from forge.torch_internals.distributed import local_tensor, process_group
from forge.torch_internals.fake_tensors import meta_tensors_on
from forge.torch_internals.modules import parameters_of
from forge.torch_internals.pytree import torch_pytree

if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor, Shard

_GIGA = 1e9


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The devices of a cluster. The defaults are those of H100 SXM in nodes of eight, with a network card each.

    Attributes:
        name: Their name.
        flops: Operations per second of matrix products of bfloat16 and float16.
        float32_flops: Those of float32.
        flops_efficiency: The part of these that products reach.
        memory: Bytes of a device.
        memory_bandwidth: Bytes per second.
        memory_efficiency: The part of it that kernels reach.
        kernel_seconds: The least that a kernel takes.
        node_size: Devices of a node.
        node_bandwidth: Bytes per second that a device sends to others of its node.
        network_bandwidth: Bytes per second that its network card sends.
        link_efficiency: The part of both that messages reach.
        message_seconds: The least that a message takes, and what is added for each step of a ring
        node_step_seconds: within a node, and
        network_step_seconds: between two.
    """

    name: str = "H100 SXM"
    flops: float = 989e12
    float32_flops: float = 67e12
    flops_efficiency: float = 0.65
    memory: float = 80e9
    memory_bandwidth: float = 3.35e12
    memory_efficiency: float = 0.8
    kernel_seconds: float = 3e-6
    node_size: int = 8
    node_bandwidth: float = 450e9
    network_bandwidth: float = 50e9
    link_efficiency: float = 0.8
    message_seconds: float = 8.4e-6
    node_step_seconds: float = 3.4e-6
    network_step_seconds: float = 9.6e-6

    def __post_init__(self) -> None:
        check(isinstance(self.name, str), lambda: f"Hardware: name is {self.name!r}, but must be a str", TypeError)
        check_integer(self.node_size, "Hardware: node_size", 1)
        for each in fields(self)[1:]:
            value, what = getattr(self, each.name), f"Hardware: {each.name}"
            if each.name.endswith("seconds"):
                check_number(value, what, "a number of seconds", zero=True)
            else:
                check_number(value, what)

    def compute_seconds(self, kernel: Kernel) -> float:
        """Return the time of a kernel: of its operations or its bytes, whichever take longer."""
        rate = self.flops if kernel.dtype in (torch.bfloat16, torch.float16) else self.float32_flops
        return max(
            self.kernel_seconds,
            kernel.flops / (rate * self.flops_efficiency),
            kernel.bytes / (self.memory_bandwidth * self.memory_efficiency),
        )

    def message_time(self, sent_bytes: float, steps: int, ranks: Sequence[int]) -> float:
        """Return the time of a message of which each rank sends `sent_bytes` in so many steps of a ring.

        A ring of several nodes enters and leaves each once; there are as many rings as a node has devices in it.
        """
        nodes = {rank // self.node_size for rank in ranks}
        bandwidth, between = self.node_bandwidth, 0
        if len(nodes) > 1:
            bandwidth = min(bandwidth, self.network_bandwidth * max(1, len(ranks) // len(nodes)))
            between = steps * len(nodes) // len(ranks)
        latency = self.message_seconds + (steps - between) * self.node_step_seconds
        return latency + between * self.network_step_seconds + sent_bytes / (bandwidth * self.link_efficiency)


@dataclass(frozen=True)
class Message:
    """A message of a program, as each rank sends it.

    Attributes:
        phase: "forward" or "backward".
        operation: "all_gather" or "reduce_scatter", say.
        sent: The bytes that a rank sends, and receives.
        start: When it starts, in seconds since the step began.
        end: When it is there.
        exposed: The seconds that the device waits for it.
        source: The line that reads it, where it is known.
    """

    phase: str
    operation: str
    sent: int
    start: float
    end: float
    exposed: float
    source: str | None


@dataclass(frozen=True)
class Phase:
    """The forward, the backward or the optimizer's step.

    Attributes:
        name: Of the phase.
        seconds: From its begin to its end.
        compute_seconds: Those in which the device computes.
        exposed_seconds: Those in which it waits for messages.
        peak_bytes: The most bytes that are alive at once, those of parameters, optimizer and inputs among them.
        peak_by_use: The same by what they are for.
        messages: Those that start in it.
    """

    name: str
    seconds: float
    compute_seconds: float
    exposed_seconds: float
    peak_bytes: int
    peak_by_use: Mapping[str, int]
    messages: Sequence[Message]


@dataclass(frozen=True)
class Simulation:
    """A simulated training step, as rank `rank` runs it; str() of it is a table.

    Attributes:
        rank: The rank of which the program is.
        ranks: The number of processes.
        parameters: The number of elements of the model's parameters.
        parameter_bytes: The bytes of its part of them, of each rank; gradients have as many.
        optimizer_bytes: Those of the optimizer's state, of each rank.
        activation_bytes: The bytes that the forward saves for the backward.
        phases: The forward, the backward and the optimizer's step.
        hardware: The devices.
    """

    rank: int
    ranks: int
    parameters: int
    parameter_bytes: Sequence[int]
    optimizer_bytes: Sequence[int]
    activation_bytes: int
    phases: Sequence[Phase]
    hardware: Hardware

    @property
    def seconds(self) -> float:
        """The time of the step."""
        return sum(each.seconds for each in self.phases)

    @property
    def exposed_seconds(self) -> float:
        """The time in which the device waits for messages."""
        return sum(each.exposed_seconds for each in self.phases)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that are alive at once."""
        return max(each.peak_bytes for each in self.phases)

    @property
    def messages(self) -> list[Message]:
        """The messages, in the order in which they start."""
        return [message for phase in self.phases for message in phase.messages]

    def sent_bytes(self, operation: str) -> int:
        """Return the bytes that a rank sends by collectives of an operation, "all_gather" say."""
        return sum(message.sent for message in self.messages if message.operation == operation)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


class _Compiled(BaseException):  # which no handler of a failed compilation catches
    """The exception that ends a call once its program is compiled."""

    def __init__(self, report: CompileReport) -> None:
        self.report = report


def simulate(
    jitted: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    hardware: Hardware | None = None,
    optimizer_tensors: int = 2,
) -> Simulation:
    """Return what a training step of a jitted module takes on this rank, without running it.

    The module, its inputs and its parameters may be on the meta device. The results that are losses get a gradient, the
    others if there is none; what is not a loss is freed before the backward.

    Args:
        jitted: A result of forge.jit of a module.
        args: The arguments of its forward.
        kwargs: Its keyword arguments.
        hardware: The devices; by default of a cluster of H100.
        optimizer_tensors: The tensors like a parameter that the optimizer has of each, two for AdamW.

    Raises:
        TypeError: If `jitted` is no jitted module, `args` no tuple, `kwargs` no mapping, or `hardware` no Hardware.
        NotImplementedError: If parameters are offloaded.
        ValueError: If no gradient flows, the call needs no compilation, or `optimizer_tensors` is negative.
    """
    hardware = Hardware() if hardware is None else hardware
    kwargs = {} if kwargs is None else kwargs
    check(
        isinstance(hardware, Hardware),
        lambda: f"simulate: hardware is {hardware!r}, but must be a forge.distributed.Hardware",
        TypeError,
    )
    check(
        isinstance(kwargs, Mapping),
        lambda: f"simulate: kwargs is a {type(kwargs).__name__}, but must be a dict of keyword arguments",
        TypeError,
    )
    check_integer(optimizer_tensors, "simulate: optimizer_tensors", 0)
    again = handle_of(jitted, "simulate").again
    check(
        isinstance(jitted, nn.Module) and again is not None,
        lambda: f"simulate: jitted is a {type(jitted).__name__}, but must be a jitted torch.nn.Module",
        TypeError,
    )
    assert again is not None, "so forge.jit made it"
    check(
        isinstance(args, (tuple, list)),
        lambda: f"simulate: args is a {type(args).__name__}, but must be a tuple of the arguments of the forward",
        TypeError,
    )
    shardings = [getattr(module, "_forge_sharding", None) for module in jitted.modules()]
    check(
        not any(each is not None and each.is_offloaded for each in shardings),
        lambda: "simulate: the parameters are in host memory (cpu_offload), to which copies are not simulated",
        NotImplementedError,
    )
    report = _compile(again, args, kwargs)
    check(bool(report.backward_traces), lambda: "simulate: no gradient flows; a step needs parameters with one")
    parameters = _parameters_of(jitted)
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    rank = torch.distributed.get_rank() if ranks > 1 else 0
    own = [sum(_local_bytes(each, rank) for each in parameters) for rank in range(ranks)]
    state = [optimizer_tensors * each for each in own]
    alive = {"parameters": own[rank], "optimizer": state[rank], "inputs": sum(map(_bytes, _tensors(args, kwargs)))}
    forward, backward = run_on_fake_tensors(report.traces[-1], report.backward_traces[-1])
    of_forward, of_backward = report.collectives()
    clock = _Clock(hardware)
    phases = [
        clock.run("forward", forward, of_forward, alive),
        clock.run("backward", backward, of_backward, alive),
        clock.step(own[rank], optimizer_tensors, {**alive, "gradients": backward.end.get(GRADIENTS, 0)}),
    ]
    return Simulation(
        rank,
        ranks,
        sum(each.numel() for each in parameters),
        own,
        state,
        forward.end.get(ACTIVATIONS, 0),
        phases,
        hardware,
    )


def _parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters, each once, without attribute access, which may gather one."""
    parameters = [each for child in module.modules() for each in parameters_of(child).values() if each is not None]
    return list({id(each): each for each in parameters}.values())


def _local_bytes(parameter: torch.Tensor, rank: int) -> int:
    """Return the bytes of a rank's shard of a parameter; this rank's, if it is not sharded by rows."""
    if not isinstance(parameter, DTensor):
        return _bytes(parameter)
    if parameter.device_mesh.ndim != 1 or parameter.placements != (Shard(0),):
        return _bytes(local_tensor(parameter))
    rows = chunk_rows(parameter.shape[0], parameter.device_mesh.size())
    local_rows = min(max(parameter.shape[0] - rank * rows, 0), rows)
    return int(_bytes(parameter) // parameter.shape[0] * local_rows)


def _bytes(x: torch.Tensor) -> int:
    return int(x.nbytes)


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    return [each for each in torch_pytree.tree_leaves((args, dict(kwargs))) if isinstance(each, torch.Tensor)]


def _compile(again: partial, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CompileReport:
    """Return the report of a call's program, compiled for a CPU with regions that are planned but not compiled."""
    executors = list(map(_planned, resolve_executors(again.keywords["executors"])))
    options = {"cache": False, "cuda_graphs": False, "select": "order", "mode": None, "check": None, "edit": None}
    own = again(executors=executors, fullgraph=True, dynamic=False, **options)
    handle_of(own).on_graph = _end
    try:
        with meta_tensors_on(torch.device("cpu")):
            own(*args, **kwargs)
    except _Compiled as end:
        return end.report
    raise ValueError("simulate: the call compiled no program")


def _planned(executor: Executor) -> Executor:
    return PlannedRegions(executor) if isinstance(executor, FusionExecutor) else executor


def _end(report: CompileReport) -> None:
    raise _Compiled(report)


# the timeline


class _OnItsWay(NamedTuple):
    """A message in flight, between its start and its wait."""

    collective: Collective
    start: float
    end: float


class _Clock:
    """The clocks of the device and of the message stream, in seconds since the step began."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._now = 0.0
        self._stream = 0.0  # the arrival time of the last message
        self._on_their_way: list[_OnItsWay] = []

    def run(self, name: str, run: FakeRun, collectives: Sequence[Collective], alive: Mapping[str, int]) -> Phase:
        """Return the phase of a trace that ran. alive: the bytes that are live throughout, by use."""
        begin, last = self._now, run.calls[-1].position
        started = defaultdict(list)
        for each in collectives:
            started[each.start].append(each._replace(wait=last) if each.wait is None else each)
        messages: list[Message] = []
        compute = 0.0
        for position, kernels in run.calls:
            messages += self._wait(name, position)
            compute += self._compute(kernels)
            self._on_their_way += map(self._send, started[position])
            messages += self._wait(name, position)  # for messages that the call itself started
        messages.sort(key=lambda message: message.start)
        exposed = sum(message.exposed for message in messages)
        peak = sum(alive.values()) + run.peak.bytes
        return Phase(name, self._now - begin, compute, exposed, peak, {**alive, **run.peak.by_use}, messages)

    def step(self, parameters: int, tensors: int, alive: Mapping[str, int]) -> Phase:
        """Return the phase of an optimizer, which reads gradients and updates each parameter and `tensors` states."""
        seconds = self._compute([Kernel(0, torch.float32, (3 + 2 * tensors) * parameters)])
        return Phase("optimizer", seconds, seconds, 0.0, sum(alive.values()), alive, [])

    def _compute(self, kernels: Sequence[Kernel]) -> float:
        """Advance the device's clock by the time of kernels, and return that time."""
        seconds = sum(map(self._hardware.compute_seconds, kernels))
        self._now += seconds
        return seconds

    def _send(self, collective: Collective) -> _OnItsWay:
        """Start a message when its data is available and the previous message has ended."""
        group = process_group(collective.group)
        ranks = [0] if group is None else torch.distributed.get_process_group_ranks(group)
        start = max(self._now, self._stream)
        self._stream = start + self._hardware.message_time(collective.sent_bytes, collective.steps, ranks)
        return _OnItsWay(collective, start, self._stream)

    def _wait(self, phase: str, position: int) -> Iterator[Message]:
        """Wait for the messages that the call at a position of the trace waits for, and yield them."""
        awaited = [each for each in self._on_their_way if each.collective.wait == position]
        for each in awaited:
            self._on_their_way.remove(each)
            collective, start, end = each
            exposed = max(0.0, end - self._now)
            self._now += exposed
            source = None if collective.source is None else str(collective.source)
            yield Message(phase, collective.operation, collective.sent_bytes, start, end, exposed, source)


# the table


def _lines(simulation: Simulation) -> Iterator[str]:
    phases, hardware = simulation.phases, simulation.hardware
    nodes = -(-simulation.ranks // hardware.node_size)
    where = f"{simulation.ranks} {hardware.name}, {nodes} node{'s' * (nodes > 1)}"
    yield f"{simulation.parameters / _GIGA:.2f} billion parameters on {where}"
    yield f"GB of them by rank  {_by_rank(simulation.parameter_bytes)}"
    yield ""
    yield _row(f"rank {simulation.rank}", [*(each.name for each in phases), "step"])
    peaks = [*(each.peak_bytes for each in phases), simulation.peak_bytes]
    yield _row("peak, GB", [f"{size / _GIGA:.2f}" for size in peaks]) + f"  of {hardware.memory / _GIGA:.0f}"
    for use in dict.fromkeys(use for phase in phases for use in phase.peak_by_use):
        sizes = [phase.peak_by_use.get(use, 0) / _GIGA for phase in phases]
        if max(sizes) >= 0.005:
            yield _row(f"  {use}", [f"{size:.2f}" if size else "" for size in sizes])
    for operation in dict.fromkeys(each.operation for each in simulation.messages):
        by_phase = [[each for each in phase.messages if each.operation == operation] for phase in phases]
        by_phase.append([each for each in simulation.messages if each.operation == operation])
        yield _row(f"{operation}, number", [str(len(each)) if each else "" for each in by_phase])
        gigabytes = [sum(each.sent for each in messages) / _GIGA for messages in by_phase]
        yield _row("  sent, GB", [f"{size:.2f}" if size else "" for size in gigabytes])
    seconds = [*(each.seconds for each in phases), simulation.seconds]
    exposed = [*(each.exposed_seconds for each in phases), simulation.exposed_seconds]
    yield _row("time, ms", [f"{each * 1e3:.1f}" for each in seconds])
    share = simulation.exposed_seconds / simulation.seconds
    yield _row("  exposed communication", [f"{each * 1e3:.1f}" for each in exposed]) + f"  {share:.1%}"


def _row(name: str, values: Sequence[str]) -> str:
    return f"{name:<26}" + "".join(f"{each:>11}" for each in values).rstrip()


def _by_rank(values: Sequence[int]) -> str:
    """Return `0-510: 0.551, 511: 0.535`, in GB."""
    parts = []
    for size, group in groupby(range(len(values)), key=lambda rank: f"{values[rank] / _GIGA:.3f}"):
        first, *others = group
        parts.append(f"{first}{f'-{others[-1]}' if others else ''}: {size}")
    return ", ".join(parts)
