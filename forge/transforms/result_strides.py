"""Strides of results that the caller sees, where a pass lays out values otherwise than torch."""

from collections.abc import Callable, Mapping
from functools import partial

import torch

from forge import torchlang
from forge.ir import BoundSymbol, Tag, TensorProxy, Trace
from forge.ir.proxies import Dim
from forge.ir.pytree import tensors
from forge.prims.core import statically_true
from forge.transforms.replacement import record_as

Strides = Mapping[str, tuple[Dim, ...]]

_IN_ROWS = frozenset({torchlang.layer_norm, torchlang.linear, torchlang.matmul, torchlang.mm, torchlang.addmm})
_LAID_OUT = frozenset({Tag.OPAQUE, Tag.EFFECT})  # who runs may ask for the strides that torch gives
_STRIDED = frozenset({torchlang.as_strided, torchlang.as_strided_copy})  # reads memory as it lies there


def asks_for_strides(trace: Trace) -> bool:
    """Return whether a call may give other values where its arguments have other strides."""
    return any(_LAID_OUT & bound.all_tags or bound.symbol in _STRIDED for bound in trace.bound_symbols)


def results_to_restore(
    trace: Trace, is_laid_out: Callable[[BoundSymbol], bool], strides: Callable[[Trace], Strides]
) -> dict[str, TensorProxy] | None:
    """Return the results that may have other strides once the results of some calls have, and are contiguous in eager;
    None where one is not.

    is_laid_out: whether a call's results have other strides. strides: those of all values in torch, which may take
    long to find.
    """
    changed: set[str] = set()
    for bound in trace.bound_symbols:
        follows = bound.symbol not in _IN_ROWS and not changed.isdisjoint(bound.inputs)
        if is_laid_out(bound) or follows:
            changed.update(bound.outputs)
    found = {each.name: each for each in tensors(trace.output) if each.name in changed and each.ndim > 1}
    if not found:
        return {}
    in_eager = strides(trace)
    return found if all(_is_contiguous(proxy, in_eager.get(name)) for name, proxy in found.items()) else None


def _is_contiguous(proxy: TensorProxy, strides: tuple[Dim, ...] | None) -> bool:
    if strides is None:
        return False
    step: Dim = 1
    for size, stride in zip(reversed(proxy.shape), reversed(strides), strict=True):
        if not statically_true(size == 1) and not statically_true(stride == step):
            return False
        step = step * size
    return True


def stand_ins(new: Trace, results: Mapping[str, TensorProxy]) -> dict[str, TensorProxy]:
    """Return a new value for each result, under which its call is recorded: `restore` gives the result its name."""
    return {name: new.tensor(proxy.shape, proxy.dtype, proxy.device) for name, proxy in results.items()}


def restore(new: Trace, results: Mapping[str, TensorProxy], values: Mapping[str, TensorProxy]) -> None:
    """Record the results as contiguous copies of `values`, where they are not contiguous. `new` is being recorded."""
    for name, proxy in results.items():
        record_as(new, proxy, partial(torchlang.contiguous, values[name], memory_format=torch.contiguous_format))
