"""Values that a frozen program computes from weights alone (forge.jit(freeze=True)), cached until a weight changes.

A weight is unchanged while it is the same tensor, in the same memory, at the same version, which counts torch's
in-place changes. Not everything is counted. A step of a torch.optim optimizer, fused ones included, drops the values
of its parameters. Other libraries' fused steps follow a gradient: while a weight has one, nothing is cached, and cached
values are dropped when one arrives. Writes through `p.data` and `p.numpy()` of a parameter are noticed
(parameter_aliases.py). For those through other aliases (`buffer.data`, `p.detach().numpy()`, DLPack), memory on the CPU
is compared: all of a small weight, one element of a larger one; elsewhere, and if that element stays, use forge.refold.

torch.utils.swap_tensors refuses tensors that have weak references: while it runs, its two have none.
"""

import ctypes
import functools
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from forge.ir.interpreter import skip_dynamo
from forge.ir.locks import new_lock
from forge.ir.strides import to_strides
from forge.runtime.parameter_aliases import changed_parameters, open_aliases, unwatch, watch
from forge.torch_internals.swap_tensors import before_swap, follow_swaps
from forge.torch_internals.tensors import version_of

_BYTES, _PLACE = attrgetter("raw"), torch.Tensor.data_ptr
_WHOLE = 512  # bytes of a weight that is compared as a whole, which takes as long as one element
_folded: "weakref.WeakSet[FoldedWeights]" = weakref.WeakSet()
_folded_lock = new_lock()


class _State(NamedTuple):
    """Values computed from some weights, and the state of the weights at that time. `snapshot` is that of `_look`;
    `bits` is the content of `cells`, which are parts of their memory; `weights` are weak references. `memory` keeps
    their storages, so that no other tensor is allocated there. `hooks` are called when a gradient arrives."""

    snapshot: list[int]
    bits: list[bytes]
    values: tuple[torch.Tensor, ...]
    cells: list[Any]
    memory: list[torch.Tensor]
    weights: list[weakref.ref]
    hooks: list[Any]

    def holds(self, weights: list[torch.Tensor]) -> bool:
        """Return whether these weights are the same tensors, unchanged. The cells are read last: they are in the memory
        of the snapshot, which may be freed if a weight has moved."""
        return _look(weights) == self.snapshot and list(map(_BYTES, self.cells)) == self.bits

    def has_moved(self) -> bool:
        """Return whether a weight is gone or has moved in memory, so that this state is never used again."""
        weights = [weight() for weight in self.weights]
        return any(x is None or x.data_ptr() != alias.data_ptr() for x, alias in zip(weights, self.memory, strict=True))


