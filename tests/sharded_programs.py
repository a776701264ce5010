"""Programs of the two processes of tests/distributed/test_sharding.py, beside tests/distributed_programs.py."""

import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoints
from distributed_programs import PLANS, Llama, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import forge
from forge.capture.handles import handle_of
from forge.distributed import ShardPolicy, shard
from forge.torchlang import parameter_shards

SMALL = ShardPolicy(bucket_mb=0.004, prefetch_mb=0.004)  # several messages for a small model


class Uneven(nn.Module):
    """A module with parameters whose rows two processes do not share evenly, or are fewer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 7)
        self.up, self.norm, self.down, self.head = nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 1), nn.Linear(1, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.norm(self.up(self.embed(tokens)).relu())))


class Tied(Llama):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Frozen(Llama):
    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.layers[0].attention.q.requires_grad_(False)
        self.layers[1].mlp_norm.requires_grad_(False)


class Checkpointed(Llama):
    """A module in which the backward recomputes each layer."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x))


class Mixed(nn.Module):
    """A module with parameters of two dtypes, every other one of which is gathered with the next."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Embedding(32, 8), nn.Linear(8, 8).double(), nn.LayerNorm(8), nn.Linear(8, 32).double()
        self.layers = nn.ModuleList(layers)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embed, mix, norm, head = self.layers
        return head(norm(mix(embed(tokens).double()).float()).double())


class Outside(nn.Module):
    """A layer that runs in eager and reads the weight of another."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.other = other

    @torch._dynamo.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.other.weight).sin()


class Broken(nn.Module):
    """A model with a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(32, 8), nn.Linear(8, 8), nn.Linear(8, 32)
        self.outside = Outside(self.mix)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.outside(self.mix(self.embed(tokens))))


MODELS = {each.__name__: each for each in (Llama, Uneven, Tied, Frozen, Checkpointed, Mixed)}


def _model(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def _fsdp2(model: nn.Module, **options: Any) -> nn.Module:
    for layer in getattr(model, "layers", ()):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def _train(model: nn.Module, rank: int, micro_batches: int = 1, steps: int = 3, *, clips: bool = True) -> list[Any]:
    """Return losses, norms and gradients of some steps, and the parameters after them. clips: torch clips gradients of
    one mesh only."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    found: list[Any] = []
    for _ in range(steps):
        for _ in range(micro_batches):
            tokens = torch.randint(0, 32, (2, 8), generator=generator)
            loss = F.cross_entropy(whole(model(tokens)).float().flatten(0, 1), tokens.flatten())
            loss.backward()
            found.append(loss.detach())
        if clips:
            found.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        found += [None if p.grad is None else whole(p.grad).clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *[whole(p.detach()) for p in model.parameters()]]


def _told(jitted: Any) -> dict[str, Any]:
    told = forge.explain(jitted)
    return {"graphs": told.graphs, "broken": told.graph_breaks + told.eager, "opaque": told.opaque_calls}


def trained(
    rank: int,
    kind: str,
    micro_batches: int = 1,
    dtypes: dict[str, torch.dtype] | None = None,
    executors: list[str] | None = None,
    **policy: Any,
) -> dict[str, Any]:
    """Return the results of training under FSDP2, sharded in eager, and sharded and jitted."""
    dtypes = dtypes or {}
    reference = _fsdp2(_model(MODELS[kind]), **({"mp_policy": MixedPrecisionPolicy(**dtypes)} if dtypes else {}))
    chosen = ShardPolicy(**{"bucket_mb": SMALL.bucket_mb, "prefetch_mb": SMALL.prefetch_mb, **dtypes, **policy})
    eager = shard(_model(MODELS[kind]), policy=chosen)
    jitted = forge.jit(shard(_model(MODELS[kind]), policy=chosen), executors=executors)
    return {
        "fsdp2": _train(reference, rank, micro_batches),
        "eager": _train(eager, rank, micro_batches),
        "forge": _train(jitted, rank, micro_batches),
        **_told(jitted),
    }


