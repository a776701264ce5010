"""The benchmark of GPT-2's head and loss in chunks of rows, and whole: time and peak memory of a training step.

    python -m bench.head [--rounds 5] [--executors torch]

Peaks are those of a step's allocations, without parameters. On a CUDA device, heads with Qwen3's and Llama-3's
vocabularies follow, in bfloat16, with torch.compile and, if installed, Liger's fused linear cross entropy.
"""

import argparse
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import GPT2Config, GPT2LMHeadModel

import forge
from bench.timing import show_table
from forge.benchmark.model_bench import training_step
from forge.support.timing import in_turn, ratio
from forge.transforms import linear_cross_entropy

VOCABULARY = 32_000
HEADS = {
    "Qwen3's": (4096, 1024, 151_936),
    "Llama-3.2-1B's": (8192, 2048, 128_256),
    "Llama-3-8B's": (8192, 4096, 128_256),
}


class LossOnly(nn.Module):
    """A model whose logits are unused."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, labels=labels).loss


class Head(nn.Module):
    """The head of a language model, with its loss."""

    def __init__(self, rows: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.hidden = nn.Parameter(torch.randn(rows, width))
        self.linear = nn.Linear(width, vocabulary, bias=False)

    def forward(self, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.linear(self.hidden).float(), labels)


class LigerHead(nn.Module):
    """The head with Liger's kernel."""

    def __init__(self, head: Head, function: Callable[..., Any]) -> None:
        super().__init__()
        self.head = head
        self.function = function

    def forward(self, labels: torch.Tensor) -> torch.Tensor:
        result = self.function(self.head.hidden, self.head.linear.weight, labels)
        return result[0] if isinstance(result, tuple) else result


def gpt2() -> nn.Module:
    """Return a GPT-2 of six layers of width 384."""
    config = GPT2Config(vocab_size=VOCABULARY, n_layer=6, n_embd=384, n_head=6, use_cache=False)
    config.embd_pdrop = config.attn_pdrop = config.resid_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # otherwise transformers warns, and Dynamo breaks the graph before the loss
    return model


def peak_bytes(run: Callable[[], Any], device: str) -> int:
    """Return the peak of the bytes that a step allocates, beyond those allocated before it."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def compare(title: str, model: nn.Module, inputs: dict[str, Any], device: str, args: argparse.Namespace) -> None:
    """Print one table: eager, forge with the whole head, forge with chunks; on a GPU, the others too."""
    runs: dict[str, Callable[[], Any]] = {"eager": training_step(model, model.parameters(), inputs)}
    if device == "cuda":
        runs["torch.compile"] = training_step(torch.compile(model), model.parameters(), inputs)
        if isinstance(model, Head):
            with suppress(ImportError):
                from liger_kernel.transformers import functional

                liger = LigerHead(model, functional.liger_fused_linear_cross_entropy)
                runs["Liger"] = training_step(liger, model.parameters(), inputs)
    for name, limit in (("forge, whole", 1 << 60), ("forge, in chunks", linear_cross_entropy.BYTE_LIMIT)):
        runs[name] = training_step(forge.jit(model, executors=args.executors, cache=False), model.parameters(), inputs)
        with mock.patch.object(linear_cross_entropy, "BYTE_LIMIT", limit):
            runs[name]()
    for parameter in model.parameters():
        parameter.grad = None
    seconds = in_turn(runs, rounds=args.rounds)
    rows: list[Sequence[str]] = [(title, "ms", "/ eager", "/ whole", "peak MiB")]
    for name, run in runs.items():
        ms = 1e3 * sorted(seconds[name])[args.rounds // 2]
        ratios = [f"{ratio(seconds[name], seconds[other]):.3f}" for other in ("eager", "forge, whole")]
        rows.append((name, f"{ms:.1f}", *ratios, f"{peak_bytes(run, device) / 2**20:.0f}"))
    show_table(rows)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="only this one")
    parser.add_argument("--executors", nargs="+", help="by name; forge's default ones if not given")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    torch.manual_seed(0)
    ids = torch.randint(VOCABULARY, (8, 256))
    model, inputs = gpt2(), {"input_ids": ids, "labels": ids}
    if args.device != "cuda":
        compare("GPT-2 6x384, 8x256", LossOnly(model), inputs, "cpu", args)
        compare("the same, its logits returned", model, inputs, "cpu", args)
    if args.device != "cpu" and torch.cuda.is_available():
        for name, (rows, width, vocabulary) in HEADS.items():
            model = Head(rows, width, vocabulary).to("cuda", torch.bfloat16)
            labels = torch.randint(vocabulary, (rows,), device="cuda")
            compare(f"{name}: {rows} x {width} x {vocabulary}, bfloat16", model, {"labels": labels}, "cuda", args)


if __name__ == "__main__":
    main()
