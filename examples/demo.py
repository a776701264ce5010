"""Jits four models built from their configs (nothing is downloaded), compares them with eager, and prints one trace.

make demo
"""

import copy
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.utils import logging

import forge
from forge.ir.printing import table

FORWARD_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-3  # of the gradient's largest value
ROUNDS = 20


class ConvNet(nn.Module):
    """Two convolutions with batch norm, and a residual connection; returns (loss, logits) as the others do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.block = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16))
        self.head = nn.Linear(16, 10)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.stem(pixel_values)
        x = torch.relu(x + self.block(x))
        logits = self.head(x.mean((2, 3)))
        return nn.functional.cross_entropy(logits, labels), logits


SCALE = 1e-3  # a gradient below it is rounding errors only: of a bias whose values a norm centers


def llama() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        use_cache=False,
    )
    return LlamaForCausalLM(config), token_ids()


def gpt2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = GPT2Config(
        n_embd=64, n_layer=4, n_head=4, vocab_size=128, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # the library's choice for it too, but made with a warning, which breaks the graph
    return model, token_ids()


def vit() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = ViTConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        num_labels=10,
    )
    return ViTForImageClassification(config), images()


def conv_net() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return ConvNet(), images()


def token_ids() -> dict[str, torch.Tensor]:
    ids = torch.randint(128, (2, 16))
    return {"input_ids": ids, "labels": ids}


def images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(10, (2,))}


MODELS = {"Llama, 4 layers": llama, "GPT-2, 4 layers": gpt2, "ViT, 4 layers": vit, "conv net": conv_net}


def infer(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The logits."""
    with torch.no_grad():
        return model(**inputs)[1]


def train(model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradient of every parameter."""
    model.zero_grad()
    model(**inputs)[0].backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@dataclass(frozen=True)
class Result:
    """A row of the table. The two numbers of a pair are inference's and the training step's."""

    forward_difference: float
    gradient_difference: float
    operations: tuple[int, int]
    opaque_calls: int
    graph_breaks: int
    compile_seconds: tuple[float, float]
    speed: tuple[float, float]

    @property
    def good(self) -> bool:
        close = self.forward_difference < FORWARD_TOLERANCE and self.gradient_difference < GRADIENT_TOLERANCE
        return close and self.opaque_calls == self.graph_breaks == 0


def compare(model: nn.Module, inputs: dict[str, torch.Tensor]) -> Result:
    """One inference and one training step, in eager and jitted."""
    jitted = forge.jit(copy.deepcopy(model))
    model.eval(), jitted.eval()
    forward, infer_seconds = first_call(infer, model, jitted, inputs)
    infer_operations = len(forge.explain(jitted).rows)
    infer_speed = speed(infer, model, jitted, inputs)
    model.train(), jitted.train()
    gradient, train_seconds = first_call(train, model, jitted, inputs)
    buffers = [difference(a, b) for a, b in zip(jitted.buffers(), model.buffers(), strict=True)]
    train_speed = speed(train, model, jitted, inputs)
    explanation = forge.explain(jitted)
    return Result(
        max(forward, *buffers, 0.0),
        gradient,
        (infer_operations, len(explanation.rows) - infer_operations),
        len(explanation.opaque_calls),
        len(explanation.graph_breaks),
        (infer_seconds, train_seconds),
        (infer_speed, train_speed),
    )


def first_call(run: Callable, model: nn.Module, jitted: nn.Module, inputs: dict) -> tuple[float, float]:
    """Return the difference of the jitted model's first call from eager's, and how many seconds longer it takes."""
    actual, seconds = timed(run, jitted, inputs)
    expected, eager_seconds = timed(run, model, inputs)
    if isinstance(expected, dict):
        far = max(difference(actual[name], g) / max(g.abs().max().item(), SCALE) for name, g in expected.items())
    else:
        far = difference(actual, expected)
    return far, seconds - eager_seconds


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.double() - b.double()).abs().max().item() if a.numel() else 0.0


def timed(run: Callable, model: nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = run(model, inputs)
    return result, time.perf_counter() - start


def speed(run: Callable, model: nn.Module, jitted: nn.Module, inputs: dict[str, torch.Tensor]) -> float:
    """Eager's time over the jitted one's, each the median of calls made in turn."""
    eager_seconds, jitted_seconds = [], []
    for _ in range(ROUNDS):
        eager_seconds.append(timed(run, model, inputs)[1])
        jitted_seconds.append(timed(run, jitted, inputs)[1])
    return statistics.median(eager_seconds) / statistics.median(jitted_seconds)


def show_table(results: dict[str, Result]) -> None:
    header = ("model", "max forward", "max gradient", "operations", "opaque", "compile seconds", "speed")
    units = ("", "difference", "difference*", "infer / train", "calls", "infer / train", "infer / train")
    rows = [header, units]
    for name, result in results.items():
        rows.append(
            (
                name,
                f"{result.forward_difference:.1e}",
                f"{result.gradient_difference:.1e}",
                "{} / {}".format(*result.operations),
                str(result.opaque_calls),
                "{:.1f} / {:.1f}".format(*result.compile_seconds),
                "{:.2f}x / {:.2f}x".format(*result.speed),
            )
        )
    print(*table(rows), sep="\n")
    print("* of the gradient's largest value. Speed is eager's time over forge's: above 1 is faster than eager.")


def show_trace() -> None:
    """The feed-forward part of a Llama layer, forward and backward, as it runs."""
    model, _ = llama()
    jitted = forge.jit(model.model.layers[0].mlp)
    jitted(torch.randn(2, 8, 64, requires_grad=True)).sum().backward()
    print("\nThe feed-forward part of one Llama layer, as it runs:\n")
    print(forge.last_traces(jitted)[-1])
    print(forge.last_backward_traces(jitted)[-1])


def main() -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    results = {}
    for name, build in MODELS.items():
        torch.manual_seed(0)
        results[name] = compare(*build())
    show_table(results)
    show_trace()
    failed = [name for name, result in results.items() if not result.good]
    if failed:
        sys.exit(f"differs from eager, has opaque calls or graph breaks: {', '.join(failed)}")


if __name__ == "__main__":
    main()
