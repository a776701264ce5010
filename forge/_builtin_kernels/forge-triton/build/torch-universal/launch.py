"""What the kernels share: checks of their tensors, rows, and how they are launched."""

import contextlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTERPRETED = triton.knobs.runtime.interpret
HERE = contextlib.nullcontext()
# what a compiled kernel's launcher is called with is Triton's own affair, and known of these
_LAUNCHES_SO = (3, 4) <= tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 9)


def check(holds: bool, text: Callable[[], str], kind: type[Exception] = RuntimeError) -> None:
    """Raises `kind` with the text unless the condition holds."""
    if not holds:
        raise kind(f"forge_triton.{text()}")


def check_tensor(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raises RuntimeError for a tensor that no kernel here takes."""
    check(
        tensor.is_cuda or (INTERPRETED and tensor.device.type == "cpu"),
        lambda: (
            f"{op}: {name} is on {tensor.device}, but Triton runs on GPUs; "
            "TRITON_INTERPRET=1 runs it on the CPU, slowly"
        ),
    )
    check(
        tensor.dtype in DTYPES,
        lambda: f"{op}: {name} is {tensor.dtype}, but must be {' or '.join(map(str, DTYPES))}",
    )


def check_like(op: str, name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raises RuntimeError unless the tensors agree in shape, dtype and device."""
    check(tensor.device == other.device, lambda: f"{op}: {name} is on {tensor.device}, {other_name} on {other.device}")
    check(tensor.dtype == other.dtype, lambda: f"{op}: {name} is {tensor.dtype}, but {other_name} is {other.dtype}")
    check(
        tensor.shape == other.shape,
        lambda: f"{op}: {name} is {list(tensor.shape)}, but must have the shape of {other_name}, {list(other.shape)}",
    )


def needs_grad(*tensors: torch.Tensor) -> bool:
    """Whether autograd will ask for a gradient of one of the tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def contiguous_like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory for a contiguous tensor of the same shape."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if its last dim is not side by side in memory."""
    return tensor if tensor.shape[-1] <= 1 or tensor.stride(-1) == 1 else tensor.contiguous()


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, which has elements, as rows of its last dim; a view where the strides allow it."""
    return unit_stride(tensor if tensor.ndim == 2 else tensor.reshape(-1, tensor.shape[-1] if tensor.ndim else 1))


@cache
def processors(device: torch.device) -> int:
    """How many programs run side by side at least."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def on_device_of(device: int) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, which need not be the tensors'; -1 is the CPU."""
    if device < 0 or device == torch.cuda.current_device():
        return HERE
    return torch.cuda.device(device)


_compiled: dict[tuple, CompiledKernel] = {}
_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)


def launch(kernel: JITFunction, programs: int, *args: Any, warps: int = 4, **constants: Any) -> None:
    """kernel[(programs,)](*args, **constants), with the constants in the order of its parameters.

    Triton's own way from Python takes 14 µs: here what it compiled for such arguments is found by what it looks at of
    them (dtypes, and which numbers 16 divides), and its compiled launcher is called. 16 divides the addresses: where
    it does not, which tensors that begin in the middle of others are needed for, Triton's own way is taken.
    """
    device = args[0].get_device()  # -1 is the CPU, in the interpreter
    kinds: list[Any] = []
    addresses = 0
    for argument in args:
        if isinstance(argument, torch.Tensor):
            addresses |= argument.data_ptr()
            kinds.append(argument.dtype)
        elif type(argument) is int:
            kinds.append(-1 if argument >= 2**31 else 16 if argument % 16 == 0 else argument == 1)
        else:
            kinds.append(type(argument))
    key = (id(kernel), device, warps, *constants.values(), *kinds)
    launcher = _compiled.get(key) if addresses % 16 == 0 else None
    with on_device_of(device):
        if launcher is not None:
            launcher.run(
                programs, 1, 1, _stream(device), launcher.function, launcher.packed_metadata, None, None, None,
                *args, *constants.values(),
            )  # fmt: skip
            return
        compiled = kernel[(programs,)](*args, **constants, num_warps=warps)
    if device >= 0 and _LAUNCHES_SO and addresses % 16 == 0:
        _compiled[key] = compiled
