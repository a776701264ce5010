"""Programs of the two processes of tests/distributed: functions of the rank, which return values for the test."""

import contextlib
import copy
import functools
import io
import linecache
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import forge
from forge.capture.handles import handle_of
from forge.ir import Tag

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
    """Return eager's values and gradient and forge's, and forge's report of the program."""
    warnings.simplefilter("ignore")  # torch's newer names
    function, x = COLLECTIVES[name], torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    jitted = forge.jit(function)
    eager, ours = _values_and_gradient(function, x), _values_and_gradient(jitted, x)
    told = forge.explain(jitted)
    return {"eager": eager, "forge": ours, "opaque": told.opaque_calls, "broken": told.graph_breaks + told.eager}


def of_a_result(rank: int) -> dict[str, Any]:
    """Return values and gradients of a function of a pending collective's result: as a tensor and as a DTensor, with
    and without a history."""
    mesh = init_device_mesh("cpu", (2,))

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.view(6, 4).sin() * 2 + x.view(6, 4).cos()

    def results(function: Callable) -> list[torch.Tensor]:
        found = []
        for unwrap in (DTensor.to_local, lambda x: x):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank), requires_grad=True)
            total = DTensor.from_local(x * 2, mesh, [Partial()]).redistribute(placements=[Replicate()], async_op=True)
            assert isinstance(total.detach().to_local(), functional.AsyncCollectiveTensor)
            out = whole(function(unwrap(total)))
            out.square().sum().backward()
            found += [out.detach(), x.grad]
        return [*found, function(functional.all_reduce(x.detach(), "sum", _world()))]

    jitted = forge.jit(function)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ours = results(jitted)
    told = forge.explain(jitted)
    return {
        "eager": results(function),
        "forge": ours,
        "warned": [str(each.message) for each in warned if "forge" in str(each.message)],
        "broken": told.graph_breaks + told.eager,
        "regions": len(told.regions),
    }


def order_of_collectives(rank: int) -> list[list[str]]:
    """Return the collectives of a program's forward and backward in the order in which they run. Two are alike, the
    result of one is unused, and the executors of the processes differ."""

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = functional.all_reduce(x, "sum", _world())
        functional.all_reduce(y.detach(), "sum", _world())
        second = functional.all_reduce(x, "sum", _world())
        gathered = functional.all_gather_tensor(y, 0, _world())
        return (first.sin() * second.cos()).sum() + gathered.exp().sum()

    jitted = forge.jit(program, executors=["torch"] if rank else ["inductor", "torch"])
    x, y = torch.randn(4, requires_grad=True), torch.randn(2, requires_grad=True)
    jitted(x, y).backward()
    compiled = handle_of(jitted).latest
    return [
        [bound.symbol.name.rstrip("_") for bound in stages[-1].bound_symbols if Tag.EFFECT in bound.all_tags]
        for stages in (compiled.traces, compiled.backward_traces)  # one may write in place in only one process
    ]


# tensor parallelism


