"""The cases of attention between other calls, for each of torch's backends: its forward and its gradients.

Every backend with all groups of heads, head sizes, masks and layouts; dtype, lengths, scale and dropout rotate. They
rotate as well for masks that are windows of positions made by the program, and for attention written out by it.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import forge
from tests.gpu.cases import DTYPES, Case, Skipped
from tests.gpu.measure import judge, nudged

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
HEADS = {"equal": (4, 4), "grouped": (4, 2), "one": (4, 1)}
WIDTHS = (32, 64, 96, 128, 192, 256)
MASKS = ("none", "causal", "bool", "bool_broadcast", "float", "float_broadcast", "float_grad")
LAYOUTS = ("contiguous", "transposed")
WINDOWS = {"both": (40, 40), "causal": (200, 0), "pair": (1, 0), "uneven": (1, 63)}
WRITTEN_MASKS = ("none", "causal", "float", "float_grad", "padding", "filled", "blocks")
WINDOW_LENGTHS = (1024, 1000, 1500)
LENGTHS = ((128, 128), (100, 100), (64, 160), (1, 96), (256, 256))
BATCH = 2
BLOCKS = 4  # which divides the lengths
MANY = 16  # so that blocks pay in each window


def cases() -> dict[str, Case]:
    """Return every case by name."""
    found = {}
    everything = itertools.product(BACKENDS, HEADS, WIDTHS, MASKS, LAYOUTS)
    for turn, (backend, heads, width, mask, layout) in enumerate(everything):
        known = ("bfloat16", "float16", "float32") if backend in ("efficient", "math") else ("bfloat16", "float16")
        dtype = known[turn % len(known)]
        lengths = LENGTHS[turn % len(LENGTHS)]
        lengths = (lengths[1], lengths[1]) if mask == "causal" else lengths
        dropout = 0.2 if turn % 7 == 3 else 0.0
        scale = 0.3 if turn % 3 == 1 else None
        name = f"attention/{backend}/{heads}/{width}/{mask}/{layout}/{dtype}"
        run = partial(_run, backend, HEADS[heads], width, mask, layout, DTYPES[dtype], lengths, dropout, scale)
        found[name] = Case(run)
    return found | _window_cases() | _written_cases()


def _window_cases() -> dict[str, Case]:
    found = {}
    for turn, (heads, width, window, layout) in enumerate(itertools.product(HEADS, WIDTHS, WINDOWS, LAYOUTS)):
        dtype = ("bfloat16", "float16")[turn % 2]
        length = WINDOW_LENGTHS[turn % len(WINDOW_LENGTHS)]
        scale = 0.3 if turn % 5 == 1 else None
        name = f"attention/window/{heads}/{width}/{window}/{layout}/{dtype}"
        run = partial(_run_window, HEADS[heads], width, WINDOWS[window], layout, DTYPES[dtype], length, scale)
        found[name] = Case(run)
    for turn, (heads, width, window) in enumerate(itertools.product(HEADS, (64, 128), WINDOWS)):
        dtype = ("bfloat16", "float16")[turn % 2]
        name = f"attention/padded_window/{heads}/{width}/{window}/{dtype}"
        many = tuple(4 * count for count in HEADS[heads])
        how = (WINDOWS[window], "transposed", DTYPES[dtype], WINDOW_LENGTHS[0], None)
        found[name] = Case(partial(_run_window, many, width, *how, batch=MANY, padded=True))
    return found


def _written_cases() -> dict[str, Case]:
    cases = {}
    for turn, (width, mask, layout, dtype) in enumerate(itertools.product(WIDTHS, WRITTEN_MASKS, LAYOUTS, DTYPES)):
        name = f"attention/written/{width}/{mask}/{layout}/{dtype}"
        cases[name] = Case(partial(_run_written, width, mask, layout, DTYPES[dtype], LENGTHS[turn % 2]))
    return cases


def _run_written(
    width: int, mask: str, layout: str, dtype: torch.dtype, lengths: tuple[int, int], device: torch.device
) -> tuple[str, str]:
    """Run attention written out, where rows of padding see only scores of finfo.min, which eager averages; the fill
    value is in the mask, or filled into the scores. Blocks of a sequence that see themselves alone are another dim."""
    torch.manual_seed(0)
    kind = mask if mask.startswith("float") else "none"
    query, key, value, bias, gain = _inputs((4, 4), width, kind, layout, dtype, lengths, device)
    gradient = _heads(4, lengths[0], width, "contiguous", dtype, device)
    hidden = torch.ones(BATCH, 1, *lengths, dtype=torch.bool, device=device).triu(1)
    hidden[0, :, :9] = True
    least = torch.finfo(dtype).min
    if mask == "padding":
        bias = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill(hidden, least)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if mask == "blocks":
            query, key, value = (each.unflatten(2, (BLOCKS, -1)) for each in (query, key, value))
        scores = query * gain @ key.mT / width**0.5
        if mask == "causal":
            scores = scores.masked_fill(torch.ones(lengths, dtype=torch.bool, device=device).triu(1), -torch.inf)
        elif mask == "filled":
            scores = scores.masked_fill(hidden, least)
        elif bias is not None:
            scores = scores + bias
        out = scores.softmax(-1) @ value.tanh() + 1
        return out.flatten(2, 3) if mask == "blocks" else out

    def flow(function: Callable, inputs: list, gradient: torch.Tensor) -> list[torch.Tensor]:
        leaves = [each.detach().requires_grad_(mask != "filled") for each in inputs if each is not None]
        out = function(*leaves[:3], leaves[3] if mask == "float_grad" else inputs[3])
        if not out.requires_grad:
            return [out]
        return [out, *torch.autograd.grad(out, leaves[: 4 if mask == "float_grad" else 3], gradient)]

    inputs = [query, key, value, bias]
    return judge(
        flow(forge.jit(attend), inputs, gradient),
        flow(attend, inputs, gradient),
        lambda draw: flow(attend, *nudged((inputs, gradient), dtype, draw)),
    )


def _run_window(
    heads: tuple[int, int],
    width: int,
    window: tuple[int, int],
    layout: str,
    dtype: torch.dtype,
    length: int,
    scale: float | None,
    device: torch.device,
    *,
    batch: int = BATCH,
    padded: bool = False,
) -> tuple[str, str]:
    torch.manual_seed(0)
    *inputs, _, gain = _inputs(heads, width, "none", layout, dtype, (length, length), device, batch)
    gradient = _heads(heads[0], length, width, layout, dtype, device, batch)
    padding = torch.ones(batch, 1, 1, length, dtype=torch.bool, device=device)
    padding[0, ..., length * 3 // 4 :] = False
    masked = _attend(False, 0.0, scale, heads[0] != heads[1])

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gain: torch.Tensor, padding: torch.Tensor
    ) -> torch.Tensor:
        positions = torch.arange(length, device=device)
        distance = positions - positions[:, None]
        mask = (distance >= -window[0]) & (distance <= window[1])
        out = masked(query, key, value, mask & padding if padded else mask, gain)
        return out.masked_fill(~padding.mT, 0) if padded else out  # kernels differ in fully masked rows

    def flow(function: Callable, inputs: list, gain: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
        leaves = [each.detach().requires_grad_() for each in inputs]
        out = function(*leaves, gain, padding)
        return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]

    def reference(draw: int | None) -> list[torch.Tensor]:
        with sdpa_kernel([SDPBackend.MATH]):
            return flow(attend, *nudged((inputs, gain, gradient), dtype, draw))

    eager = flow(attend, inputs, gain, gradient)
    jitted = forge.jit(attend)
    ours = flow(jitted, inputs, gain, gradient)
    stages = forge.last_traces(jitted)
    found = {bound.symbol.id for stage in stages for bound in stage.bound_symbols} | {stage.stage for stage in stages}
    if device.type == "cuda" and found.isdisjoint(("forge.window_attention", "attention_blocks")):
        return "beyond", "it computes what the mask hides"
    return judge(ours, eager, reference)


def _run(
    backend: str,
    heads: tuple[int, int],
    width: int,
    mask: str,
    layout: str,
    dtype: torch.dtype,
    lengths: tuple[int, int],
    dropout: float,
    scale: float | None,
    device: torch.device,
) -> tuple[str, str]:
    torch.manual_seed(0)
    inputs = _inputs(heads, width, mask, layout, dtype, lengths, device)
    gradient = _heads(heads[0], lengths[0], width, layout, dtype, device)
    attend = _attend(mask == "causal", dropout, scale, heads[0] != heads[1])

    def flow(function: Callable, inputs: list, gradient: torch.Tensor) -> list[torch.Tensor]:
        leaves = [each.detach().requires_grad_() for each in inputs[:3]]
        given = inputs[3]
        if mask == "float_grad":
            given = given.detach().requires_grad_()
            leaves.append(given)
        torch.manual_seed(1)
        out = function(*leaves[:3], given, inputs[4])
        return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]

    def in_eager(inputs: list, gradient: torch.Tensor) -> list[torch.Tensor]:
        with sdpa_kernel([BACKENDS[backend]]):
            return flow(attend, inputs, gradient)

    def reference(draw: int | None) -> list[torch.Tensor]:
        wide, wide_gradient = nudged((inputs, gradient), dtype, draw)
        if dropout:  # in float64, other numbers are drawn: use eager's own results for perturbed inputs
            narrow = [
                each.to(dtype) if isinstance(each, torch.Tensor) and each.is_floating_point() else each for each in wide
            ]
            return in_eager(narrow, wide_gradient.to(dtype))
        with sdpa_kernel([SDPBackend.MATH]):
            return flow(attend, wide, wide_gradient)

    try:
        eager = in_eager(inputs, gradient)
    except RuntimeError as error:
        if "No available kernel" not in str(error) and "No viable backend" not in str(error):
            raise
        raise Skipped("torch has no such kernel for it") from None
    with sdpa_kernel([BACKENDS[backend]]):
        ours = flow(forge.jit(attend), inputs, gradient)
    return judge(ours, eager, reference)


def _attend(causal: bool, dropout: float, scale: float | None, groups: bool) -> Callable:
    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, gain: torch.Tensor
    ) -> torch.Tensor:
        query, key = query * gain + query, key * gain - key
        out = F.scaled_dot_product_attention(
            query, key, value.tanh(), mask, dropout, causal, scale=scale, enable_gqa=groups
        )
        return out * gain + out

    return attend


def _heads(
    heads: int, length: int, width: int, layout: str, dtype: torch.dtype, device: torch.device, batch: int = BATCH
) -> torch.Tensor:
    """Return a tensor of shape (batch, heads, length, width); transposed: a view of a projection's result."""
    if layout == "contiguous":
        return torch.randn(batch, heads, length, width, dtype=dtype, device=device)
    return torch.randn(batch, length, heads, width, dtype=dtype, device=device).transpose(1, 2)


def _inputs(
    heads: tuple[int, int],
    width: int,
    mask: str,
    layout: str,
    dtype: torch.dtype,
    lengths: tuple[int, int],
    device: torch.device,
    batch: int = BATCH,
) -> list[Any]:
    query = _heads(heads[0], lengths[0], width, layout, dtype, device, batch)
    key, value = (_heads(heads[1], lengths[1], width, layout, dtype, device, batch) for _ in range(2))
    gain = torch.rand(width, dtype=dtype, device=device) + 0.5
    shape = (batch, 1, *lengths) if mask.endswith("_broadcast") else (batch, heads[0], *lengths)
    shape = lengths if mask == "bool_broadcast" else shape
    given = None
    if mask.startswith("bool"):
        given = torch.rand(shape, device=device) > 0.3
        given[..., 0] = True  # a row that attends to nothing is NaN or not, depending on the kernel
    elif mask.startswith("float"):
        given = torch.randn(shape, dtype=dtype, device=device)
    return [query, key, value, given, gain]
