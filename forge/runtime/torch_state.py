"""torch's state of the thread and of the process, preserved on errors, too. Decorators that keep Dynamo out of
forge's own code."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch.autograd import forward_ad

from forge.ir.interpreter import skip_dynamo
from forge.runtime.buckets import bucket_bytes, bucket_bytes_at
from forge.torch_internals.attention import library_switches
from forge.torch_internals.autograd import (
    enter_inference_mode,
    exit_dual_level,
    forward_level,
    is_fwd_grad_enabled,
    pop_saved_tensors_default_hooks,
    push_saved_tensors_default_hooks,
    saved_tensors_hooks_disable,
    saved_tensors_hooks_enable,
    saved_tensors_hooks_get_disabled_error_message,
    set_fwd_grad_enabled,
    set_grad_enabled,
    top_saved_tensors_default_hooks,
)
from forge.torch_internals.dispatch import PreserveDispatchKeyGuard, disable_current_modes
from forge.torch_internals.functorch import get_dynamic_layer_stack_depth, pop_dynamic_layer_stack
from forge.torchlang import autocast_mode


def dynamo_disable(function: Callable) -> Callable:
    """Mark a function as `skip_dynamo` does, and break a graph that calls it."""
    reason = f"forge.{function.__name__} runs between graphs"
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)
    return skip_dynamo(function)


@contextmanager
def preserve_torch_state() -> Iterator[None]:
    """Restore torch's own state after compiling, or failing to: modes of autograd, functorch's levels, saved-tensor
    hooks, autocast, random numbers, the default dtype. The caller's dispatch modes and saved-tensor hooks, which are
    meant for the program's computations, do not see the compiler's."""
    grad, inference, forward = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), _forward_grad_enabled()
    dtype, random = torch.get_default_dtype(), _random_states()
    apart = disable_current_modes(), _without_hooks()
    guards = restore_transforms(), PreserveDispatchKeyGuard(), autocast_mode.preserve()
    with ExitStack() as stack:
        for each in (*apart, *guards):
            stack.enter_context(each)
        try:
            yield
        finally:
            if torch.is_inference_mode_enabled() != inference:
                enter_inference_mode(inference)
            set_grad_enabled(grad)
            set_fwd_grad_enabled(forward)
            torch.set_default_dtype(dtype)
            for restore, state in random:
                restore(state)


@contextmanager
def _without_hooks() -> Iterator[None]:
    """Disable the saved-tensor hooks in this context."""
    hooks = []
    try:
        while (pair := top_saved_tensors_default_hooks(True)) is not None:
            pop_saved_tensors_default_hooks()
            hooks.append(pair)
        yield
    finally:
        for pack, unpack in reversed(hooks):
            push_saved_tensors_default_hooks(pack, unpack)


@contextmanager
def restore_transforms() -> Iterator[None]:
    """Close the levels of torch.func and of forward mode that the context opened, and restore whether saved-tensor
    hooks are allowed."""
    depth, level = get_dynamic_layer_stack_depth(), forward_level()
    message = saved_tensors_hooks_get_disabled_error_message()
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):  # a captured program opens and closes this level without forward_ad's knowledge
            exit_dual_level(level=forward_level() + 1)
        raise
    finally:
        while forward_level() > level:
            forward_ad.exit_dual_level()
        while get_dynamic_layer_stack_depth() > depth:
            pop_dynamic_layer_stack()
        if message is None:
            saved_tensors_hooks_enable()
        else:
            saved_tensors_hooks_disable(message)


class LevelRestoringCall:
    """A function that opens and closes torch.func's levels itself, and leaves none open if it raises."""

    def __init__(self, function: Callable) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with restore_transforms():
            return self.function(*args, **kwargs)


def _forward_grad_enabled() -> bool:
    return is_fwd_grad_enabled()


def _random_states() -> list[tuple[Callable, torch.Tensor]]:
    """Return a function that restores each generator, and the generator's state."""
    states: list[tuple[Callable, Any]] = [(torch.random.set_rng_state, torch.random.get_rng_state())]
    if torch.cuda.is_initialized():
        states.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    return states


# settings that, besides a program itself, determine its trace and its code


class _Flag:
    """A setting of the process or the thread, read and written by torch's functions."""

    def __init__(self, get: Callable[[], Any], set: Callable[[Any], Any]) -> None:
        self.get = get
        self._set = set

    @contextmanager
    def at(self, value: Any) -> Iterator[None]:
        before = self.get()
        self._set(value)
        try:
            yield
        finally:
            self._set(before)


class _ContextSetting:
    """A setting that a context manager sets."""

    def __init__(self, get: Callable[[], Any], at: Callable[[Any], Any]) -> None:
        self.get = get
        self.at = at


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _einsum() -> tuple[bool, str | None]:
    return torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy


def _set_einsum(value: tuple[bool, str | None]) -> None:
    enabled, strategy = value
    if strategy is not None:
        torch.backends.opt_einsum.set_flags(True, strategy)  # it may be set only while it is enabled
    torch.backends.opt_einsum.set_flags(enabled)


_MODES: dict[str, _Flag | _ContextSetting] = {
    "inference": _ContextSetting(torch.is_inference_mode_enabled, torch.inference_mode),
    "grad": _ContextSetting(torch.is_grad_enabled, torch.set_grad_enabled),
    "autocast": _ContextSetting(autocast_mode.state, autocast_mode.at),
    "device": _ContextSetting(torch.get_default_device, torch.device),
    "bucket": _ContextSetting(bucket_bytes, bucket_bytes_at),
    "dtype": _Flag(torch.get_default_dtype, torch.set_default_dtype),
    "einsum": _Flag(_einsum, _set_einsum),
    "deterministic": _Flag(_deterministic, _set_deterministic),
    "matmul": _Flag(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    **{kind: _Flag(get, put) for kind, (get, put) in library_switches().items()},
}


def modes() -> dict[str, Any]:
    """Return torch's modes and settings in this thread, as far as recording and compiling read them."""
    return {name: mode.get() for name, mode in _MODES.items()}


@contextmanager
def set_modes(values: Mapping[str, Any]) -> Iterator[None]:
    """Set torch's modes and settings in this context to a result of `modes`."""
    with ExitStack() as stack:
        for name, mode in _MODES.items():
            if mode.get() != values[name]:
                stack.enter_context(mode.at(values[name]))
        yield
