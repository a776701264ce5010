"""The benchmark of a Llama's training step: eager, torch.compile, forge, and forge with the example kernels."""

import copy
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import forge
from bench.timing import show_table
from forge.support.timing import in_turn

# the model's sizes, the batch and its dtype, by device
SIZES = {
    "cpu": (
        {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "vocab_size": 2000},
        (2, 128),
        torch.float32,
    ),
    "cuda": (
        {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "vocab_size": 32000},
        (4, 2048),
        torch.bfloat16,
    ),
}


def build(device: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a Llama and the arguments of its call."""
    sizes, shape, dtype = SIZES[device]
    config = LlamaConfig(**sizes, num_attention_heads=16, num_key_value_heads=4, use_cache=False)
    tokens = torch.randint(config.vocab_size, shape, device=device)
    return LlamaForCausalLM(config).to(device, dtype), {"input_ids": tokens, "labels": tokens}


def step(run: Callable, owner: nn.Module, arguments: dict[str, Any]) -> torch.Tensor:
    """Run forward and backward; return the loss."""
    owner.zero_grad()
    loss = run(**arguments).loss
    loss.backward()
    return loss.detach()


def bench_models(folders: list[Path], device: str, *, compiled: bool, rounds: int) -> None:
    model, arguments = build(device)
    makers: dict[str, Callable[[nn.Module], Callable]] = {"eager": lambda own: own}
    if compiled:
        makers["torch.compile"] = torch.compile
    makers["forge"] = forge.jit
    for folder in folders:
        makers[f"forge, {folder.name}"] = lambda own, folder=folder: forge.jit(own, kernels=[folder])
    owners = {name: copy.deepcopy(model) for name in makers}
    runs = {name: make(owners[name]) for name, make in makers.items()}
    losses = {name: step(run, owners[name], arguments).item() for name, run in runs.items()}
    steps = {name: lambda name=name: step(runs[name], owners[name], arguments) for name in runs}
    seconds = {name: statistics.median(times) for name, times in in_turn(steps, rounds=rounds).items()}
    rows = [("a training step", "ms", "/ eager", "loss", "operations by kernels")]
    for name, run in runs.items():
        by = Counter(row.executor for row in forge.explain(run).rows) if name.startswith("forge") else Counter()
        operations = ", ".join(f"{count} {kernel}" for kernel, count in by.items() if "." in kernel)
        ratio = seconds[name] / seconds["eager"]
        rows.append((name, f"{1e3 * seconds[name]:.1f}", f"{ratio:.2f}", f"{losses[name]:.5f}", operations))
    sizes, shape, dtype = SIZES[device]
    print(f"Llama, {', '.join(f'{key} {value}' for key, value in sizes.items())}; {shape} tokens, {dtype}\n")
    show_table(rows)