def trained_small_transformer(rank: int) -> dict[str, Any]:
    """Return the results of training a Llama of transformers under FSDP2, and sharded and jitted."""
    import transformers  # other programs do without

    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        use_cache=False,
    )
    words = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(rank))

    def results(prepare: Callable) -> tuple[list[torch.Tensor], Any]:
        torch.manual_seed(0)
        model = prepare(transformers.LlamaForCausalLM(config))
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        return [loss.detach(), *[whole(p.grad) for p in model.parameters()]], model

    ours, jitted = results(lambda model: forge.jit(shard(model, policy=SMALL)))
    fsdp2, _ = results(lambda model: [*map(fully_shard, model.model.layers), fully_shard(model)][-1])
    return {"fsdp2": fsdp2, "forge": ours, **_told(jitted)}


def with_a_number(rank: int) -> list[torch.Tensor]:
    """Return the gradient of a 0-d parameter, averaged by hand, sharded in eager, and jitted."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.scale).exp()

    found = []
    for prepare in (lambda model: model, shard, lambda model: forge.jit(shard(model))):
        model = prepare(Scaled())
        model(torch.ones(3) * (rank + 1)).sum().backward()
        found.append(whole(model._parameters["scale"].grad))
    torch.distributed.all_reduce(found[0], torch.distributed.ReduceOp.AVG)
    return found


def with_a_graph_break(rank: int) -> dict[str, Any]:
    """Return the results of a model part of which runs in eager, sharded in eager and jitted, and whether its
    attributes are DTensors outside."""
    eager, jitted = shard(_model(Broken)), forge.jit(shard(_model(Broken)))
    outside = type(jitted.mix.weight).__name__
    return {
        "eager": _train(eager, rank),
        "forge": _train(jitted, rank),
        "broken": _told(jitted)["broken"],
        "outside": [outside, type(jitted.mix.weight).__name__],
    }


def without_gradients(rank: int) -> dict[str, Any]:
    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(rank))
    jitted = forge.jit(shard(_model(Llama), policy=SMALL))
    with torch.no_grad():
        return {"eager": _model(Llama)(tokens), "forge": jitted(tokens), **_told(jitted)}


class Scaled(nn.Module):
    """A module with parameters of several rows, of one row, and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear, self.head = nn.Parameter(torch.tensor(1.5)), nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.linear(x * self.scale).tanh())


def _penalized(model: nn.Module, x: torch.Tensor, order: int) -> list[torch.Tensor]:
    """Return derivatives of this order: the squares of this process's parts of a sharded model's averaged gradients are
    differentiated again."""
    value = model(x).square().sum()
    for _ in range(order - 1):
        gradients = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
        value = sum(g.to_local().square().sum() for g in gradients)
    value.backward()
    return [whole(p.grad) for p in model.parameters()]


def _penalized_as_one(model: nn.Module, batches: list[torch.Tensor], order: int) -> list[torch.Tensor]:
    """Return the derivatives as one process computes them: of the sum of the processes' values, divided by their
    number."""
    params = list(model.parameters())
    total = sum(model(x).square().sum() for x in batches)
    for _ in range(order - 1):
        averages = [g / len(batches) for g in torch.autograd.grad(total, params, create_graph=True)]
        total = sum(g.square().sum() * (1 if g.ndim else len(batches)) for g in averages)
    return [g / len(batches) for g in torch.autograd.grad(total, params)]


def higher_gradients(rank: int, order: int) -> dict[str, list[torch.Tensor]]:
    """Return derivatives of this order with respect to parameters: of one process, and sharded, in eager and jitted."""
    batches = list(torch.randn(2, 4, 3))
    return {
        "one": _penalized_as_one(_model(Scaled), batches, order),
        "eager": _penalized(shard(_model(Scaled)), batches[rank], order),
        "forge": _penalized(forge.jit(shard(_model(Scaled))), batches[rank], order),
    }


