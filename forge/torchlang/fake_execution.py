"""The execution of torch functions on fake tensors, which shows the operators they run and the effects on arguments."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from forge.ir import SYMBOLIC_TYPES, TensorProxy
from forge.ir.proxies import hint_of
from forge.ir.pytree import leaves, tree_map
from forge.torch_internals.dispatch import DisableTorchFunction, TorchDispatchMode, disable_current_modes, schema_of
from forge.torch_internals.fake_tensors import FakeTensorMode
from forge.torch_internals.tensors import storage_id


def run_on_fake_tensors(
    function: Callable,
    args: tuple,
    kwargs: dict,
    recorder: TorchDispatchMode,
    dtype: Callable[[TensorProxy], torch.dtype] = lambda proxy: proxy.dtype,
    grad: bool = False,
) -> list[Any] | None:
    """Run a function under `recorder` on fake tensors with the proxies' metadata, in `dtype`, with grad enabled or not.

    Return the leaves of its arguments; None if it raises.
    """
    mode = torch.set_grad_enabled(grad)
    with disable_current_modes(), DisableTorchFunction(), mode, FakeTensorMode():
        try:
            args, kwargs = tree_map(lambda leaf: _empty(leaf, dtype), (args, kwargs))  # a length may have no value yet
            arguments = list(leaves((args, kwargs)))
            with recorder:
                function(*args, **kwargs)
        except Exception:
            return None
    return arguments


def _empty(leaf: Any, dtype: Callable[[TensorProxy], torch.dtype]) -> Any:
    if isinstance(leaf, SYMBOLIC_TYPES):
        return leaf.node.hint
    if not isinstance(leaf, TensorProxy):
        return leaf
    shape = [hint_of(size) for size in leaf.shape]
    if leaf.strides is None:
        return torch.empty(shape, dtype=dtype(leaf), device=leaf.device)
    tensor = torch.empty_strided(shape, list(map(hint_of, leaf.strides)), dtype=leaf.dtype, device=leaf.device)
    return tensor.to(dtype(leaf))  # a conversion makes a slice contiguous, which operators may depend on


class EffectRecorder(TorchDispatchMode):
    """A mode that records the side effects of the operators that run under it.

    writes: the memory that they change. tracked: the part of it that they change under autograd (with grad enabled, not
    through detach). reshaped: the tensors whose own shape or memory they change. random: whether they draw random
    numbers. acts: whether one of them returns nothing and changes no tensor (an assertion).
    """

    def __init__(self) -> None:
        super().__init__()
        self.writes: set[int] = set()
        self.tracked: set[int] = set()
        self.detached: list[torch.Tensor] = []
        self.reshaped: list[torch.Tensor] = []
        self.random = False
        self.acts = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        changed = changed_tensors(func, args, kwargs)
        before = [_layout(tensor) for tensor in changed]
        result = func(*args, **kwargs)
        self.writes.update(memory for *_, memory in before)
        if torch.is_grad_enabled():
            self.tracked.update(was[-1] for x, was in zip(changed, before, strict=True) if not self.is_detached(x))
        if func is torch.ops.aten.detach.default or any(map(self.is_detached, args)):
            self.detached += [each for each in leaves(result) if isinstance(each, torch.Tensor)]
        self.reshaped += [tensor for tensor, was in zip(changed, before, strict=True) if _layout(tensor) != was]
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        self.acts |= not changed and not schema_of(func).returns
        return result

    def is_detached(self, leaf: Any) -> bool:
        return any(leaf is each for each in self.detached)


def changed_tensors(operator: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Return the tensor arguments that an operator changes, by its schema."""
    arguments = schema_of(operator).arguments
    values = [*args, *[kwargs.get(each.name) for each in arguments[len(args) :]]]
    return [
        tensor
        for argument, value in zip(arguments, values, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in leaves(value)
        if isinstance(tensor, torch.Tensor)
    ]


def _memory(tensor: torch.Tensor) -> int:
    return storage_id(tensor)


def _layout(tensor: torch.Tensor) -> tuple:
    return tensor.shape, tensor.stride(), _memory(tensor)


class ObservedEffects(NamedTuple):
    """The side effects of a call.

    changed: the leaves of its arguments that it changes, by position; silently: those that it changes without grad,
    whatever the surrounding mode. reshapes: whether it changes the shape or the memory of one.
    """

    changed: list[int]
    silently: list[int]
    reshapes: bool
    random: bool
    acts: bool


def observe_effects(function: Callable, args: tuple, kwargs: dict) -> ObservedEffects | None:
    """Return a call's side effects; None if they cannot be observed without data."""
    recorder = EffectRecorder()
    arguments = run_on_fake_tensors(function, args, kwargs, recorder, grad=True)
    if arguments is None:
        return None
    changed = [
        i for i, leaf in enumerate(arguments) if isinstance(leaf, torch.Tensor) and _memory(leaf) in recorder.writes
    ]
    silently = [i for i in changed if _memory(arguments[i]) not in recorder.tracked]
    reshapes = any(leaf is tensor for tensor in recorder.reshaped for leaf in arguments)
    return ObservedEffects(changed, silently, reshapes, recorder.random, recorder.acts)
