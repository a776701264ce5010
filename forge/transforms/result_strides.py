"""Strides of results that the caller sees, for passes that lay out values differently from torch; and of operands of
draws, since random numbers are drawn in memory order."""

from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch

from forge import torchlang
from forge.ir import BoundSymbol, Tag, TensorProxy, Trace
from forge.ir.proxies import Dim
from forge.ir.pytree import tensors
from forge.ir.symbol import substitute
from forge.prims.core import statically_true
from forge.transforms.replacement import record_as

Strides = Mapping[str, tuple[Dim, ...]]

_IN_ROWS = frozenset({torchlang.layer_norm, torchlang.linear, torchlang.matmul, torchlang.mm, torchlang.addmm})
_LAID_OUT = frozenset({Tag.OPAQUE, Tag.EFFECT})  # implementations may depend on torch's strides
_STRIDED = frozenset({torchlang.as_strided, torchlang.as_strided_copy})  # read memory directly


def asks_for_strides(trace: Trace) -> bool:
    """Return whether a call's values may depend on the strides of its arguments."""
    return any(map(_asks_for_strides, trace.bound_symbols))


def _asks_for_strides(bound: BoundSymbol) -> bool:
    return bool(_LAID_OUT & bound.all_tags) or bound.symbol in _STRIDED


def results_to_restore(
    trace: Trace, is_laid_out: Callable[[BoundSymbol], bool], strides: Callable[[Trace], Strides]
) -> dict[str, TensorProxy] | None:
    """Return the results, and the operands of calls that depend on strides, that have other strides if the results of
    some calls have,
    and are contiguous in eager; None if one is not.

    is_laid_out: whether a call's results have other strides. strides: those of all values in torch, which may be slow
    to compute.
    """
    changed: set[str] = set()
    observable = tensors(trace.output)
    for bound in trace.bound_symbols:
        if _depends_on_strides(bound):
            observable += tensors((bound.args, bound.kwargs))
            continue
        follows = bound.symbol not in _IN_ROWS and not changed.isdisjoint(bound.inputs)
        if is_laid_out(bound) or follows:
            changed.update(bound.outputs)
    candidates = {each.name: each for each in observable if each.name in changed and each.ndim > 1}
    if not candidates:
        return {}
    in_eager = strides(trace)
    return candidates if all(_is_contiguous(proxy, in_eager.get(name)) for name, proxy in candidates.items()) else None


def draws(bound: BoundSymbol) -> bool:
    """Return whether a call draws random numbers."""
    return Tag.RANDOM in bound.all_tags


def _depends_on_strides(bound: BoundSymbol) -> bool:
    return draws(bound) or _asks_for_strides(bound)


def _is_contiguous(proxy: TensorProxy, strides: tuple[Dim, ...] | None) -> bool:
    if strides is None:
        return False
    step: Dim = 1
    for size, stride in zip(reversed(proxy.shape), reversed(strides), strict=True):
        if not statically_true(size == 1) and not statically_true(stride == step):
            return False
        step = step * size
    return True


class StandIns:
    """New values for results, under which their users are recorded.

    Args:
        new: The trace that is being recorded.
        results: The results, by name, which are contiguous in eager.

    Attributes:
        values: The new values, by the names of the results.
    """

    def __init__(self, new: Trace, results: Mapping[str, TensorProxy]) -> None:
        self.values = {name: new.tensor(proxy.shape, proxy.dtype, proxy.device) for name, proxy in results.items()}
        self._new = new
        self._pending = dict(results)

    def substitute(self, bound: BoundSymbol) -> BoundSymbol:
        """Return a call of the new values; one that depends on strides reads the results themselves."""
        if not _depends_on_strides(bound):
            return substitute(bound, self.values)
        with self._new.set_tags(bound.tags & {Tag.RECOMPUTE}, bound.source):  # gradients may flow to other readers
            self.restore(bound.inputs)
        return bound

    def restore(self, names: Collection[str] | None = None) -> None:
        """Record results, all by default, as contiguous copies of the new values, where they are not contiguous."""
        for name in list(self._pending) if names is None else [name for name in self._pending if name in names]:
            copy = partial(torchlang.contiguous, self.values[name], memory_format=torch.contiguous_format)
            record_as(self._new, self._pending.pop(name), copy)