def transformed_by_torch_func(rank: int) -> dict[str, list[torch.Tensor]]:
    """Return results of torch's transforms of a model: as it is, and sharded, in eager and jitted."""
    x = torch.randn(4, 3)
    models = {"one": _model(Scaled), "eager": shard(_model(Scaled)), "forge": forge.jit(shard(_model(Scaled)))}
    return {
        how: [
            torch.vmap(model)(x).detach(),
            torch.func.jacrev(model)(x[0]).detach(),
            torch.func.jacfwd(model)(x[0]).detach(),
            torch.func.hessian(lambda x, model=model: model(x).sum())(x[0]).detach(),
        ]
        for how, model in models.items()
    }


def converted_inputs(rank: int) -> list[torch.dtype]:
    """Return the dtypes of a result, a parameter and its gradient under param_dtype, for inputs of another dtype."""
    model = forge.jit(shard(nn.Linear(4, 4), policy=ShardPolicy(param_dtype=torch.bfloat16)))
    out = model(torch.ones(2, 4))
    out.sum().backward()
    return [out.dtype, model.weight.dtype, model.weight.grad.dtype]


def unequal_batches(rank: int) -> dict[str, list[torch.Tensor]]:
    """Return the results of training with batches and lengths that differ by process: under FSDP2, sharded, and under
    DDP."""

    def train(model: nn.Module) -> list[torch.Tensor]:
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        generator = torch.Generator().manual_seed(rank)
        for step in range(4):
            batch, length = ((2, 8), (3, 5), (1, 9), (4, 8))[step * (1 + 2 * rank) % 4]
            tokens = torch.randint(0, 32, (batch, length), generator=generator)
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            found += [loss.detach(), *[whole(each.grad).clone() for each in model.parameters()]]
            optimizer.step()
            optimizer.zero_grad()
        return found

    return {
        "fsdp2": train(_fsdp2(_model(Llama))),
        "shard": train(forge.jit(shard(_model(Llama), policy=SMALL))),
        "ddp": train(nn.parallel.DistributedDataParallel(forge.jit(_model(Llama)))),
    }


# meshes of two dims


def _on_two_dims(how: str, mesh: DeviceMesh, plan: str) -> nn.Module:
    """Return the model with products sharded along one dim of a mesh, and its parameters along the other."""
    torch.manual_seed(0)
    model = Llama()
    in_layers, outside = PLANS[plan]
    for layer in model.layers:
        parallelize_module(layer, mesh["tensor"], dict(in_layers))
    parallelize_module(model, mesh["tensor"], dict(outside))
    if how == "fsdp2":
        return _fsdp2(model, mesh=mesh["data"])
    sharded = shard(model, mesh["data"], SMALL)
    return forge.jit(sharded) if how == "forge" else sharded


def trained_on_two_dims(rank: int, shape: tuple[int, int], plan: str) -> dict[str, Any]:
    """Return the results of training under FSDP2, in eager and jitted, and the parameters' placements."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    models = {how: _on_two_dims(how, mesh, plan) for how in ("fsdp2", "eager", "forge")}
    results = {how: _train(model, rank // shape[1], clips=plan == "sequence") for how, model in models.items()}
    placements = {how: [str(each.placements) for each in model.parameters()] for how, model in models.items()}
    return {**results, **_told(models["forge"]), "placements": placements}


def trained_as_replicas(rank: int, shape: tuple[int, int], kind: str = "Uneven") -> dict[str, Any]:
    """Return the results of training on a mesh whose first dim has replicas (HSDP), under FSDP2, in eager and
    jitted."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    policy = ShardPolicy(bucket_mb=SMALL.bucket_mb, prefetch_mb=SMALL.prefetch_mb, reduce_dtype=torch.float32)
    mixed = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    models = {
        "fsdp2": _fsdp2(_model(MODELS[kind]), mesh=mesh, mp_policy=mixed),
        "eager": shard(_model(MODELS[kind]), mesh, policy),
        "forge": forge.jit(shard(_model(MODELS[kind]), mesh, policy)),
    }
    results = {how: _train(model, rank) for how, model in models.items()}
    placements = {how: [str(each.placements) for each in model.parameters()] for how, model in models.items()}
    rows = [(row.operation, row.group_size) for row in forge.explain(models["forge"]).collectives]
    return {**results, **_told(models["forge"]), "placements": placements, "rows": rows}


