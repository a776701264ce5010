"""A kernel's functions under watch, in the process that runs them: their results must be the program's own, and they
must leave the process as it was."""

import random
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import torch

from forge.executors.hubex.kernels import Kernel
from forge.ir.strides import extent
from forge.torch_internals.pytree import tensor_leaves
from forge.torch_internals.tensors import version_of

REMEMBERED = 4  # the number of calls whose results are kept, to detect memory that is returned twice


def watched(kernel: Kernel) -> Kernel:
    """Return the kernel with each of its functions watched; unchanged if it cannot be loaded."""
    if kernel.load() is not None:
        return kernel
    returned: deque[list[torch.Tensor]] = deque(maxlen=REMEMBERED)
    roles = {"function": kernel.entry.mutates, "forward": kernel.entry.mutates, "backward": None}
    functions = {role: getattr(kernel, role) for role in roles}
    watch: dict[str, Any] = {
        role: _Watched(function, returned, takes_the_programs=roles[role] == ())
        for role, function in functions.items()
        if function is not None
    }
    return replace(kernel, **watch)


class _Watched:
    """A function of a kernel, whose results and effects are checked. returned: results of earlier calls, kept alive, so
    that no address is reused. takes_the_programs: whether its arguments are the program's own tensors, not copies."""

    def __init__(self, function: Callable, returned: deque[list[torch.Tensor]], *, takes_the_programs: bool) -> None:
        self.function, self.returned, self.takes_the_programs = function, returned, takes_the_programs
        self.__name__ = getattr(function, "__name__", "kernel")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function. Raises TypeError or RuntimeError for a result that a program cannot own, and for a changed
        setting of the process."""
        before = _settings()
        result = self.function(*args, **kwargs)
        after = _settings()
        changed = [what for what, value in before.items() if value is not None and after[what] != value]
        if changed:
            raise RuntimeError(f"it changes {changed[0]}, which is the program's")
        self._check_results(tensor_leaves(result), tensor_leaves((args, kwargs)))
        return result

    def _check_results(self, results: list[torch.Tensor], arguments: list[torch.Tensor]) -> None:
        differentiates = torch.is_grad_enabled() and any(each.requires_grad for each in arguments)
        for each in results:
            if type(each) is not torch.Tensor:
                raise TypeError(f"it returns a {type(each).__name__}, but must return a torch.Tensor")
            if each.is_inference() and not any(argument.is_inference() for argument in arguments):
                raise RuntimeError("it returns a tensor of inference mode, which autograd does not take")
            if each.requires_grad and not differentiates:
                raise RuntimeError("it returns a tensor that requires a gradient, where nothing that it is given does")
        if not differentiates:  # else a counter that moves would spoil the graph
            self._check_counters(results, arguments)
        theirs = {_address(each) for each in arguments}
        fresh = [each for each in results if each.numel() and _address(each) not in theirs]
        before = {_address(each) for earlier in self.returned for each in earlier}
        if any(_address(each) in before for each in fresh):
            raise RuntimeError("it returns memory that it has returned before: the earlier result is overwritten")
        self.returned.append(fresh)

    def _check_counters(self, results: list[torch.Tensor], arguments: list[torch.Tensor]) -> None:
        """Raise if a result shares memory, but not the version counter, with another one or with an argument: autograd
        would not notice that a saved value was overwritten through the other."""
        pairs = [*combinations(results, 2), *(product(results, arguments) if self.takes_the_programs else ())]
        for one, other in pairs:
            if share_elements(one, other) and not _share_counter(one, other):
                place = "another result's" if any(other is each for each in results) else "an argument's"
                raise RuntimeError(f"it returns {place} memory as a tensor of its own, so that autograd misses writes")


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory, the same for tensors that share it through NumPy."""
    return tensor.untyped_storage().data_ptr()


def share_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have elements in the same memory."""
    if not one.numel() or not other.numel() or one.device != other.device:
        return False
    first = min(one.data_ptr(), other.data_ptr())
    ends = [each.data_ptr() + extent(each) * each.element_size() for each in (one, other)]
    if min(ends) <= max(one.data_ptr(), other.data_ptr()):
        return False
    marks = torch.zeros(max(ends) - first, dtype=torch.bool)
    _bytes_of(one, marks, first).fill_(True)
    return bool(_bytes_of(other, marks, first).any())


def _bytes_of(tensor: torch.Tensor, memory: torch.Tensor, first: int) -> torch.Tensor:
    """Return the bytes of a tensor's elements in `memory`, which has an element for each byte from the address
    `first`."""
    size = tensor.element_size()
    strides = (*(stride * size for stride in tensor.stride()), 1)
    return memory.as_strided((*tensor.shape, size), strides, tensor.data_ptr() - first)


def _share_counter(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_inference() or other.is_inference():
        return True  # without a counter, autograd does not take it
    before = version_of(other)
    torch.autograd.graph.increment_version(one)
    return version_of(other) != before


_TINY = sys.float_info.min


def _settings() -> dict[str, Any]:
    """Return the settings of this process on which a program's results depend, and the random generators that a
    reference does not use."""
    numpy = sys.modules.get("numpy.random")
    return {
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": torch.get_default_device(),
        "the grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "the number of threads": torch.get_num_threads(),
        "torch's choice of deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "the precision of matrix products": torch.get_float32_matmul_precision(),
        "the treatment of denormal numbers": _TINY / 2 > 0,
        "the state of Python's random numbers": random.getstate(),
        "the state of NumPy's random numbers": None if numpy is None else _state_of(numpy),
    }


def _state_of(numpy_random: Any) -> tuple[bytes, int]:
    _, keys, position, *_ = numpy_random.get_state()
    return keys.tobytes(), position


def random_states() -> dict[str, torch.Tensor]:
    """Return the states of torch's generators, by device."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def changed_states(before: dict[str, torch.Tensor]) -> list[str]:
    """Return the devices whose generator has drawn numbers, or was seeded, since."""
    now = random_states()
    return [device for device, state in before.items() if not torch.equal(state, now[device])]


def draw(devices: Sequence[str]) -> None:
    """Draw from torch's generators of these devices, as a kernel has done in another process."""
    for device in devices:
        torch.rand((), device=device)