class FoldedWeights:
    """The part of a program that depends on frozen weights alone, computed by `function` from the inputs at `reads`.

    strides: the strides that the program expects of the values. The values are cached for each set of weights (repeated
    layers may share a program), until one of these changes or dies. `times` counts the computations; `in_training`:
    whether the last one was of weights with gradients, and not cached.
    """

    def __init__(self, function: Callable, reads: Sequence[int], strides: Sequence[tuple[int, ...]]) -> None:
        self.function = function
        self.reads = list(reads)
        self.strides = list(strides)
        self.times = 0
        self.in_training = False
        self._states: dict[tuple[int, ...], _State] = {}
        self._lock = new_lock()
        with _folded_lock:
            _folded.add(self)

    def wrap(self, call: Callable) -> Callable:
        """Return `call`, with the values of the weights as its last arguments."""
        reads, states, compute = self.reads, self._states, self._compute

        def call_with_constants(*inputs: Any) -> Any:
            weights = [inputs[i] for i in reads]
            key = tuple(map(id, weights))
            if open_aliases and not open_aliases.keys().isdisjoint(key):
                _drop_changed(key)
            state = states.get(key)
            if state is not None and state.holds(weights):
                return call(*inputs, *state.values)
            return call(*inputs, *compute(weights))

        return call_with_constants

    def forget(self) -> None:
        """Drop all values; they are recomputed when needed."""
        for key in list(self._states):
            self.drop(key)

    def drop_of(self, weights: frozenset[int]) -> None:
        """Drop the values that depend on any of these weights, by their ids; they are recomputed when needed."""
        for key in [each for each in list(self._states) if not weights.isdisjoint(each)]:
            self.drop(key)

    def drop(self, key: tuple[int, ...]) -> None:
        """Drop the values of these weights; they are recomputed when needed."""
        state = self._states.pop(key, None)
        for hook in () if state is None else state.hooks:
            hook.remove()

    @skip_dynamo
    def _compute(self, weights: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        with self._lock:
            with _folded_lock:
                others = list(_folded)
            for each in others:
                each._drop_moved()
            return self._fold(weights)

    def _fold(self, weights: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        key = tuple(map(id, weights))
        watch(weights)
        _follow_swaps()
        try:
            memory = [x.detach() for x in weights]
            cells = _cells(weights)
            snapshot, bits = _look(weights), list(map(_BYTES, cells))
        except RuntimeError:  # a tensor without a version or its own memory: its changes cannot be noticed
            snapshot = None
        with torch.inference_mode(False), torch.no_grad():
            results = self.function(*weights)
            values = tuple(to_strides(x, strides) for x, strides in zip(results, self.strides, strict=True))
        self.times += 1
        self.drop(key)
        trained = [x for x in weights if x.requires_grad and x.is_leaf]
        self.in_training = any(x.grad is not None for x in trained)
        if snapshot is not None and not self.in_training and _synchronize(values):
            changed = partial(_drop, weakref.ref(self), key)
            hooks = [x.register_post_accumulate_grad_hook(changed) for x in trained]
            alive = [weakref.ref(x, changed) for x in weights]
            self._states[key] = _State(snapshot, bits, values, cells, memory, alive, hooks)
        return values

    def _drop_moved(self) -> None:
        for key, state in list(self._states.items()):
            if state.has_moved():
                self.drop(key)


def _look(weights: list[torch.Tensor]) -> list[int]:
    """Return the versions of weights, and their addresses. Raises RuntimeError if one has none."""
    return [*map(version_of, weights), *map(_PLACE, weights)]


def _cells(weights: list[torch.Tensor]) -> list[Any]:
    """Return the bytes of each weight on the CPU: of all elements if they are few, else of the middle one, or of
    another if that is 0, which scaling does not change. Raises RuntimeError for a weight without memory."""
    return [_cell(x) for x in weights if x.device.type == "cpu" and x.numel()]


def _cell(x: torch.Tensor) -> Any:
    if not x.data_ptr():
        raise RuntimeError(f"a frozen weight of shape {tuple(x.shape)} has no memory on the CPU")
    size = x.element_size()
    extent = size * (1 + sum((length - 1) * stride for length, stride in zip(x.shape, x.stride(), strict=True)))
    if extent <= _WHOLE:
        return (ctypes.c_char * extent).from_address(x.data_ptr())
    cells = []
    for part in (2, 4, 3, 5):
        place = sum(length // part * stride for length, stride in zip(x.shape, x.stride(), strict=True))
        cells.append((ctypes.c_char * size).from_address(x.data_ptr() + place * size))
    return next((cell for cell in cells if any(cell.raw)), cells[0])


def _synchronize(values: Sequence[torch.Tensor]) -> bool:
    """Wait until values on a GPU are complete for every stream, and return whether they may be cached. While a CUDA
    graph is captured they may not: its replay computes them."""
    if not any(x.is_cuda for x in values):
        return True
    if torch.cuda.is_current_stream_capturing():
        return False
    torch.cuda.current_stream(values[0].device).synchronize()
    return True


def _drop(folded: "weakref.ref[FoldedWeights]", key: tuple[int, ...], _: Any) -> None:
    owner = folded()
    if owner is not None:
        owner.drop(key)


@skip_dynamo
def _drop_changed(weights: Collection[int]) -> None:
    """Drop the values of those of these weights to which an alias wrote, as far as that is noticed."""
    _drop_all(changed_parameters(weights))


def _drop_all(weights: Collection[int]) -> None:
    """Drop the values that any program computed from these weights, by their ids; they are recomputed when needed."""
    if weights:
        with _folded_lock:
            there = list(_folded)
        for each in there:
            each.drop_of(frozenset(weights))


def _after_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    """Drop values of an optimizer's parameters after a step, which may change them without increasing their
    versions."""
    if _folded:
        _drop_all({id(x) for group in optimizer.param_groups for x in group["params"]})


register_optimizer_step_post_hook(_after_step)


@before_swap.provide
def _forget(t1: torch.Tensor, t2: torch.Tensor) -> None:
    """Drop the values of two tensors, and the weak references to them."""
    both = {id(t1), id(t2)}
    _drop_all(both)
    unwatch(both)


@functools.cache
def _follow_swaps() -> None:
    follow_swaps.__enter__()