def checkpoints_of_two_dims(rank: int, folder: str) -> bool:
    """Return whether a sharded model reads FSDP2's checkpoint bit for bit, and the other way round."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    same = []
    for write, read in (("fsdp2", "forge"), ("forge", "fsdp2")):
        source, target = (_on_two_dims(how, mesh, "columns and rows") for how in (write, read))
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.zero_()
        checkpoints.save(get_model_state_dict(source), checkpoint_id=f"{folder}/{write}")
        state = get_model_state_dict(target)
        checkpoints.load(state, checkpoint_id=f"{folder}/{write}")
        set_model_state_dict(target, state)
        same.append(_equal(source, target))
    return all(same)


# messages


@contextlib.contextmanager
def _recorded() -> Iterator[list[tuple[str, list[tuple[int, ...]]]]]:
    """Record the collectives of this process, in the order in which they start, with the shapes of the sent tensors."""
    told: list[tuple[str, list[tuple[int, ...]]]] = []
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (parameter_shards, "start_all_gather"),
            (parameter_shards, "start_reduce_scatter"),
            (torch.ops._c10d_functional, "all_reduce"),
        ):
            original = getattr(owner, name)

            def record(x: Any, *args: Any, name: str = name, original: Any = original) -> Any:
                told.append((name, [tuple(each.shape) for each in (x if isinstance(x, list) else [x])]))
                return original(x, *args)

            patch.setattr(owner, name, record)
        yield told


_SAME_EXECUTORS = "Frozen", "Checkpointed"  # models whose regathered parameters depend on the executors


def order_of_messages(rank: int, kind: str, bucket_mb: float) -> tuple[list[Any], list[Any]]:
    """Return the collectives of a step in which the processes' executors differ, and the results of training."""
    policy = ShardPolicy(bucket_mb=bucket_mb, prefetch_mb=bucket_mb)
    executors = ["torch"] if rank and kind not in _SAME_EXECUTORS else ["inductor", "torch"]
    jitted = forge.jit(shard(_model(MODELS[kind]), policy=policy), executors=executors, cache=False)
    before = _train(jitted, rank=0, steps=2)
    with _recorded() as told:  # not while Dynamo traces these functions
        return told, [*before, *_train(jitted, rank=0, steps=1)]


def messages_in_text(rank: int, **policy: Any) -> dict[str, list[tuple[str, list[str]]]]:
    """Return the calls of the final forward and backward that start and await messages, or read a parameter in a
    product."""
    jitted = forge.jit(shard(_model(Llama), policy=ShardPolicy(**policy)), executors=["torch"])
    _train(jitted, rank, steps=1)
    compiled = handle_of(jitted).latest
    names = ("start_unshard", "finish_unshard", "start_reduce", "finish_reduce", "linear", "matmul", "mm")
    return {
        phase: [
            (
                bound.symbol.name.rpartition(".")[2],
                list(bound.inputs if "start" in bound.symbol.name else bound.outputs),
            )
            if bound.symbol.name.startswith(("start", "finish"))
            else (bound.symbol.name.rpartition(".")[2], list(bound.inputs))
            for bound in stages[-1].bound_symbols
            if bound.symbol.name.rpartition(".")[2] in names
        ]
        for phase, stages in (("forward", compiled.traces), ("backward", compiled.backward_traces))
    }


# checkpoints


