"""What the two processes of tests/distributed run: functions of the rank, which return what the test looks at."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
import torch.distributed._functional_collectives as functional

import forge
from forge.ir import Tag
from forge.records import record_of

# collectives


def _in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.detach() * 2
    torch.distributed.all_reduce(y)
    return y + 1


def _world() -> torch.distributed.ProcessGroup:
    return torch.distributed.group.WORLD


COLLECTIVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all_reduce": lambda x: functional.all_reduce(x * 2, "sum", _world()) * x,
    "all_gather": lambda x: functional.all_gather_tensor(x * 2, 0, _world()).sin(),
    "all_gather along dim 1": lambda x: functional.all_gather_tensor(x * 2, 1, _world()).sin(),
    "reduce_scatter": lambda x: functional.reduce_scatter_tensor(x * 2, "sum", 0, _world()).sin(),
    "all_to_all": lambda x: functional.all_to_all_single_autograd(x * 2, [2, 2], [2, 2], _world()).sin(),
    "torch.distributed.all_reduce": _in_place,
    "several at once": lambda x: functional.all_reduce_coalesced([x, x * 2], "sum", _world())[1] * x,
    "broadcast": lambda x: functional.broadcast(x.detach() * 2, 0, _world()).sin(),
}


def _values_and_gradient(function: Callable, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    x = x.detach().requires_grad_()
    out = function(x)
    if out.requires_grad:
        (out * out).sum().backward()
    return out.detach(), x.grad


def collective(rank: int, name: str) -> dict[str, Any]:
    """Eager's values and gradient and forge's, and what forge says of the program."""
    warnings.simplefilter("ignore")  # torch's newer names
    function, x = COLLECTIVES[name], torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    jitted = forge.jit(function)
    eager, ours = _values_and_gradient(function, x), _values_and_gradient(jitted, x)
    told = forge.explain(jitted)
    return {"eager": eager, "forge": ours, "opaque": told.opaque_calls, "broken": told.graph_breaks + told.eager}


def order_of_collectives(rank: int) -> list[list[str]]:
    """The collectives of a program's forward and backward in the order in which they run. Two are alike, one's result
    nobody reads, and the executors of the processes differ."""

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = functional.all_reduce(x, "sum", _world())
        functional.all_reduce(y.detach(), "sum", _world())
        second = functional.all_reduce(x, "sum", _world())
        gathered = functional.all_gather_single(y, 0, _world())
        return (first.sin() * second.cos()).sum() + gathered.exp().sum()

    jitted = forge.jit(program, executors=["torch"] if rank else ["inductor", "torch"])
    x, y = torch.randn(4, requires_grad=True), torch.randn(2, requires_grad=True)
    jitted(x, y).backward()
    compiled = record_of(jitted).latest
    return [
        [bound.symbol.name for bound in stages[-1].bound_symbols if Tag.EFFECT in bound.all_tags]
        for stages in (compiled.traces, compiled.backward_traces)
    ]
