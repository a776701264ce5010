"""Runs of a program of one call of a kernel: between guard bytes, with checks of what each of its functions returns."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from forge.executors.hubex.derived import CallWithBackward
from forge.executors.hubex.kernels import ALLOCATE, GRAPH_FUNCTIONS, Kernel
from forge.executors.hubex.verification.tensors import GuardedMemory, KernelFailure
from forge.ir import BoundSymbol, Symbol, TensorProxy, Trace

_RESULT, _SAVED, _GRADIENT = "the result", "the saved ", "the gradient of "


def attempt(run: Callable[[], Any], *, grad: bool = False) -> Any:
    """Return the result of a run of a kernel in this grad mode. Raises KernelFailure for an error of the kernel's."""
    try:
        with torch.set_grad_enabled(grad):
            result = run()
        if torch.cuda.is_initialized():  # device errors surface only at a synchronization
            torch.cuda.synchronize()
        return result
    except KernelFailure:
        raise
    except Exception as error:
        if is_out_of_memory(error):  # a transient fault of the machine
            raise
        text = str(error).strip().splitlines()
        raise KernelFailure(f"raises {type(error).__name__}{': ' + text[0] if text else ''}") from error


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error reports a lack of memory: Python's, a device's or torch's CPU allocator's error."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def run(kernel: Kernel, trace: Trace, memory: GuardedMemory, inputs: Sequence[Any]) -> Any:
    """Run a trace; guard bytes surround the memory that it allocates for kernels. Raises KernelFailure if a function of
    the kernel returns something else than the program unpacks."""
    calls = [_checked(kernel, bound, memory) for bound in trace.bound_symbols]
    return trace.derive(trace.stage, calls).python_callable()(*inputs)


def _checked(kernel: Kernel, bound: BoundSymbol, memory: GuardedMemory) -> BoundSymbol:
    """Return a call that allocates guarded memory, or that checks what a function of the kernel returns."""
    symbol = bound.symbol
    if symbol is ALLOCATE:
        return bound.replace(symbol=Symbol(symbol.name, symbol.id, meta=memory.allocate, op=memory.allocate))
    if symbol.executor is not kernel or symbol.op is None or symbol.out or symbol.op in GRAPH_FUNCTIONS:
        return bound
    function, names = symbol.op, _names_of_results(kernel, bound)

    def checked(*args: Any, **kwargs: Any) -> Any:
        returned = function(*args, **kwargs)
        _check_returned(returned, bound.output, names)
        return returned

    return bound.replace(symbol=Symbol(symbol.name, symbol.id, meta=checked, op=checked))


def _names_of_results(kernel: Kernel, bound: BoundSymbol) -> list[str]:
    """Return what a function of the kernel is to return, in words."""
    grad, place = kernel.entry.grad, bound.symbol.id
    if place == f"hub.{kernel.name}.backward":
        return [f"{_GRADIENT}{name}" for name in grad.returns]
    outputs = bound.output if isinstance(bound.output, (tuple, list)) else [bound.output]
    is_saving = not grad.forward or place == f"hub.{kernel.name}.forward"
    saved = [f"{_SAVED}{name}" for name in grad.saves] if is_saving else []
    count = len(outputs) - len(saved)
    return [*([_RESULT] if count == 1 else [f"result {i}" for i in range(count)]), *saved]


def _check_returned(returned: Any, outputs: Any, names: list[str]) -> None:
    """Raise KernelFailure if what a function returns has not one value for each name. The results and gradients are
    compared later, but what is saved has its declared metadata alone to agree with."""
    if isinstance(outputs, (tuple, list)):
        if not isinstance(returned, (tuple, list)) or len(returned) != len(names):
            values = f"{len(names)}: {', '.join(names)}"
            raise KernelFailure(f"{_function(names)} returns {_in_words(returned)}, but must return {values}")
        for name, value, output in zip(names, returned, outputs, strict=True):
            if name.startswith(_SAVED):
                _check_saved(name, value, output)
    elif names != [_RESULT] and not isinstance(returned, torch.Tensor):  # a result is checked where it is compared
        raise KernelFailure(f"{_function(names)} returns {_in_words(returned)}, but must return one tensor: {names[0]}")


def _function(names: list[str]) -> str:
    if names[0].startswith(_GRADIENT):
        return "the backward"
    return "the forward" if names[-1].startswith(_SAVED) else "it"


def _in_words(returned: Any) -> str:
    if isinstance(returned, (tuple, list)):
        return f"{len(returned)} value{'s' * (len(returned) != 1)}"
    return "None" if returned is None else f"a {type(returned).__name__}"


def _check_saved(name: str, value: Any, output: TensorProxy) -> None:
    if not isinstance(value, torch.Tensor):
        raise KernelFailure(f"{name} is {_in_words(value)}, but must be a tensor")
    for what in ("shape", "dtype", "device"):
        actual, declared = getattr(value, what), getattr(output, what)
        if actual != declared:
            raise KernelFailure(f"{name}: {what} is {actual}, but is declared to be {declared}")


class TrainingRun:
    """A run of a kernel's forward for training, and backwards of it."""

    def __init__(
        self, kernel: Kernel, call: CallWithBackward, memory: GuardedMemory, inputs: Sequence[torch.Tensor]
    ) -> None:
        self.kernel, self.call, self.memory = kernel, call, memory
        self.outputs, saved, numbers = run(kernel, call.forward, memory, inputs)
        self.saved = [*saved, *numbers]
        guarded = set(call.forward.input_names)
        self._before = [
            (proxy, value, _bits(value))
            for proxy, value in zip(call.forward.output[1], saved, strict=True)
            if proxy.name not in guarded
        ]

    def gradients(self, incoming: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the inputs. Raises KernelFailure if a saved value was changed since the forward,
        which another backward would read."""
        active = [gradient for gradient, is_active in zip(incoming, self.call.active, strict=True) if is_active]
        result = run(self.kernel, self.call.backward, self.memory, [*self.saved, *active])
        self.check_saved("the backward overwrites {}, which another one reads; mutates names what it may overwrite")
        return result

    def check_saved(self, problem: str) -> None:
        """Raise KernelFailure with the `problem` if a saved value is not what the forward left."""
        for proxy, value, before in self._before:
            if not torch.equal(_bits(value), before):
                raise KernelFailure(problem.format(self._name(proxy)))

    def _name(self, saved: TensorProxy) -> str:
        """Return a saved value's name in the manifest."""
        for bound in self.call.forward.bound_symbols:
            if bound.symbol.executor is self.kernel and saved.name in bound.outputs:
                names = dict(zip(bound.outputs, _names_of_results(self.kernel, bound), strict=False))
                return names[saved.name].replace(_RESULT, "output").replace("result ", "output_")
        return f"{_SAVED}{saved.name}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor's bytes, in which NaN equals itself."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