class Attention(nn.Module):
    """An attention as in Llama, without rotary embeddings."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.mlp = Attention(width, heads), MLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self, width: int = 16, heads: int = 4, words: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


COLUMNS, ROWS = ColwiseParallel, RowwiseParallel
PLANS = {
    "columns and rows": (
        {
            **{f"attention.{name}": COLUMNS() for name in "qkv"},
            "attention.o": ROWS(),
            "mlp.gate": COLUMNS(),
            "mlp.up": COLUMNS(),
            "mlp.down": ROWS(),
        },
        {"head": COLUMNS(output_layouts=Replicate())},
    ),
    "sequence": (
        {
            "attention_norm": SequenceParallel(),
            "mlp_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            **{f"attention.{name}": COLUMNS() for name in "qkv"},
            "attention.o": ROWS(output_layouts=Shard(1)),
            "mlp.gate": COLUMNS(),
            "mlp.up": COLUMNS(),
            "mlp.down": ROWS(output_layouts=Shard(1)),
        },
        {
            "embed": ROWS(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": COLUMNS(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    ),
    "DTensors throughout": (
        {
            "mlp.gate": COLUMNS(use_local_output=False),
            "mlp.up": COLUMNS(use_local_output=False),
            "mlp.down": ROWS(),
        },
        {"head": COLUMNS(use_local_output=False)},
    ),
}


def parallel(plan: str, words: int = 32, *, rows: bool = False) -> nn.Module:
    """Return the model with a plan of PLANS applied. rows: shard the embedding in any plan."""
    torch.manual_seed(0)
    model, mesh = Llama(words=words), init_device_mesh("cpu", (2,))
    in_layers, outside = PLANS[plan]
    if rows:
        outside = {"embed": ROWS(input_layouts=Replicate(), output_layouts=Replicate()), **outside}
    for layer in model.layers:
        parallelize_module(layer, mesh, dict(in_layers))
    return parallelize_module(model, mesh, dict(outside))


def whole(x: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a DTensor; other tensors unchanged."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def train(
    model: nn.Module, step: Callable | None = None, lengths: tuple[int, ...] = (8, 8)
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of a step for each length, and the gradients of the last one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for length in lengths:
        tokens = torch.randint(0, 32, (2, length), generator=torch.Generator().manual_seed(0))
        optimizer.zero_grad()
        logits = whole((step or model)(tokens))
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        losses.append(loss.item())
        gradients = {name: whole(p.grad).clone() for name, p in model.named_parameters()}
        optimizer.step()
    return losses, gradients


def tensor_parallel(
    rank: int, plan: str, executors: list[str] | None = None, cache: str | None = None
) -> dict[str, Any]:
    """Return losses and gradients in eager and jitted, the calls of forge's program, and the graphs that ran in
    eager."""
    with pytest.MonkeyPatch.context() as patch:
        if cache is not None:
            patch.setenv("FORGE_CACHE", "1")
            patch.setenv("FORGE_CACHE_DIR", cache)
        return _tensor_parallel(plan, executors)


def _tensor_parallel(plan: str, executors: list[str] | None) -> dict[str, Any]:
    model = parallel(plan)
    jitted = forge.jit(model, executors=executors)
    ours = train(model, jitted)
    told = forge.explain(jitted)
    compiled = handle_of(jitted).latest
    return {
        "eager": train(parallel(plan)),
        "forge": ours,
        "opaque": sorted(set(told.opaque_calls)),
        "broken": told.graph_breaks + told.eager,
        "cached": compiled is not None and compiled.cached,
        "operations": {claim.operation for claim in compiled.claims} if compiled is not None else set(),
        "regions": [claim.region for claim in compiled.claims if claim.region] if compiled is not None else [],
    }


def of_several_lengths(rank: int, plan: str) -> dict[str, Any]:
    """Return losses and gradients of sequences of several lengths, in eager and jitted, and the parts that are not
    compiled."""
    model, lengths = parallel(plan), (8, 12, 16)
    jitted = forge.jit(model)
    ours = train(model, jitted, lengths)
    told = forge.explain(jitted)
    return {
        "eager": train(parallel(plan), None, lengths),
        "forge": ours,
        "opaque": sorted(set(told.opaque_calls)),
        "broken": told.graph_breaks + told.eager,
        "graphs": told.graphs,
    }


def without_gradients(rank: int) -> dict[str, Any]:
    model, tokens = parallel("columns and rows"), torch.arange(16).view(2, 8)
    jitted = forge.jit(model)
    with torch.no_grad():
        expected, ours = model(tokens), jitted(tokens)
    told = forge.explain(jitted)
    return {"eager": expected, "forge": ours, "broken": told.graph_breaks + told.eager}


def _rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos + torch.cat((-x[..., 2:], x[..., :2]), -1) * sin


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def _total(x: torch.Tensor, place: Any) -> torch.Tensor:
    return x.redistribute(placements=[place])


_SEQUENCE, _HIDDEN, _VOCABULARY = (2, 4, 6), (6,), (8, 6)
CUT: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[Any, Any]]]] = {
    # for each: a function, and its arguments' shapes ("words": a batch of word indices) and placements
    "view": (lambda x: x.view(2, 4, 8, 2).transpose(1, 2).flatten(2).sin(), [((2, 4, 16), Shard(2))]),
    "heads": (lambda x: x.unflatten(-1, (-1, 4)).permute(0, 2, 1, 3).contiguous(), [((2, 4, 16), Shard(2))]),
    "rows of an embedding": (
        lambda weight, words: _total(F.embedding(words, weight), Replicate()).sin(),
        [(_VOCABULARY, Shard(0)), ("words", Replicate())],
    ),
    "rows of an embedding, sequence": (
        lambda weight, words: _total(F.embedding(words, weight), Shard(1)).sin(),
        [(_VOCABULARY, Shard(0)), ("words", Replicate())],
    ),
    "columns of an embedding": (
        lambda weight, words: F.embedding(words, weight).sin(),
        [(_VOCABULARY, Shard(1)), ("words", Replicate())],
    ),
    "layer norm": (
        lambda x, weight, bias: F.layer_norm(x, _HIDDEN, weight, bias),
        [(_SEQUENCE, Shard(1)), (_HIDDEN, Replicate()), (_HIDDEN, Replicate())],
    ),
    "RMS norm": (
        lambda x, weight: F.rms_norm(x, _HIDDEN, weight),
        [(_SEQUENCE, Shard(1)), (_HIDDEN, Replicate())],
    ),
    "RMS norm by hand": (_rms_norm, [(_SEQUENCE, Shard(1)), (_HIDDEN, Replicate())]),
    "rotary": (_rotary, [((2, 4, 3, 4), Shard(1)), ((3, 4), Replicate()), ((3, 4), Replicate())]),
    "softmax": (lambda x: x.softmax(-1), [((4, 6), Shard(0))]),
    "loss": (
        lambda x, words: F.cross_entropy(x.flatten(0, 1), words.flatten(), reduction="sum"),
        [((2, 4, 8), Shard(0)), ("words", Shard(0))],
    ),
    "columns": (
        lambda x, weight, bias: F.linear(x, weight, bias),
        [(_SEQUENCE, Replicate()), (_VOCABULARY, Shard(0)), ((8,), Shard(0))],
    ),
    "rows": (
        lambda x, weight, bias: _total(F.linear(x, weight, bias), Shard(1)),
        [(_SEQUENCE, Shard(2)), (_VOCABULARY, Shard(1)), ((8,), Replicate())],
    ),
}


def of_cut_tensors(rank: int, what: str) -> dict[str, Any]:
    """Return results and gradients of a function of CUT, in eager and jitted, and the parts that are not compiled."""
    mesh, generator = init_device_mesh("cpu", (2,)), torch.Generator().manual_seed(0)
    function, given = CUT[what]
    values = [
        (torch.randint(8, (2, 4), generator=generator) if shape == "words" else torch.randn(shape, generator=generator))
        for shape, _ in given
    ]

    def results(function: Callable) -> list[torch.Tensor]:
        args = [distribute_tensor(value, mesh, [place]) for value, (_, place) in zip(values, given, strict=True)]
        args = [each.detach().requires_grad_(each.is_floating_point()) for each in args]
        out = function(*args)
        whole(out).square().sum().backward()
        return [whole(out).detach(), *[whole(each.grad) for each in args if each.requires_grad]]

    jitted = forge.jit(function)
    ours, told = results(jitted), forge.explain(jitted)
    return {
        "eager": results(function),
        "forge": ours,
        "opaque": told.opaque_calls,
        "broken": told.graph_breaks + told.eager,
    }


def other_mesh(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return a sum of DTensors on two meshes: one of two processes, one of this process alone."""
    two, one = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1), mesh_dim_names=("both", "alone"))["alone"]

    def total(x: torch.Tensor, mesh: torch.distributed.DeviceMesh) -> torch.Tensor:
        return DTensor.from_local(x * 2, mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()

    jitted, x = forge.jit(total), torch.ones(3) * (rank + 1)
    return [jitted(x, two), jitted(x, one), jitted(x, two)], [total(x, two), total(x, one), total(x, two)]


# DistributedDataParallel


class Stack(nn.Module):
    """A stack of layers of more than a mebibyte each, with attention between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(600, 600) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            heads = layer(x).view(len(x), 6, 100).transpose(0, 1)
            x = F.scaled_dot_product_attention(heads, heads, heads).transpose(0, 1).reshape(len(x), 600).relu()
        return x


class Events(TorchDispatchMode):
    """A recorder of this thread's products, messages and copies of weights' gradients, in order, in `told`."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in ("mm", "allreduce_") or (name == "copy_" and args[0].shape == (600, 600)):
            self.told.append(name)
        return func(*args, **(kwargs or {}))


def _stack(jitted: bool, executors: list[str] | None, cap: float) -> DistributedDataParallel:
    torch.manual_seed(0)
    model = Stack()
    return DistributedDataParallel(forge.jit(model, executors=executors) if jitted else model, bucket_cap_mb=cap)


def _step(model: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(torch.randn(8, 600, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
    return {name.removeprefix("module."): p.grad.clone() for name, p in model.named_parameters()}


def in_buckets(rank: int, executors: list[str] | None, cap: float = 1.0) -> dict[str, Any]:
    """Return gradients in eager and jitted, and the events of a step's backward in order: products, messages, copies,
    and the layers whose weights get their gradients."""
    eager, model = _stack(False, None, cap), _stack(True, executors, cap)
    expected, found = [[_step(each, rank) for _ in range(3)] for each in (eager, model)]
    events = _events(model)
    told = forge.explain(model)
    return {
        "eager": expected[0],
        "forge": found,
        "events": events,
        "copies": [each.count("copy_") for each in (_events(eager), events)],
        "broken": told.graph_breaks + told.eager,
    }


def _events(model: DistributedDataParallel) -> list[str]:
    model.zero_grad()
    loss = model(torch.randn(8, 600)).square().sum()
    with Events() as events:
        for i, layer in enumerate(model.module.layers):
            layer.weight.register_post_accumulate_grad_hook(lambda p, i=i: events.told.append(f"layer {i}"))
        loss.backward()
    return events.told


class Halves(nn.Module):
    """A module of two layers, whose class is not torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(8, 8), nn.ModuleList([Halves(), Halves()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return x.tanh()


def _sharded(jitted: bool) -> nn.Module:
    model = Blocks()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = fully_shard(forge.jit(block) if jitted else block)
    return fully_shard(model)


PLACES = {
    "DDP outside": lambda: forge.jit(DistributedDataParallel(Halves())),
    "DDP outside, of a Sequential": lambda: forge.jit(DistributedDataParallel(nn.Sequential(Halves().first))),
    "DDP inside": lambda: DistributedDataParallel(forge.jit(Halves())),
    "FSDP, each block": lambda: _sharded(True),
    "FSDP outside": lambda: forge.jit(_sharded(False)),
}


def compiled_at(rank: int, place: str) -> dict[str, Any]:
    """Return the compiled operations of a model with forge.jit at this place, and the report of the rest."""
    model = PLACES[place]()
    model(torch.ones(2, 8)).sum().backward()
    told = forge.explain(model)
    operations = [row.operation.rpartition(".")[2] for row in told.rows if row.phase == "forward"]
    jitted = [each for each in model.modules() if hasattr(each, "_forge_compiled")]
    breaks = [reason for each in jitted for reason in forge.explain(each).graph_breaks]
    return {
        "operations": operations,
        "outside": told.outside,
        "skipped": told.skipped,
        "text": str(told),
        "breaks": breaks,
    }


def parts_again(rank: int) -> dict[str, Any]:
    """Return two gradients of one graph, of some weights only, and gradients of gradients, in eager and jitted."""

    def results(model: nn.Module) -> list[torch.Tensor]:
        x = torch.randn(8, 600, generator=torch.Generator().manual_seed(rank), requires_grad=True)
        first, last = model.module.layers[0].weight, model.module.layers[3].weight
        loss = model(x).square().sum()
        once = torch.autograd.grad(loss, [first, last, x], retain_graph=True)
        twice = torch.autograd.grad(loss, [first], retain_graph=True)
        late = torch.autograd.grad(loss, [last], create_graph=True)
        again = torch.autograd.grad(late[0].square().sum(), [first])
        return [each.detach() for each in (*once, *twice, *late, *again)]

    return {"eager": results(_stack(False, None, 1.0)), "forge": results(_stack(True, ["torch"], 1.0))}


def accumulated(rank: int) -> dict[str, Any]:
    """Return gradients in eager and jitted of two steps, the first without communication, with checkpoints, under
    autocast."""

    class Checkpointed(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(lambda y, layer=layer: torch.relu(layer(y)), x, use_reentrant=False)
            return x

    def gradients(jitted: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = forge.jit(Checkpointed()) if jitted else Checkpointed()
        wrapped = DistributedDataParallel(model, bucket_cap_mb=1, find_unused_parameters=True)
        x = torch.randn(8, 600, generator=torch.Generator().manual_seed(rank))
        with wrapped.no_sync():
            wrapped(x).square().mean().backward()
        with torch.autocast("cpu", torch.bfloat16):
            loss = wrapped(x).square().mean()
        loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    return {"eager": gradients(False), "forge": gradients(True)}


# documents


def documented(rank: int, name: str, code: str) -> str:
    """Return the text that an example prints in this process, in the existing group."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(torch.distributed, "init_process_group", lambda backend: None)
        patch.setattr(torch.distributed, "destroy_process_group", lambda: None)
        linecache.cache[f"{name}.py"] = (len(code), None, code.splitlines(True), f"{name}.py")
        module = sys.modules[name] = types.ModuleType(name)
        exec(compile(code, f"{name}.py", "exec"), vars(module))
    return "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())


def quantized(rank: int, name: str) -> dict[str, Any]:
    """Return gradients of a data parallel model whose weights are quantized, jitted and in eager, and whether the
    processes have the same weights."""
    transform = {"int8": forge.quantize.Int8WeightOnly, "int4": functools.partial(forge.quantize.Int4WeightOnly, 16)}[
        name
    ]()
    torch.manual_seed(rank)
    jitted = forge.jit(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), transforms=[transform])
    eager = copy.deepcopy(jitted._forge_module)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))
    found = {}
    for key, each in (("forge", jitted), ("eager", eager)):
        model = DistributedDataParallel(each)
        model(x).square().sum().backward()
        found[key] = {path: p.grad for path, p in each.named_parameters() if p.grad is not None}
    return {**found, "weights": {path: p.detach().float() for path, p in jitted.named_parameters()}}
