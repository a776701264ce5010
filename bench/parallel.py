"""The benchmark of a Llama's training in several processes: eager, torch.compile and forge, in turn in one process per
rank.

    torchrun --nproc-per-node 2 -m bench.parallel [--plan ddp shard tensor] [--rounds 10]

A step is a forward, the loss and a backward. On GPUs over nccl: hidden 2048, bfloat16, 4×2048 tokens per rank;
otherwise over gloo and tiny. A system's model is freed before the next one's is made. Milliseconds are the median over
rounds of the slower rank; exposed ones are those of a step in which the GPU only communicates, according to
torch.profiler; GiB is a rank's peak memory (GPUs); the losses are those of 20 steps of gradient descent, with their
greatest relative distance from eager's.

ddp is DDP(forge.jit(model)) and torch.compile(DDP(model)); fsdp jits the sharded model, fsdp-blocks each of its layers;
shard is forge.jit(forge.distributed.shard(model)), compared with FSDP2 with each of its layers compiled; offload is
shard with parameters and gradients in host memory; tensor shards the layers' products by columns and rows; shard-tensor
is both on a mesh of two dims, for an even number of processes, with one batch per two processes.
"""

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import forge
from bench.timing import exposed_seconds, show_table

WARM = 3  # steps between compilation and measurement
STEPS, RATE = 20, 0.01  # of the training whose losses are compared with eager's


class Sizes(NamedTuple):
    """The model's sizes, and the tokens of a rank."""

    hidden: int
    inner: int
    heads: int
    words: int
    batch: int
    length: int
    dtype: torch.dtype


SIZES = {
    "cuda": Sizes(2048, 5632, 16, 32000, 4, 2048, torch.bfloat16),
    "cpu": Sizes(64, 176, 4, 128, 2, 32, torch.float32),
}


class Measured(NamedTuple):
    """The measurements of a system: milliseconds of a step, and of its exposed communication; peak bytes, seconds of
    the first step, losses, and counts of graphs."""

    milliseconds: float
    exposed: float
    memory: int
    first: float
    losses: list[float]
    graphs: int
    breaks: int
    opaque: int


# plans: each makes a model parallel and compiles it with a function, which is called with every module to compile

Compile = Callable[[Any], Any]


def _layers(model: nn.Module) -> nn.ModuleList:
    return model.model.layers


def _data_parallel(model: nn.Module, mesh: DeviceMesh, compile: Compile, system: str) -> nn.Module:
    if system == "forge":
        return DistributedDataParallel(compile(model))
    return compile(DistributedDataParallel(model))


def _sharded(model: nn.Module, mesh: DeviceMesh, compile: Compile, system: str) -> nn.Module:
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh)
    return compile(fully_shard(model, mesh=mesh))


def _sharded_blocks(model: nn.Module, mesh: DeviceMesh, compile: Compile, system: str, **policies: Any) -> nn.Module:
    for name, layer in list(_layers(model).named_children()):
        setattr(_layers(model), name, fully_shard(compile(layer), mesh=mesh, **policies))
    return fully_shard(model, mesh=mesh, **policies)


def _whole_program(model: nn.Module, mesh: DeviceMesh, compile: Compile, system: str) -> nn.Module:
    if system == "forge":
        return compile(forge.distributed.shard(model, mesh))
    return _sharded_blocks(model, mesh, compile, system)


def _offloaded(model: nn.Module, mesh: DeviceMesh, compile: Compile, system: str) -> nn.Module:
    if system == "forge":
        return compile(forge.distributed.shard(model, mesh, forge.distributed.ShardPolicy(cpu_offload=True)))
    return _sharded_blocks(
        model, mesh, compile, system, offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    )


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh, compile: Compile, system: str) -> nn.Module:
    return compile(_cut_products(model, mesh))


