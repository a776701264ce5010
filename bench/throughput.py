"""The benchmark of whole models: step time, memory and first call of forge against eager and torch.compile.

    python -m bench.throughput [--device cpu|cuda] [--only NAME …] [--rounds 5] [--kernels FOLDER]
                               [--freeze] [--cuda-graphs] [--nvfuser] [--json FILE] [--png FILE]

All systems run in one process, in turn; each has a deep copy of the model. `memory` is the peak of a step beyond the
parameters and gradients (CUDA), or the bytes that the forward saves for the backward (CPU).
"""

import argparse
import copy
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers.utils import logging

from bench.common import FROZEN, finish_compiling, jit, systems
from bench.timing import show_table
from forge.benchmark.model_bench import System, entry, inference, training_step
from forge.support.timing import in_turn, ratio


class Case(NamedTuple):
    """A model, the arguments of its call, and whether a step trains it."""

    model: nn.Module
    arguments: dict[str, Any]
    training: bool


class Chain(nn.Module):
    """A chain of pointwise calls, a norm and a softmax; returns a number in training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(nn.functional.gelu(x * 2 + 1) * torch.sigmoid(x) + x)
        h = torch.softmax(h, -1) * torch.tanh(h)
        return h.square().mean() if self.training else h


def _ids(vocabulary: int, shape: tuple[int, int], device: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(vocabulary, shape, device=device)
    return {"input_ids": ids, "labels": ids}


def _gpt2(device: str, vocabulary: int = 4096) -> Case:
    config = transformers.GPT2Config(
        n_layer=6, n_embd=384, n_head=6, vocab_size=vocabulary, n_positions=256, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None, loss_type="ForCausalLM",
    )  # fmt: skip
    return Case(transformers.GPT2LMHeadModel(config).to(device), _ids(vocabulary, (4, 256), device), True)


def _llama(device: str, shape: tuple[int, int], training: bool, dtype: torch.dtype, **sizes: int) -> Case:
    config = transformers.LlamaConfig(**sizes, use_cache=False)
    model = transformers.LlamaForCausalLM(config).to(device, dtype)
    arguments = _ids(config.vocab_size, shape, device)
    return Case(model, arguments if training else {"input_ids": arguments["input_ids"]}, training)


_LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 4096,
}
_LLAMA_SMALL = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
}


def _bert(device: str, training: bool, shape: tuple[int, int], **sizes: int) -> Case:
    config = transformers.BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = transformers.BertForSequenceClassification(config).to(device, torch.bfloat16)
    labels = {"labels": torch.zeros(shape[0], dtype=torch.long, device=device)} if training else {}
    return Case(model, {"input_ids": _ids(config.vocab_size, shape, device)["input_ids"], **labels}, training)


def _resnet(device: str, training: bool, dtype: torch.dtype, batch: int, **sizes: Any) -> Case:
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes)).to(device, dtype)
    labels = {"labels": torch.zeros(batch, dtype=torch.long, device=device)} if training else {}
    pixels = torch.randn(batch, 3, 224, 224, device=device, dtype=dtype)
    return Case(model, {"pixel_values": pixels, **labels}, training)


def _vit(device: str) -> Case:
    config = transformers.ViTConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = transformers.ViTForImageClassification(config).to(device, torch.bfloat16)
    pixels = torch.randn(32, 3, 224, 224, device=device, dtype=torch.bfloat16)
    return Case(model, {"pixel_values": pixels, "labels": torch.zeros(32, dtype=torch.long, device=device)}, True)


_RESNET_18 = {"depths": [2, 2, 2, 2], "layer_type": "basic", "hidden_sizes": [64, 128, 256, 512]}
_SMALL_BERT = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}

CASES: dict[str, dict[str, Callable[[], Case]]] = {
    "cpu": {
        "GPT-2 6×384, training": lambda: _gpt2("cpu"),
        "GPT-2 6×384, 32,000 words, training": lambda: _gpt2("cpu", 32000),
        "Llama 8×512, inference": lambda: _llama("cpu", (1, 128), False, torch.float32, **_LLAMA_SMALL),
        "BERT 4×256 bfloat16, inference": lambda: _bert("cpu", False, (4, 128), **_SMALL_BERT),
        "ResNet-18, inference": lambda: _resnet("cpu", False, torch.float32, 2, **_RESNET_18),
        "chain, forward": lambda: Case(Chain(1024), {"x": torch.randn(1024, 1024)}, False),
        "chain, training": lambda: Case(Chain(1024), {"x": torch.randn(1024, 1024, requires_grad=True)}, True),
    },
    "cuda": {
        "Llama-1B, training 4×2048": lambda: _llama("cuda", (4, 2048), True, torch.bfloat16, **_LLAMA_1B),
        "Llama-1B, inference 1×2048": lambda: _llama("cuda", (1, 2048), False, torch.bfloat16, **_LLAMA_1B),
        "Llama-1B, inference 1×128": lambda: _llama("cuda", (1, 128), False, torch.bfloat16, **_LLAMA_1B),
        "GPT-2 6×384, training": lambda: _gpt2("cuda"),
        "ViT-B bfloat16, training": lambda: _vit("cuda"),
        "BERT-base bfloat16, training": lambda: _bert("cuda", True, (32, 128)),
        "ResNet-50 bfloat16, training": lambda: _resnet("cuda", True, torch.bfloat16, 64),
    },
}


class Measured(NamedTuple):
    """The measurements of a system: seconds of each round, bytes held, seconds of the first call, and the loss or the
    sum of the output."""

    seconds: list[float]
    memory: int
    first: float
    value: float


def measure(case: Case, compared: list[System], rounds: int) -> dict[str, Measured]:
    """Measure every system on a copy of the model."""
    runs: dict[str, Callable[[], Any]] = {}
    first, memory, values = {}, {}, {}
    for system in compared:
        model = copy.deepcopy(case.model).train(case.training)
        prepared = system.prepare(model)
        run = inference(prepared, case.arguments)
        if case.training:
            run = training_step(prepared, model.parameters(), case.arguments)
        start = time.perf_counter()
        values[system.name] = _value(run())
        _finish()
        first[system.name] = time.perf_counter() - start
        memory[system.name] = _peak_bytes(run, prepared, model, case)
        runs[system.name] = run
    finish_compiling()
    seconds = in_turn(runs, rounds=rounds, batch_seconds=0.2)
    return {name: Measured(seconds[name], memory[name], first[name], values[name]) for name in runs}


def _finish() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _value(result: Any) -> float:
    tensor = result if isinstance(result, torch.Tensor) else result[0]
    return tensor.detach().float().mean().item()


def _peak_bytes(run: Callable, prepared: Callable, model: nn.Module, case: Case) -> int:
    """Return the bytes at a step's peak beyond those allocated before it; on the CPU, the bytes that its forward
    saves."""
    gc.collect()
    if next(iter(case.arguments.values())).is_cuda:
        run()
        model.zero_grad()
        _finish()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        _finish()
        return torch.cuda.max_memory_allocated() - before
    return _saved(prepared, model, case) if case.training else 0


def _saved(prepared: Callable, model: nn.Module, case: Case) -> int:
    parameters = {each.untyped_storage()._cdata for each in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = prepared(**case.arguments)
    del result
    return sum(storage.nbytes() for key, storage in storages.items() if key not in parameters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(CASES), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", default=[], help="cases whose name contains one of these")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kernels", type=Path, help="a folder of kernels for one more row of forge")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--freeze", action="store_true", help="one more row of forge, frozen, where nothing is trained")
    parser.add_argument("--cuda-graphs", action="store_true", help="rows with CUDA graphs, torch.compile's too")
    parser.add_argument("--nvfuser", action="store_true", help="one more row of forge, in which nvFuser fuses")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("bench.throughput --device cuda measures on a GPU, and there is none here")
        return
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    compared = [each for each in systems() if each.name in ("eager", "torch.compile", "forge")]
    if options.cuda_graphs:
        compared.append(System("torch.compile, graphs", lambda f: torch.compile(entry(f), mode="reduce-overhead")))
        compared.append(System("forge, graphs", partial(jit, cuda_graphs=True)))
    if options.nvfuser:
        compared.append(System("forge, nvFuser", partial(jit, executors=["nvfuser", "torch"])))
    if options.kernels:
        compared.append(System(f"forge, {options.kernels.name}", partial(jit, kernels=[options.kernels])))
    print(f"torch {torch.__version__}, {_machine(options.device)}\n", flush=True)
    results = {}
    for name, make in CASES[options.device].items():
        if options.only and not any(part in name for part in options.only):
            continue
        torch.manual_seed(0)
        torch._dynamo.reset()
        gc.collect()
        case = make()
        more = [FROZEN] if options.freeze and not case.training else []
        results[name] = measure(case, [*compared, *more], options.rounds)
        show_table(_rows(name, results[name]))
        print(flush=True)
    if options.json:
        options.json.write_text(json.dumps(_as_json(results, options.device), indent=2))
    if options.png:
        _draw(results, options.png)


def _machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()}, 1 thread"


def _rows(name: str, results: dict[str, Measured]) -> list[tuple[str, ...]]:
    rows = [(name, "ms", "/ eager", "/ torch.compile", "memory, MB", "/ eager", "first call, s", "value")]
    eager, peer = results["eager"], results["torch.compile"]
    for system, each in results.items():
        rows.append(
            (
                system,
                f"{statistics.median(each.seconds) * 1e3:.2f}",
                f"{ratio(each.seconds, eager.seconds):.3f}",
                f"{ratio(each.seconds, peer.seconds):.3f}",
                f"{each.memory / 1e6:.0f}",
                f"{each.memory / eager.memory:.2f}" if eager.memory else "",
                f"{each.first:.1f}",
                f"{each.value:.5f}",
            )
        )
    return rows


def _as_json(results: dict[str, dict[str, Measured]], device: str) -> dict[str, Any]:
    cases = {name: {system: each._asdict() for system, each in of.items()} for name, of in results.items()}
    return {"torch": torch.__version__, "machine": _machine(device), "cases": cases}


def _draw(results: dict[str, dict[str, Measured]], path: Path) -> None:
    """Draw bars of time by case, as ratios to eager."""
    import matplotlib.pyplot as plt  # only needed for a plot

    figure, axes = plt.subplots(figsize=(8, 0.7 * len(results) + 1.5))
    names = list(results)
    labels = list(next(iter(results.values())))
    for place, label in enumerate(labels):
        values = [ratio(results[name][label].seconds, results[name]["eager"].seconds) for name in names]
        axes.barh([i + place * 0.25 for i in range(len(names))], values, height=0.22, label=label)
    axes.set_yticks([i + 0.25 for i in range(len(names))], names)
    axes.invert_yaxis()
    axes.set_xlabel("time / eager (less is faster)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
