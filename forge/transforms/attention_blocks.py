"""Blockwise attention for masks that depend on an input and hide all but a band of positions.

    attention(q, k, v, band & padding)

becomes, for each block of queries, attention to the keys within its band: its own, and as many before and after
it as the band is wide. Blocks are batches, so torch's kernels run them unchanged, with each block's part of the mask.
Masks of a band alone are left to forge/transforms/attention_masks.py.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from forge import clang, torchlang
from forge.ir import BoundSymbol, TensorProxy, Trace
from forge.ir.proxies import hint_of
from forge.transforms.attention_masks import ATTENTION
from forge.transforms.dce import live_calls
from forge.transforms.fold_constants import independent_calls
from forge.transforms.replacement import rewrite

BLOCKS = (128, 256, 512)  # queries; torch's kernels compute 128 at once
STEP = 64  # keys that kernels compute at once
_HALVES = (torch.bfloat16, torch.float16)

# Keys and values are copied into each block that sees them, and their gradients back. On an H100:
_RATE = 2.4e14  # operations per second, of attention with a mask
_BANDWIDTH = 2e12  # bytes per second
_LAUNCHES = 30e-6  # seconds, of the copies
_TIMES_OF_FORWARD = 3.5  # the operations of a forward and its backward, relative to the forward's


class Blocks(NamedTuple):
    """Blocks of `size` queries, with the number of keys before and after them that their queries can see."""

    size: int
    before: int
    after: int

    @property
    def keys(self) -> int:
        return self.before + self.size + self.after


class _Site(NamedTuple):
    """The arguments of an attention call, and its blocks."""

    arguments: dict[str, Any]
    blocks: Blocks


def attention_blocks(
    trace: Trace,
    run: Callable[[Trace], tuple[torch.Tensor, ...]],
    in_torch: Callable[[BoundSymbol], bool] = lambda bound: True,
    device: str = "cuda",
    pays: Callable[[dict[str, Any], Blocks], bool] | None = None,
    sizes: Sequence[int] = BLOCKS,
    step: int = STEP,
) -> Trace:
    """Return the trace with attention calls in blocks, if their masks hide all but a band.

    Args:
        trace: The program.
        run: Computes the parts of masks that depend on no input.
        in_torch: Returns whether a call runs as torch runs it.
        device: The type of the devices whose calls are changed.
        pays: Returns whether blocks are faster than one call of these arguments; `is_profitable` by default.
        sizes: The numbers of queries of a block.
        step: The keys before and after a block are multiples of it.
    """
    pays = pays or is_profitable
    calls = []
    for bound in trace.bound_symbols:
        if bound.symbol is ATTENTION and _is_candidate(arguments := ATTENTION.bind(bound.args, bound.kwargs), device):
            best = _best(arguments, (0, 0), sizes, step)
            if best is not None and pays(arguments, best):
                calls.append((bound, arguments))
    if not calls:
        return trace
    reaches = _reaches(trace, {arguments["attn_mask"].name: arguments["attn_mask"] for _, arguments in calls}, run)
    sites: dict[str, _Site] = {}
    for bound, arguments in calls:
        reach = reaches.get(arguments["attn_mask"].name)
        best = None if reach is None else _best(arguments, reach, sizes, step)
        if best is not None and pays(arguments, best) and in_torch(bound):
            sites[bound.output.name] = _Site(arguments, best)
    return _rewrite(trace, sites) if sites else trace


def _best(arguments: dict[str, Any], reach: tuple[int, int], sizes: Sequence[int], step: int) -> Blocks | None:
    """Return the blocks that see the fewest keys, and the largest of these."""
    fitting = blocks_of(arguments["query"].shape[-2], *reach, sizes, step)
    return min(fitting, key=lambda blocks: (blocks.keys, -blocks.size), default=None)


def _is_candidate(arguments: dict[str, Any], device: str) -> bool:
    query, key, value, mask = (arguments[name] for name in ("query", "key", "value", "attn_mask"))
    if mask is None or arguments["dropout_p"] or arguments["is_causal"] or query.device.type != device:
        return False
    tensors = (query, key, value, mask)
    if any(x.ndim != 4 or not all(isinstance(size, int) for size in x.shape) for x in tensors):
        return False
    batch, _, length, _ = query.shape
    if not (batch == key.shape[0] == value.shape[0] and mask.shape[0] in (1, batch) and mask.dtype == torch.bool):
        return False
    return key.shape[-2] == length and tuple(mask.shape[-2:]) == (length, length)


def blocks_of(length: int, left: int, right: int, sizes: Sequence[int] = BLOCKS, step: int = STEP) -> Iterator[Blocks]:
    """Yield the blocks that divide queries evenly."""
    before, after = (-(-side // step) * step for side in (left, right))
    for size in sizes:
        if length % size == 0 and max(before, after) <= length - size:
            yield Blocks(size, before, after)


def is_profitable(arguments: dict[str, Any], blocks: Blocks) -> bool:
    """Return whether blocks save more than twice the cost of their copies, in a forward and its backward."""
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    if query.dtype not in _HALVES:
        return False
    batch, heads, length, width = map(hint_of, query.shape)
    gain = _TIMES_OF_FORWARD * 4 * batch * heads * length * (length - blocks.keys) * width / _RATE
    copied = math.prod(map(hint_of, key.shape)) + math.prod(map(hint_of, value.shape))
    traffic = 2 * copied * (1 + blocks.keys / blocks.size) * query.dtype.itemsize
    pays: bool = gain > 2 * (traffic / _BANDWIDTH + _LAUNCHES)
    return pays


def _reaches(
    trace: Trace, masks: dict[str, TensorProxy], run: Callable[[Trace], tuple[torch.Tensor, ...]]
) -> dict[str, tuple[int, int]]:
    """Return how far before and after its own position a query can see, for each mask with an input-independent
    operand that hides everything beyond. A mask that is itself input-independent is left out."""
    calls = independent_calls(trace)
    fixed = {name for bound in calls for name in bound.outputs} | trace.constants.keys()
    makers = {name: bound for bound in trace.bound_symbols for name in bound.outputs}
    operands = {name: _fixed_operands(mask, makers, fixed) for name, mask in masks.items() if name not in fixed}
    targets = {operand.name: operand for group in operands.values() for operand in group}
    if not targets:
        return {}
    output = tuple(targets.values())
    values = run(trace.derive("masks", live_calls(calls, targets), inputs=[], output=output))
    reach = {name: find_reach(value) for name, value in zip(targets, values, strict=True)}
    return {
        name: (min(reach[each.name][0] for each in group), min(reach[each.name][1] for each in group))
        for name, group in operands.items()
        if group
    }


def _fixed_operands(mask: TensorProxy, makers: dict[str, BoundSymbol], fixed: set[str]) -> list[TensorProxy]:
    """Return input-independent operands of the conjunction that forms a mask."""
    if mask.name in fixed:
        return [mask] if mask.ndim >= 2 else []
    maker = makers.get(mask.name)
    if maker is None:
        return []
    operands: list[Any] = []
    if maker.symbol is torchlang.expand:
        operands = [torchlang.expand.bind(maker.args, maker.kwargs)["self"]]
    elif maker.symbol in (torchlang.bitwise_and, torchlang.logical_and):
        operands = [*maker.args, *maker.kwargs.values()]
    tensors = [each for each in operands if isinstance(each, TensorProxy)]
    return [
        operand
        for each in tensors
        if each.dtype == torch.bool and each.shape[-2:] == mask.shape[-2:]
        for operand in _fixed_operands(each, makers, fixed)
    ]


def find_reach(mask: torch.Tensor) -> tuple[int, int]:
    """Return the number of positions before and after its own that a query sees at most."""
    visible = mask.reshape(-1, *mask.shape[-2:]).any(0) if mask.ndim > 2 else mask
    rows = visible.any(-1)
    if not bool(rows.any()):
        return 0, 0
    own = torch.arange(len(visible), device=visible.device)
    first = visible.view(torch.uint8).argmax(-1)
    last = visible.shape[-1] - 1 - visible.flip(-1).view(torch.uint8).argmax(-1)
    before, after = (own - first)[rows].max(), (last - own)[rows].max()
    return max(0, int(before)), max(0, int(after))


def _rewrite(trace: Trace, sites: dict[str, _Site]) -> Trace:
    masks: dict[Any, TensorProxy] = {}

    def attend(bound: BoundSymbol) -> TensorProxy | None:
        site = sites.get(bound.output.name) if bound.symbol is ATTENTION else None
        if site is None:
            return None
        mask = site.arguments["attn_mask"]
        key = mask.name, site.blocks, bound.mode
        if key not in masks:
            masks[key] = _mask_of_blocks(mask, site.arguments["query"].shape[0], site.blocks)
        return _attend(site.arguments, masks[key], site.blocks)

    return rewrite(trace, "attention_blocks", attend, language=clang.language)


def _attend(arguments: dict[str, Any], mask: TensorProxy, blocks: Blocks) -> TensorProxy:
    """Record attention of (batch * blocks, heads, queries, width)."""
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    batch, heads, length, _ = query.shape
    apart = [_as_batches(_in_blocks(query, blocks.size))]
    apart += [_as_batches(_with_neighbours(_in_blocks(x, blocks.size), blocks)) for x in (key, value)]
    out = ATTENTION(*apart, mask, scale=arguments["scale"], enable_gqa=arguments["enable_gqa"])
    out = torchlang.reshape(out, (batch, length // blocks.size, heads, blocks.size, value.shape[-1]))
    return torchlang.reshape(torchlang.permute(out, (0, 2, 1, 3, 4)), (batch, heads, length, value.shape[-1]))


def _in_blocks(x: TensorProxy, size: int) -> TensorProxy:
    """Record positions as (batch, heads, blocks, size, width)."""
    batch, heads, length, width = x.shape
    return torchlang.reshape(x, (batch, heads, length // size, size, width))


def _as_batches(x: TensorProxy) -> TensorProxy:
    batch, heads, count, *rest = x.shape
    return torchlang.reshape(torchlang.permute(x, (0, 2, 1, 3, 4)), (batch * count, heads, *rest))


def _with_neighbours(x: TensorProxy, blocks: Blocks) -> TensorProxy:
    """Record each block with the positions before and after it, zeros beyond the ends."""
    parts = []
    for shift in range(-blocks.before // blocks.size, -(-blocks.after // blocks.size) + 1):
        start = max(0, -blocks.before - shift * blocks.size)
        end = min(blocks.size, blocks.size + blocks.after - shift * blocks.size)
        part = x if (start, end) == (0, blocks.size) else torchlang.narrow(x, 3, start, end - start)
        parts.append(_shifted(part, shift))
    return torchlang.cat(parts, 3) if len(parts) > 1 else parts[0]


def _shifted(x: TensorProxy, shift: int) -> TensorProxy:
    """Record blocks such that block i has the contents of block i + shift."""
    if not shift:
        return x
    length = x.shape[2] - abs(shift)
    rest = torchlang.narrow(x, 2, max(0, shift), length)
    return torchlang.pad(rest, (0, 0, 0, 0, max(0, -shift), max(0, shift)))


def _mask_of_blocks(mask: TensorProxy, batch: int, blocks: Blocks) -> TensorProxy:
    """Record each block's part of a mask: (batch * blocks, heads or 1, queries, keys)."""
    length, device = mask.shape[-1], mask.device
    count = length // blocks.size
    rows = torchlang.reshape(torchlang.arange(length, device=device), (count, blocks.size, 1))
    first = torchlang.arange(-blocks.before, length - blocks.before, blocks.size, device=device)
    offsets = torchlang.arange(blocks.keys, device=device)
    columns = torchlang.add(torchlang.reshape(first, (count, 1, 1)), offsets)
    exists = torchlang.bitwise_and(torchlang.ge(columns, 0), torchlang.lt(columns, length))
    parts = torchlang.getitem(mask, (slice(None), slice(None), rows, torchlang.clamp(columns, 0, length - 1)))
    parts = torchlang.bitwise_and(parts, exists)
    if mask.shape[0] != batch:
        parts = torchlang.expand(parts, (batch, *parts.shape[1:]))
    return _as_batches(parts)