def checkpointed(rank: int, folder: str) -> dict[str, Any]:
    """Return whether a sharded model reads FSDP2's checkpoint bit for bit, FSDP2 that of the model, and both whole
    states."""

    def fsdp2() -> nn.Module:
        return _fsdp2(Uneven())

    def sharded() -> nn.Module:
        return forge.jit(shard(Uneven()))

    same: dict[str, Any] = {}
    for name, write, read in (("to forge", fsdp2, sharded), ("from forge", sharded, fsdp2)):
        torch.manual_seed(0)
        source = write()
        first = torch.optim.AdamW(source.parameters(), lr=0.1)
        source(torch.arange(8).view(2, 4)).square().mean().backward()
        first.step()
        model_state, optimizer_state = get_state_dict(source, first)
        checkpoints.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/{name}")
        torch.manual_seed(1)
        target = read()
        second = torch.optim.AdamW(target.parameters(), lr=0.1)
        model_state, optimizer_state = get_state_dict(target, second)
        into = {"model": model_state, "optimizer": optimizer_state}
        checkpoints.load(into, checkpoint_id=f"{folder}/{name}")
        set_state_dict(target, second, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
        same[name] = _equal(source, target) and _equal_states(first, second)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    torch.manual_seed(2)
    plain = Uneven()
    target = sharded()
    set_model_state_dict(target, plain.state_dict() if rank == 0 else {}, options=options)
    same["whole"] = _equal(plain, target)
    state = get_model_state_dict(target, options=StateDictOptions(full_state_dict=True))
    same["names"] = list(state) == (list(plain.state_dict()) if rank == 0 else list(state))
    same["whole again"] = rank != 0 or all(torch.equal(state[name], x) for name, x in plain.state_dict().items())
    return same


def _equal(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(model.named_parameters(), other.named_parameters(), strict=True)
    return all(a == b and torch.equal(whole(x.detach()), whole(y.detach())) for (a, x), (b, y) in pairs)


def _equal_states(first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> bool:
    found = [list(each.state.values()) for each in (first, second)]
    pairs = [(x[key], y[key]) for x, y in zip(*found, strict=True) for key in x]
    return bool(pairs) and all(torch.equal(whole(x), whole(y)) for x, y in pairs)


# refusals


def _jitted() -> None:
    shard(forge.jit(nn.Linear(2, 2)))


def _twice() -> None:
    shard(shard(nn.Linear(2, 2)))


def _under_fsdp2() -> None:
    mesh = init_device_mesh("cpu", (2,))
    shard(fully_shard(nn.Linear(2, 2), mesh=mesh), mesh)


def _three_dims() -> None:
    shard(nn.Linear(2, 2), init_device_mesh("cpu", (2, 1, 1)))


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "jitted": (_jitted, ValueError, "the model is jitted; shard it first"),
    "twice": (_twice, ValueError, "the model is sharded already"),
    "under FSDP2": (_under_fsdp2, ValueError, "but must be one of another dim of the mesh that DeviceMesh"),
    "three dims": (_three_dims, ValueError, "mesh has 3 dims, but must have one or two"),
    "no mesh": (lambda: shard(nn.Linear(2, 2), "cpu"), TypeError, "mesh is 'cpu', but must be a DeviceMesh"),
    "no module": (lambda: shard(torch.relu), TypeError, "must be a torch.nn.Module"),
    "no policy": (lambda: shard(nn.Linear(2, 2), policy="all"), TypeError, "policy is 'all', but must be a"),
    "lazy": (lambda: shard(nn.LazyLinear(2)), TypeError, "the parameter weight is a UninitializedParameter"),
}


def refused(rank: int, what: str) -> str:
    call, error, _ = REFUSED[what]
    with pytest.raises(error) as found:
        call()
    return re.sub(r"\s+", " ", str(found.value))


def copied(rank: int) -> list[list[Any]]:
    """Return the results of training a sharded model and its deep copy."""
    model = shard(_model(Llama), policy=SMALL)
    twin = copy.deepcopy(model)
    return [_train(forge.jit(model), rank), _train(forge.jit(twin), rank)]