def _both(model: nn.Module, mesh: DeviceMesh, compile: Compile, system: str) -> nn.Module:
    both = init_device_mesh(mesh.device_type, (mesh.size() // 2, 2), mesh_dim_names=("data", "tensor"))
    return _whole_program(_cut_products(model, both["tensor"]), both["data"], compile, system)


def _cut_products(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    for layer in _layers(model):
        plan = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
        parallelize_module(layer, mesh, plan)
    return model


PLANS = {
    "ddp": _data_parallel,
    "fsdp": _sharded,
    "fsdp-blocks": _sharded_blocks,
    "shard": _whole_program,
    "offload": _offloaded,
    "tensor": _tensor_parallel,
    "shard-tensor": _both,
}


def _torch_compile(module: nn.Module) -> nn.Module:
    module.compile()  # in place: fully_shard takes the module itself
    return module


def _eager(module: nn.Module) -> nn.Module:
    return module


SYSTEMS: dict[str, Compile] = {"eager": _eager, "torch.compile": _torch_compile, "forge": forge.jit}


def _model(sizes: Sizes, layers: int, device: torch.device) -> nn.Module:
    config = LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_hidden_layers=layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        vocab_size=sizes.words,
        max_position_embeddings=max(sizes.length, 2048),
        use_cache=False,
    )
    torch.manual_seed(0)  # ranks have the same weights
    with device:
        return LlamaForCausalLM(config).to(sizes.dtype)


def measure(
    plan: str,
    system: str,
    layers: int,
    mesh: DeviceMesh,
    device: torch.device,
    rounds: int,
    profile: Path | None,
) -> Measured:
    """Make, compile, time and free one system's model."""
    sizes = SIZES[device.type]
    _free()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    compiled: list[Any] = []

    def compile(module: nn.Module) -> nn.Module:
        compiled.append(SYSTEMS[system](module))
        return compiled[-1]

    model = PLANS[plan](_model(sizes, layers, device), mesh, compile, system)
    sharing = {"tensor": mesh.size(), "shard-tensor": 2}.get(plan, 1)  # processes per batch
    torch.manual_seed(torch.distributed.get_rank() // sharing)
    ids = torch.randint(sizes.words, (sizes.batch, sizes.length), device=device)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    first = _seconds(step, device)
    if system == "forge":
        for each in compiled:
            forge.finish_compiling(each)
    for _ in range(WARM):
        step()
    seconds = [_seconds(step, device) for _ in range(rounds)]
    exposed = _exposed(step, device, f"{plan}-{system}", profile)
    slower = torch.tensor([statistics.median(seconds), first, exposed], device=device)
    torch.distributed.all_reduce(slower, torch.distributed.ReduceOp.MAX)
    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    losses = _losses(model, ids)
    return Measured(
        slower[0].item() * 1e3,
        slower[2].item() * 1e3,
        memory,
        slower[1].item(),
        losses,
        *_graph_counts(system, compiled),
    )


def _exposed(step: Callable[[], None], device: torch.device, name: str, folder: Path | None) -> float:
    """Return the seconds of a step in which a GPU does nothing but communicate; rank 0's profile goes to the folder."""
    if device.type != "cuda" and folder is None:
        return 0.0
    with torch.profiler.profile(activities=[*torch.profiler.supported_activities()]) as profiled:
        step()
        _finish(device)
    with tempfile.TemporaryDirectory() as place:
        trace = Path(place) / f"{name}.json.gz"
        profiled.export_chrome_trace(str(trace))
        if folder is not None and torch.distributed.get_rank() == 0:
            shutil.copy(trace, folder)
        return exposed_seconds(trace)


def _losses(model: nn.Module, ids: torch.Tensor) -> list[float]:
    """Return the losses of STEPS steps of plain gradient descent on one batch, averaged over the ranks."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE, foreach=False), []  # DTensors beside tensors
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    mean = torch.stack(losses)
    torch.distributed.all_reduce(mean)
    return (mean / torch.distributed.get_world_size()).tolist()


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    torch.distributed.barrier()
    _finish(device)
    start = time.perf_counter()
    step()
    _finish(device)
    return time.perf_counter() - start


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _graph_counts(system: str, compiled: list[Any]) -> tuple[int, int, int]:
    """Return the numbers of graphs, of graph breaks and of opaque calls."""
    if system == "forge":
        explanations = [forge.explain(each) for each in compiled]
        return (
            sum(each.graphs for each in explanations),
            sum(len(each.graph_breaks) for each in explanations),
            sum(len(each.opaque_calls) for each in explanations),
        )
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), 0


def _free() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _rows(plan: str, results: dict[str, Measured]) -> Iterator[tuple[str, ...]]:
    first, exact = next(iter((name, each.losses) for name, each in results.items()))
    columns = (
        "ms",
        "/ torch.compile",
        "exposed, ms",
        "GiB",
        "first step, s",
        "loss",
        f"off {first}'s",
        "graphs",
        "breaks",
        "opaque calls",
    )
    yield plan, *columns
    for system, each in results.items():
        yield (
            system,
            f"{each.milliseconds:.1f}",
            f"{each.milliseconds / results['torch.compile'].milliseconds:.3f}",
            f"{each.exposed:.1f}" if each.memory else "-",
            f"{each.memory / 2**30:.2f}" if each.memory else "-",
            f"{each.first:.1f}",
            f"{each.losses[0]:.3f} to {each.losses[-1]:.3f}",
            f"{max(abs(loss / other - 1) for loss, other in zip(each.losses, exact, strict=True)):.1e}",
            *(("-",) * 3 if system == "eager" else map(str, (each.graphs, each.breaks, each.opaque))),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", nargs="+", choices=list(PLANS), help="default: all that the processes can have")
    parser.add_argument("--only", nargs="+", choices=list(SYSTEMS), default=[], help="systems beside torch.compile")
    parser.add_argument("--layers", type=int, help="12 on GPUs, else 2")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--profile", type=Path, help="folder for a Chrome trace of a step of rank 0 of each system")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        print("bench.parallel measures several processes: torchrun --nproc-per-node 2 -m bench.parallel")
        return
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
    ranks = torch.distributed.get_world_size()
    mesh, is_first = init_device_mesh(kind, (ranks,)), torch.distributed.get_rank() == 0
    if is_first:
        name = torch.cuda.get_device_name() if kind == "cuda" else "CPU, 1 thread a rank"
        print(f"torch {torch.__version__}, {ranks} × {name}\n", flush=True)
    layers = options.layers or (12 if kind == "cuda" else 2)
    possible = [plan for plan in PLANS if plan != "shard-tensor" or ranks % 2 == 0]
    for plan in options.plan or possible:
        results = {
            system: measure(plan, system, layers, mesh, device, options.rounds, options.profile)
            for system in SYSTEMS
            if not options.only or system in (*options.only, "torch.compile")
        }
        if is_first:
            show_table([*_rows(plan, results)])
            print(flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
