"""The check of patterns, `make patterns`: the norms, rotary embeddings, gated units and losses of real models that
forge's patterns match, the models' results afterwards, and the time of the search.

    python -m bench.patterns [MODEL ...]
"""

import copy
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import forge
from bench.text_models import NAMES, build, counting
from forge.executors import OperatorExecutor
from forge.ir import Trace
from forge.patterns import Pattern, builtin, replace_patterns
from forge.transforms.cse import cse
from forge.transforms.dce import dce

FAMILIES = ("norm", "rotary", "glu", "loss")
# a model's dtype; mixed is float32 under torch.autocast to bfloat16
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "mixed": torch.float32}


class Finder(OperatorExecutor):
    """An executor that takes every site of the patterns and runs its reference."""

    def __init__(self, patterns: Sequence[Pattern] = builtin.ALL) -> None:
        super().__init__("finder")
        self.patterns = tuple(patterns)
        for pattern in self.patterns:
            self.register_implementation(pattern.symbol, pattern.reference)


@dataclass(frozen=True)
class Sites:
    """The patterns in one model, expected and found, and the difference from its results without patterns."""

    name: str
    precision: str
    expected: Counter
    actual: Counter
    outputs: float
    gradients: float
    rounding: float

    @property
    def missing(self) -> dict[str, int]:
        return {
            each: self.expected[each] - self.actual[each]
            for each in FAMILIES
            if self.actual[each] < self.expected[each]
        }


def family(pattern_id: str) -> str:
    """Return the family of a pattern, by its name."""
    return next(each for each in FAMILIES if each in pattern_id)


@patch.dict(os.environ, FORGE_KEEP_STAGES="1")
def measure(name: str, precision: str, patterns: Sequence[Pattern] = builtin.ALL) -> Sites:
    """Train a model one step through forge, and through forge with every site of the patterns replaced.

    `rounding` is the distance of the gradients without patterns from those of the same weights in float32.
    """
    model, arguments = build(name, PRECISIONS[precision])
    with counting(model) as expected, torch.no_grad():
        model(**arguments)
    mixed = precision == "mixed"
    plain, own, _ = _trained(model, arguments, ["torch"], mixed)
    replaced, ours, jitted = _trained(model, arguments, [Finder(patterns), "torch"], mixed)
    rounding = 0.0
    if precision != "float32":
        _, exact, _ = _trained(copy.deepcopy(model).float(), arguments, None)
        rounding = _gradients_apart(own, exact)
    outputs = max(_difference(replaced.logits, plain.logits), _difference(replaced.loss, plain.loss))
    counts = sites_in(forge.last_traces(jitted))
    return Sites(name, precision, expected, counts, outputs, _gradients_apart(ours, own), rounding)


def _trained(
    model: nn.Module, arguments: dict[str, Any], executors: list | None, mixed: bool = False
) -> tuple[Any, nn.Module, Any]:
    """Return (the result, a copy of the model with its gradients, the calls that ran), in eager without executors."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    own = copy.deepcopy(model)
    run = forge.jit(own, executors=executors) if executors else own
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        result = run(**arguments)
    result.loss.backward()
    return result, own, run


def _gradients_apart(ours: nn.Module, theirs: nn.Module) -> float:
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(_difference(a.grad, b.grad) for a, b in pairs if b.grad is not None)


def sites_in(traces: Iterable[Trace]) -> Counter:
    """Count the composites that replaced a site, by family, except layer norms, which models do not write out."""
    stages = [trace for trace in traces if trace.stage == "patterns"]
    ids = [bound.symbol.id for trace in stages for bound in trace.bound_symbols]
    sites = [each for each in ids if each.startswith("pattern.") and not each.endswith("layer_norm")]
    return Counter(map(family, sites))


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference, relative to the scale of the values."""
    scale = max(theirs.detach().double().abs().max().item(), 1e-3)
    return (ours.detach().double() - theirs.detach().double()).abs().max().item() / scale


def llama_seconds(layers: int = 32, repeats: int = 5) -> tuple[int, int, float, float]:
    """Return (calls, sites, first, best): the processor seconds of matching the shipped patterns in a large Llama's
    trace."""
    trace = _recorded(_llama(layers))
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        _, matches = replace_patterns(trace, builtin.ALL)
        seconds.append(time.process_time() - start)
    return len(trace.bound_symbols), len(matches), seconds[0], min(seconds)


def _llama(layers: int) -> nn.Module:
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def _recorded(model: nn.Module) -> Trace:
    """Return the trace in which patterns are searched."""
    traces: list[Trace] = []

    def keep(trace: Trace) -> Trace:
        traces.append(trace)
        return trace

    torch._dynamo.reset()
    ids = torch.randint(3, 96, (2, 10))
    with torch.no_grad():
        forge.jit(model, transforms=[keep])(input_ids=ids, labels=ids)
    return cse(dce(traces[0]))


def table(rows: Sequence[Sites]) -> str:
    """Return the rows and their totals as text: found/expected in each family."""
    lines = [
        "model           precision" + "".join(f"{each:>9}" for each in FAMILIES) + "   outputs  gradients   rounding"
    ]
    for row in rows:
        counts = "".join(f"{row.actual[each]:>6}/{row.expected[each]:<2}" for each in FAMILIES)
        apart = "".join(f"   {each:8.1e}" for each in (row.outputs, row.gradients, row.rounding))
        lines.append(f"{row.name:<15} {row.precision:<9}{counts}{apart}")
    for precision in dict.fromkeys(row.precision for row in rows):
        lines.append(f"total, {precision}: " + totals([row for row in rows if row.precision == precision]))
    return "\n".join([*lines, "total: " + totals(rows)])


def totals(rows: Sequence[Sites]) -> str:
    """Return the share of expected sites in each family, in per cent; a site found twice counts once."""
    parts = []
    for each in FAMILIES:
        expected = sum(row.expected[each] for row in rows)
        count = sum(min(row.actual[each], row.expected[each]) for row in rows)
        parts.append(f"{each} {count}/{expected} ({100 * count / max(expected, 1):.1f} %)")
    return ", ".join(parts)


def main(names: list[str]) -> None:
    warnings.filterwarnings("ignore")
    rows = []
    for name in names or NAMES:
        for precision in PRECISIONS:
            rows.append(measure(name, precision))
            print(table(rows[-1:]).splitlines()[1], flush=True)
    print("\n" + table(rows))
    calls, sites, first, best = llama_seconds()
    print(
        f"{len(builtin.ALL)} patterns in a 32-layer Llama ({calls} calls): {sites} sites, "
        f"{first:.3f} s first, {best:.3f} s warm"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
