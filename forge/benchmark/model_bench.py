"""The time of a model's call: in eager, by torch.compile and by forge, in turn in one process (forge bench)."""

import builtins
import copy
import itertools
import statistics
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from forge.api.jit import finish_compiling, jit
from forge.debug.eager_check import copy_as_leaf
from forge.ir.checks import in_one_line
from forge.ir.printing import in_seconds, table
from forge.support.timing import in_turn, ratio
from forge.torch_internals.pytree import torch_pytree

EAGER, PEER, OURS = "eager", "torch.compile", "forge"
_UNSAID = 2.0  # seconds of waiting that nobody is told of
BATCH = 0.1  # seconds of a system in a round, where that is several calls


@dataclass(frozen=True)
class System:
    """A way to run a function or module: `prepare` gives what is called in its place, `finish` waits until that runs
    as it will from now on."""

    name: str
    prepare: Callable[[Callable], Callable]
    finish: Callable[[Callable], Any] = id


_numbers = itertools.count()
target: Callable[..., Any]  # a global of each copy of _call, which `entry` sets


def _call(*args: Any, **kwargs: Any) -> Any:
    return target(*args, **kwargs)  # noqa: F821


def entry(function: Callable) -> Callable:
    """Return `function` behind a code object with a name of its own.

    Dynamo keeps its cache, its recompile limit and what it learnt of dynamic sizes by code object and name. Two models
    of one class, or two systems, would otherwise disturb each other.
    """
    code = _call.__code__.replace(co_name=f"call_{next(_numbers)}")
    return types.FunctionType(code, {"__builtins__": builtins.__dict__, "__name__": __name__, "target": function})


def systems(executors: Sequence[str] | None = None) -> dict[str, System]:
    """Return eager, torch.compile and forge, by name. executors: forge's."""
    entries = [
        System(EAGER, lambda function: function),
        System(PEER, lambda function: torch.compile(entry(function))),
        System(OURS, lambda function: jit(function, executors=executors), _finish),
    ]
    return {each.name: each for each in entries}


def _finish(jitted: Callable) -> None:
    """Wait for larger regions, and say so where that takes long."""
    if not finish_compiling(jitted, timeout=_UNSAID):
        print("forge: waiting for larger regions to be compiled (FORGE_BACKGROUND=0: without them)", file=sys.stderr)
        finish_compiling(jitted)


def inference(model: Callable, inputs: Mapping[str, Any], args: Sequence[Any] = ()) -> Callable[[], Any]:
    """Return one forward without gradients."""

    def run() -> Any:
        with torch.no_grad():
            return model(*args, **inputs)

    return run


def training_step(
    model: Callable, parameters: Sequence[torch.Tensor], inputs: Mapping[str, Any], args: Sequence[Any] = ()
) -> Callable[[], Any]:
    """Return a step of forward, loss and backward, without an optimizer.

    The loss is the result, its `loss`, or the sum of all its tensors; the gradients are those of `parameters`.
    """
    parameters = list(parameters)

    def run() -> Any:
        for parameter in parameters:
            parameter.grad = None
        output = model(*args, **inputs)
        loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
        if isinstance(loss, torch.Tensor) and loss.ndim == 0:
            loss.backward()
            return loss
        leaves = [
            leaf for leaf in torch_pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])
        return output

    return run


@dataclass(frozen=True)
class Case:
    """A function or module with the arguments of a call, and whether a step trains it."""

    name: str
    target: Callable
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    training: bool = False

    def copy(self) -> "Case":
        """Return the case with a module and tensors of its own."""
        module = isinstance(self.target, torch.nn.Module)
        args, kwargs = torch_pytree.tree_map_only(torch.Tensor, copy_as_leaf, (self.args, dict(self.kwargs)))
        return Case(self.name, copy.deepcopy(self.target) if module else self.target, args, kwargs, self.training)

    def run(self, prepared: Callable) -> Callable[[], Any]:
        """Return a forward, or a training step, of what a system made of the target."""
        if not self.training:
            return inference(prepared, self.kwargs, self.args)
        leaves = torch_pytree.tree_leaves((self.args, self.kwargs))
        targets = [each for each in leaves if isinstance(each, torch.Tensor) and each.requires_grad]
        if isinstance(self.target, torch.nn.Module):
            targets += [each for each in self.target.parameters() if each.requires_grad]
        return training_step(prepared, targets, self.kwargs, self.args)


@dataclass(frozen=True)
class SystemTiming:
    """A system. seconds: of a call, in each round. first: seconds of the first call, which compiles. reason: why it
    was not timed."""

    system: str
    seconds: list[float] = field(default_factory=list)
    first: float | None = None
    reason: str | None = None


def compare(
    case: Case, compared: Sequence[System], rounds: int, measure: Callable[..., dict[str, list[float]]] | None = None
) -> list[SystemTiming]:
    """Return the times of each system; one that fails carries its reason, and the others are timed.

    measure: in place of `in_turn`.
    """
    runs: dict[str, Callable[[], Any]] = {}
    first: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for system in compared:
        own = case.copy()
        try:
            prepared = system.prepare(own.target)
            run = own.run(prepared)
            start = time.perf_counter()
            run()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            first[system.name] = time.perf_counter() - start
            system.finish(prepared)
            runs[system.name] = run
        except Exception as error:  # of the system, or of the program itself
            reasons[system.name] = in_one_line(error)
    seconds = (measure or in_turn)(runs, rounds=rounds, batch_seconds=BATCH)
    return [
        SystemTiming(each.name, reason=reasons[each.name])
        if each.name in reasons
        else SystemTiming(each.name, seconds[each.name], first[each.name])
        for each in compared
    ]


def as_json(timings: Sequence[SystemTiming]) -> list[dict[str, Any]]:
    """Return plain data; `of_eager` and `of_torch_compile` are medians over rounds of the ratio of times."""
    return [
        {
            "name": each.system,
            "seconds": statistics.median(each.seconds) if each.seconds else None,
            "rounds": each.seconds,
            "of_eager": _of(each, timings, EAGER),
            "of_torch_compile": _of(each, timings, PEER),
            "first_call_seconds": each.first,
            "reason": each.reason,
        }
        for each in timings
    ]


def from_json(systems: Sequence[Mapping[str, Any]]) -> list[SystemTiming]:
    """Return the times that `as_json` gave."""
    return [SystemTiming(each["name"], each["rounds"], each["first_call_seconds"], each["reason"]) for each in systems]


def show(timings: Sequence[SystemTiming]) -> str:
    """Return a table of text."""
    others = [name for name in (EAGER, PEER) if any(each.system == name and each.seconds for each in timings)]
    rows = [("", "time", *(f"of {name}" for name in others), "first call")]
    for each in timings:
        if each.reason is None:
            assert each.first is not None, "a system that did not fail was called"
            ratios = (f"{_of(each, timings, name):.2f}" for name in others)
            rows.append((each.system, in_seconds(statistics.median(each.seconds)), *ratios, in_seconds(each.first)))
    failed = [f"{each.system} failed: {each.reason}" for each in timings if each.reason is not None]
    return "\n".join([*table(rows), *failed])


def _of(each: SystemTiming, timings: Sequence[SystemTiming], name: str) -> float | None:
    """Return the time as a multiple of that system's."""
    other = next((other for other in timings if other.system == name), None)
    return ratio(each.seconds, other.seconds) if each.seconds and other is not None and other.seconds else None
