"""Programs on DTensors of the two processes of tests/distributed: each in eager and jitted."""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed_programs import parallel, train, whole
from torch import nn
from torch._guards import detect_fake_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional as F

import forge
from forge.capture import dtensors
from forge.torchlang import partial_draws


def _all(x: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a DTensor, this process's part of a strided one; other tensors unchanged."""
    strided = any(isinstance(each, _StridedShard) for each in getattr(x, "placements", ()))
    return x.to_local() if strided else whole(x)


def _changed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x * 2
    z.add_(y)
    z.masked_fill_(z > 2, 1.0)
    z[..., 0].mul_(3)
    return z.relu_() + 0 * y.detach().clone().copy_(z)


def _loss(x: torch.Tensor, words: torch.Tensor, **how: Any) -> torch.Tensor:
    return F.cross_entropy(x.flatten(0, 1), words.flatten(), **how)


_SEQUENCE, _WORDS = (2, 4, 6), (2, 4)
FUNCTIONS: dict[str, tuple[Callable[..., Any], list[tuple[Any, Any]]]] = {
    # for each: a function, and its arguments' shapes ("words": a batch of word indices) and placements
    "dropout": (lambda x: F.dropout(x, 0.5) * x, [(_SEQUENCE, Shard(1))]),
    "dropout of what all have": (lambda x: F.dropout(x, 0.5) * x, [(_SEQUENCE, Replicate())]),
    "random numbers": (lambda x: torch.rand_like(x) * x + torch.randn_like(x), [(_SEQUENCE, Shard(0))]),
    "in place": (_changed, [(_SEQUENCE, Shard(1)), (_SEQUENCE, Shard(1))]),
    "loss": (_loss, [((2, 4, 8), Shard(2)), ("words", Replicate())]),
    "softmax of a cut dim": (lambda x: x.softmax(-1) * x, [(_SEQUENCE, Shard(2))]),
    "norm of a cut dim": (lambda x: F.layer_norm(x, (6,)), [(_SEQUENCE, Shard(2))]),
    "sum of a cut dim": (lambda x: x.sum(-1).sin(), [(_SEQUENCE, Shard(2))]),
    "largest of a cut dim": (lambda x: x.amax(-1) * 2, [(_SEQUENCE, Shard(2))]),
    "mean of all": (lambda x: x.square().mean() * 2, [(_SEQUENCE, Shard(2))]),
    "placed in two ways": (lambda x, y: x + y, [(_SEQUENCE, Shard(1)), (_SEQUENCE, Shard(2))]),
    "view of a cut dim": (lambda x: x.flatten().sin(), [(_SEQUENCE, Shard(1))]),
    "all of it": (lambda x: x.full_tensor().sin(), [(_SEQUENCE, Shard(1))]),
    "padded words": (
        lambda weight, words: F.embedding(words, weight, 5).redistribute(placements=[Replicate()]).sin(),
        [((8, 6), Shard(0)), ("words", Replicate())],
    ),
    "scaled words": (
        lambda weight, words: (F.embedding(words, weight) * 3).redistribute(placements=[Replicate()]),
        [((8, 6), Shard(0)), ("words", Replicate())],
    ),
    "uneven": (lambda x, y: (x * y).sin(), [((5, 3), Shard(0)), ((5, 3), Shard(0))]),
    "uneven, nothing here": (lambda x, y: (x * y).sin(), [((1, 3), Shard(0)), ((1, 3), Shard(0))]),
    "uneven columns and rows": (
        lambda x, up, down: F.linear(F.linear(x, up).relu(), down).redistribute(placements=[Replicate()]),
        [((4, 6), Replicate()), ((5, 6), Shard(0)), ((6, 5), Shard(1))],
    ),
    "uneven sequence": (
        lambda x, weight: F.rms_norm(x, (6,), weight).redistribute(placements=[Replicate()]).sin(),
        [((2, 5, 6), Shard(1)), ((6,), Replicate())],
    ),
    "uneven scatter": (
        lambda x, y: F.linear(x, y).redistribute(placements=[Shard(0)]),
        [((5, 6), Shard(1)), ((3, 6), Shard(1))],
    ),
    "uneven exchange": (lambda x: x.redistribute(placements=[Shard(1)]).sin(), [((5, 3), Shard(0))]),
    "uneven loss": (_loss, [((2, 4, 7), Shard(2)), ("words", Replicate())]),
    "uneven rows of an embedding": (
        lambda weight, words: F.embedding(words, weight).redistribute(placements=[Replicate()]).sin(),
        [((7, 6), Shard(0)), ("words", Replicate())],
    ),
    "strided parts": (lambda x: x.to_local().chunk(2)[0].sin(), [((8, 3), _StridedShard(0, split_factor=2))]),
    "averages": (
        lambda x: (
            DTensor.from_local(x.to_local(), x.device_mesh, [Partial("avg")])
            .redistribute(placements=[Replicate()])
            .sin()
        ),
        [((4, 3), Shard(0))],
    ),
}


def of_dtensors(rank: int, what: str) -> dict[str, Any]:
    """Return results and gradients of a function of FUNCTIONS, in eager and jitted, and the parts that are not
    compiled."""
    warnings.simplefilter("ignore", UserWarning)  # torch's, of random numbers on CPUs
    mesh, generator = init_device_mesh("cpu", (2,)), torch.Generator().manual_seed(0)
    function, given = FUNCTIONS[what]
    values = [
        torch.randint(7, _WORDS, generator=generator) if shape == "words" else torch.randn(shape, generator=generator)
        for shape, _ in given
    ]

    def results(function: Callable) -> tuple[list[torch.Tensor], str]:
        args = [distribute_tensor(value, mesh, [place]) for value, (_, place) in zip(values, given, strict=True)]
        args = [each.detach().requires_grad_(each.is_floating_point()) for each in args]
        torch.manual_seed(rank)
        out = function(*args)
        whole(out).square().sum().backward()
        gradients = [each.grad for each in args if each.requires_grad]
        placed = str(getattr(out, "placements", "a tensor"))
        return [whole(out).detach(), *map(_all, gradients)], placed

    jitted = forge.jit(function)
    (ours, placed), told = results(jitted), forge.explain(jitted)
    eager, expected = results(function)
    return {
        "eager": eager,
        "expected": expected,
        "forge": ours,
        "placed": placed,
        "opaque": told.opaque_calls,
        "broken": told.graph_breaks + told.eager,
    }


def loss_of_a_cut_vocabulary(rank: int, how: dict[str, Any]) -> dict[str, Any]:
    """Return the loss of logits with a sharded vocabulary, and gradients, under loss_parallel."""
    mesh, generator = init_device_mesh("cpu", (2,)), torch.Generator().manual_seed(0)
    x, weight = torch.randn(6, 4, generator=generator), torch.randn(8, 4, generator=generator)
    words = torch.tensor([0, 3, 7, 4, -100, 5])

    def loss(x: torch.Tensor, weight: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(x, weight), words, **how)

    def results(function: Callable) -> list[torch.Tensor]:
        given = [distribute_tensor(x, mesh, [Replicate()]), distribute_tensor(weight, mesh, [Shard(0)])]
        given = [each.detach().requires_grad_() for each in given]
        with loss_parallel():
            found = function(*given, words)
            found.sum().backward()
        return [whole(found).detach(), *[whole(each.grad) for each in given]]

    jitted = forge.jit(loss)
    ours, told = results(jitted), forge.explain(jitted)
    operations = " ".join(row.operation for row in told.rows)
    return {
        "eager": results(loss),
        "forge": ours,
        "gathers": "all_gather" in operations,
        "sums": "all_reduce" in operations,
        "opaque": told.opaque_calls,
        "broken": told.graph_breaks + told.eager,
    }


def drawn(rank: int, place: Any, seed: int) -> dict[str, Any]:
    """Return the elements of this process's part that dropout keeps, also in attention, and the gradient, in eager and
    jitted, and the generators of the numbers."""
    warnings.simplefilter("ignore", UserWarning)  # torch's, of random numbers on CPUs
    mesh = init_device_mesh("cpu", (2,))

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = F.dropout(x, 0.5)
        return first, F.scaled_dot_product_attention(x, x, torch.ones_like(x), dropout_p=0.5)

    def results(function: Callable) -> list[torch.Tensor]:
        x = distribute_tensor(torch.ones(4, 8, 2, 16), mesh, [place]).requires_grad_()
        torch.manual_seed(seed * rank)
        first, second = function(x)
        first.sum().backward()
        return [each.to_local().detach() for each in (first, second, x.grad)]

    jitted = forge.jit(both)
    ours, told = results(jitted), forge.explain(jitted)
    return {
        "eager": results(both),
        "forge": ours,
        "opaque": told.opaque_calls,
        "broken": told.graph_breaks + told.eager,
    }


class _Offset:
    """A generator's offset, like that of a GPU's generator."""

    def __init__(self) -> None:
        self.moves = [100]

    def get_offset(self) -> int:
        return self.moves[-1]

    def set_offset(self, offset: int) -> None:
        self.moves.append(offset)


def drawn_by_part(rank: int, place: Any) -> dict[str, Any]:
    """Return the results of `drawn`, as if the device had the generators of a GPU, and their offsets before and after
    draws."""
    generator = _Offset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dtensors, "draws_by_part", lambda device: True)
        patch.setattr(partial_draws, "generator_of", lambda device: generator)
        patch.setattr(partial_draws, "sync_generators", lambda kind: None)
        return {**drawn(rank, place, 1), "moves": generator.moves}


