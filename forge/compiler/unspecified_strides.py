"""Calls with randomized unspecified behaviour (strides, uninitialized memory), for forge.jit(check="regions").

The strides of a value may depend on the kernel that torch selects at run time, and allocated memory holds arbitrary
contents. A program that happens to get what it expects may fail elsewhere.
"""

import random
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch

from forge.compiler.layout import Layouts
from forge.ir import BoundSymbol, Symbol, Tag, TensorProxy
from forge.ir.pytree import tree_map

_UNCHANGED = frozenset({Tag.EFFECT, Tag.OPAQUE, Tag.VIEW, Tag.DONATES})
_random = random.Random(0)


def with_unspecified(call: BoundSymbol, layouts: Layouts, visible: Collection[str]) -> BoundSymbol:
    """Return a claimed call whose result has random strides where they are a promise, and NaN in uninitialized memory.

    visible: the names of values whose strides the caller of the program sees.
    """
    if call.symbol.out or not _UNCHANGED.isdisjoint(call.all_tags):
        return call
    op = call.symbol.op
    assert op is not None
    if Tag.UNINITIALIZED in call.all_tags:
        return _with_op(call, partial(_call_poisoned, op))
    outputs = call.output if isinstance(call.output, tuple) else (call.output,)
    free = layouts.uncertain - layouts.views.keys() - set(visible)
    places = [index for index, leaf in enumerate(outputs) if isinstance(leaf, TensorProxy) and leaf.name in free]
    return _with_op(call, partial(_with_random_strides, op, places)) if places else call


def _with_op(call: BoundSymbol, op: Callable[..., Any]) -> BoundSymbol:
    symbol = call.symbol
    tags, executor = symbol.tags, symbol.executor
    return call.replace(symbol=Symbol(symbol.name, symbol.id, meta=_meta, tags=tags, executor=executor, op=op))


def _meta(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a claimed call is not recorded again")


def _call_poisoned(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return tree_map(lambda leaf: poison(leaf) if isinstance(leaf, torch.Tensor) else leaf, op(*args, **kwargs))


def _with_random_strides(op: Callable[..., Any], places: Collection[int], *args: Any, **kwargs: Any) -> Any:
    result = op(*args, **kwargs)
    if isinstance(result, torch.Tensor):
        return randomly_strided(result)
    return tuple([randomly_strided(each) if index in places else each for index, each in enumerate(result)])


def randomly_strided(x: torch.Tensor | None) -> torch.Tensor | None:
    """Return a copy of a tensor with its dims in random memory order and NaN in gaps between them; None for None."""
    if x is None or x.numel() < 2:
        return x
    order = _random.sample(range(x.ndim), x.ndim)
    step = _random.choice((1, 2))
    strides = [0] * x.ndim
    for dim in order:
        strides[dim] = step
        step *= x.shape[dim]
    memory = torch.empty(step, dtype=x.dtype, device=x.device)
    return poison(memory).as_strided(x.shape, strides).copy_(x)


def poison(x: torch.Tensor) -> torch.Tensor:
    """Fill uninitialized memory with NaN, the lowest integer or True, and return the tensor."""
    if x.dtype.is_floating_point or x.dtype.is_complex:
        return x.fill_(float("nan"))
    return x.fill_(True if x.dtype == torch.bool else torch.iinfo(x.dtype).min)
