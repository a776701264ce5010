"""Training loops of the two processes of tests/distributed/test_training.py."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from distributed_programs import whole
from torch import nn
from torch.distributed.fsdp import fully_shard

import forge
from forge.distributed import ShardPolicy, shard

SMALL = ShardPolicy(bucket_mb=0.004, prefetch_mb=0.004)  # several messages for a small model
WIDTH = 32


class Products(nn.Module):
    """A module with matrices that the program reads transposed, some in the forward, some in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, weight in enumerate(self.weights):
            x = (x @ (weight.t() if place % 2 else weight)).tanh()
        return x


class Broken(nn.Module):
    """A stack of layers with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).sin()
        torch._dynamo.graph_break()
        return self.second(x)


def _model(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def _inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(2 * step + rank))


def _train(model: nn.Module, rank: int, steps: int = 3) -> list[torch.Tensor]:
    """Return the losses and the gradients of some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(_inputs(rank, step)).square().mean()
        loss.backward()
        found += [loss.detach(), *[whole(p.grad).clone() for p in model.parameters()]]
        optimizer.step()
    return found


def products(rank: int) -> dict[str, Any]:
    """Return the results of training under FSDP2, and sharded and jitted."""
    jitted = forge.jit(shard(_model(Products), policy=SMALL))
    return {"fsdp2": _train(fully_shard(_model(Products)), rank), "forge": _train(jitted, rank)}


def penalized(rank: int) -> dict[str, Any]:
    """Return gradients of a loss of a gradient, of plain parameters and averaged by hand, and sharded and jitted."""

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        x = _inputs(rank, 0).requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (y.mean() + slope.square().sum()).backward()
        return [whole(p.grad) for p in model.parameters()]

    plain = gradients(_model(Products))
    for each in plain:
        torch.distributed.all_reduce(each, torch.distributed.ReduceOp.AVG)
    return {"plain": plain, "forge": gradients(forge.jit(shard(_model(Products), policy=SMALL)))}


def averaged(rank: int) -> dict[str, Any]:
    """Return the results of a moving average of a model, as a copy of the sharded model, and of plain ones."""

    def results(prepare: Callable) -> list[torch.Tensor]:
        model, average = prepare(_model(Broken))
        found = []
        for step in range(2):
            with torch.no_grad():
                torch._foreach_lerp_([*average.parameters()], [each * 2 for each in model.parameters()], 0.1)
                found.append(average(_inputs(rank, step)))
        return found

    def of_sharded(model: nn.Module) -> tuple[nn.Module, nn.Module]:
        model = shard(model)
        return model, copy.deepcopy(model)

    def of_jitted(model: nn.Module) -> tuple[nn.Module, nn.Module]:
        model, average = of_sharded(model)
        return forge.jit(model), forge.jit(average)

    plain = results(lambda model: (model, copy.deepcopy(model)))
    return {"plain": plain, "eager": results(of_sharded), "forge": results(of_jitted)}