class _Tracker:
    """The state of a generator that DTensors read for random functions: capture has no values."""

    distribute_region_enabled = True

    def _distribute_region(self, spec: Any, generator: Any = None) -> Any:
        if detect_fake_mode() is not None:
            raise AssertionError("a generator's state is no fake tensor")
        return contextlib.nullcontext()


def drawn_beside_a_tracker(rank: int) -> dict[str, Any]:
    """Return the results of `drawn_by_part` after a random function of a DTensor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed.tensor._random, "_rng_tracker", _Tracker())
        return drawn_by_part(rank, Shard(0))


class Counting(nn.Module):
    """A layer with DTensor buffers: a running mean, a count, rows that are written, and a clamped weight."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        place = lambda x, where: distribute_tensor(x, mesh, [where])
        self.weight = nn.Parameter(place(torch.arange(12.0).view(6, 2), Shard(0)))
        self.register_buffer("mean", place(torch.zeros(6), Shard(0)))
        self.register_buffer("count", place(torch.zeros(1), Replicate()))
        self.register_buffer("rows", place(torch.zeros(4, 6), Shard(1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(max=5)
        out = F.linear(x, self.weight)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(out.mean(0), alpha=0.1)
            self.count += 1
            self.rows.copy_(out)
        return out * self.mean


def changed_buffers(rank: int) -> dict[str, Any]:
    """Return results, gradients and buffers of two calls of Counting, in eager and jitted."""
    mesh = init_device_mesh("cpu", (2,))

    def results(prepare: Callable) -> tuple[list[Any], Any]:
        model = Counting(mesh)
        called = prepare(model)
        out = []
        for i in range(2):
            x = distribute_tensor(torch.arange(8.0).view(4, 2) + i, mesh, [Replicate()])
            out.append(called(x))
            out[-1].square().sum().backward()
        found = [*out, model.weight, model.weight.grad, *model.buffers()]
        return [whole(each).detach() for each in found], called

    ours, jitted = results(forge.jit)
    told = forge.explain(jitted)
    return {
        "eager": results(lambda model: model)[0],
        "forge": ours,
        "opaque": told.opaque_calls,
        "broken": told.graph_breaks + told.eager,
    }


def uneven(rank: int, plan: str) -> dict[str, Any]:
    """Return losses and gradients of a parallel model whose words have no equal parts, in eager and jitted."""
    model = parallel(plan, words=33, rows=True)
    jitted = forge.jit(model)
    ours, told = train(model, jitted), forge.explain(jitted)
    return {
        "eager": train(parallel(plan, words=33, rows=True)),
        "forge": ours,
        "opaque": told.opaque_calls,
        "broken": told.graph_breaks + told.eager,
    }


def of_varying_parts(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[str]]:
    """Return the results of a function of uneven parts of several lengths, jitted and in eager, and the warnings."""
    mesh = init_device_mesh("cpu", (2,))
    values = [distribute_tensor(torch.arange(float(length)), mesh, [Shard(0)]) for length in (5, 7, 9)]
    double = lambda x: x * 2
    jitted = forge.jit(double)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ours = [whole(jitted(x)) for x in values]
    expected = [whole(double(x)) for x in values]
    return ours, expected, [str(each.message) for each in told if str(each.message).startswith("forge")]


def gathered_parts_of_several_lengths(rank: int) -> tuple[list[torch.Tensor], int]:
    """Return gradients of parts whose length along the sharded dim varies, which the backward reads, and the number of
    programs."""
    mesh = init_device_mesh("cpu", (2,))
    jitted = forge.jit(lambda x: x.redistribute(mesh, [Replicate()]))
    gradients = []
    for length in (8, 16, 12):
        x = distribute_tensor(torch.zeros(2, length), mesh, [Shard(1)]).requires_grad_()
        (jitted(x).to_local() * torch.arange(float(length))).sum().backward()
        gradients.append(whole(x.grad))
    return gradients, forge.explain(jitted).graphs


def added_parts_of_several_lengths(rank: int) -> dict[str, Any]:
    """Return results and gradients of the sum of two tensors with different placements, of several lengths along the
    sharded dim."""
    mesh = init_device_mesh("cpu", (2,))

    def add(x: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(x) + x.redistribute(placements=[Replicate()]).sin()

    def results(function: Callable) -> list[torch.Tensor]:
        found = []
        for length in (8, 16, 12):
            x = distribute_tensor(torch.arange(2.0 * length).view(2, length), mesh, [Shard(1)]).requires_grad_()
            out = function(x)
            whole(out).sum().backward()
            found += [whole(out).detach(), whole(x.grad)]
        return found

    jitted = forge.jit(add)
    ours, told = results(jitted), forge.explain(jitted)
    return {"eager": results(add), "forge": ours, "broken": told.graph_breaks + told.eager}
