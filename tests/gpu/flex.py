"""The cases of flex_attention between other calls: its forward and its gradients, also repeated ones.

All score functions, masks and groups of heads; dtype, head size and length rotate. The second of each pair of lengths
has symbolic sizes.
"""

import itertools
import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import forge
from tests.gpu.attention import HEADS, LAYOUTS, _heads
from tests.gpu.cases import DTYPES, Case, Skipped
from tests.gpu.measure import CONDITIONED, WITHIN, judge, nudged

SCORES = ("none", "distance", "cap", "learned")
MASKS = ("none", "causal", "window", "documents")
WIDTHS = (64, 128, 32)
LENGTHS = ((256, 384), (1024, 512), (300, 200))
BATCH = 2

Index = torch.Tensor


def cases() -> dict[str, Case]:
    """Return every case by name."""
    found = {}
    for turn, (score, mask, heads) in enumerate(itertools.product(SCORES, MASKS, HEADS)):
        dtype, width = ("bfloat16", "float32", "float16")[turn % 3], WIDTHS[turn // 3 % 3]
        layout, lengths = LAYOUTS[turn % 2], LENGTHS[turn // 2 % 3]
        run = partial(_run, score, mask, HEADS[heads], width, layout, DTYPES[dtype], lengths)
        found[f"flex/{score}/{mask}/{heads}/{width}/{layout}/{dtype}"] = Case(run)
    return found


def _run(
    score: str,
    mask: str,
    heads: tuple[int, int],
    width: int,
    layout: str,
    dtype: torch.dtype,
    lengths: tuple[int, int],
    device: torch.device,
) -> tuple[str, str]:
    if device.type == "cpu":
        raise Skipped("torch differentiates no flex_attention on a CPU")
    torch.manual_seed(0)
    learned = torch.randn(heads[0], 2 * max(lengths), dtype=dtype, device=device)

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, learned: torch.Tensor, blocks: object
    ) -> torch.Tensor:
        modify = partial(_SCORES[score], learned) if score != "none" else None
        query, key = query * 1.5 + query, key.tanh()
        out = flex_attention(query, key, value, modify, blocks, enable_gqa=heads[0] != heads[1])
        return out * 2 + out.sin()

    jitted, verdicts = forge.jit(attend), []
    for length in lengths:
        inputs = [
            _heads(count, length, width, layout, dtype, device, BATCH) for count in (heads[0], heads[1], heads[1])
        ]
        gradient = _heads(heads[0], length, width, layout, dtype, device, BATCH)
        blocks = create_block_mask(_mask(mask, length, device), None, None, length, length, device=device)
        blocks = None if mask == "none" else blocks

        def flow(
            function: Callable, inputs: list[torch.Tensor], gradient: torch.Tensor, blocks: object = blocks
        ) -> list[torch.Tensor]:
            leaves = [each.detach().requires_grad_() for each in inputs]
            out = function(*leaves, blocks)
            read = leaves if score == "learned" else leaves[:3]
            first = torch.autograd.grad(out, read, gradient, retain_graph=True)
            return [out.detach(), *first, *torch.autograd.grad(out, read, gradient)]

        def reference(
            draw: int | None, flow: Callable = flow, numbers: tuple = ([*inputs, learned], gradient)
        ) -> list[torch.Tensor]:
            return flow(attend, *nudged(numbers, dtype, draw))

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # eager's call is not compiled
            eager = flow(attend, [*inputs, learned], gradient)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            ours = flow(jitted, [*inputs, learned], gradient)
        verdicts.append(judge(ours, eager, reference))
    explained = forge.explain(jitted)
    if explained.opaque_calls or explained.graph_breaks:
        return "beyond", f"{explained.opaque_calls or explained.graph_breaks}"
    wrong = [each for each in verdicts if each[0] not in (WITHIN, CONDITIONED)]
    return wrong[0] if wrong else max(verdicts, key=lambda verdict: verdict[0] == CONDITIONED)


def _distance(
    learned: torch.Tensor, score: torch.Tensor, b: Index, head: Index, row: Index, column: Index
) -> torch.Tensor:
    return score + 0.1 * (row - column)


def _cap(learned: torch.Tensor, score: torch.Tensor, b: Index, head: Index, row: Index, column: Index) -> torch.Tensor:
    return 3 * torch.tanh(score / 3)


def _learned(
    learned: torch.Tensor, score: torch.Tensor, b: Index, head: Index, row: Index, column: Index
) -> torch.Tensor:
    return score + learned[head, row + column]


_SCORES = {"distance": _distance, "cap": _cap, "learned": _learned}


def _mask(mask: str, length: int, device: torch.device) -> Callable:
    documents = torch.arange(length, device=device) // 100

    def allowed(b: Index, head: Index, row: Index, column: Index) -> torch.Tensor:
        causal = row >= column
        if mask == "window":
            return causal & (row - column < 70)
        if mask == "documents":
            return causal & (documents[row] == documents[column])
        return causal

    return allowed
