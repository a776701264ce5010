"""What the kernels share: checks of their tensors, rows, and the device they run on."""

import contextlib

import torch
import triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTERPRETED = triton.knobs.runtime.interpret


def check(holds: bool, text: str, kind: type[Exception] = RuntimeError) -> None:
    """Raises `kind` with the text unless the condition holds."""
    if not holds:
        raise kind(f"norms_triton.{text}")


def check_tensor(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raises RuntimeError for a tensor that no kernel here takes."""
    check(
        tensor.is_cuda or (INTERPRETED and tensor.device.type == "cpu"),
        f"{op}: {name} is on {tensor.device}, but Triton runs on GPUs; TRITON_INTERPRET=1 runs it on the CPU, slowly",
    )
    check(
        tensor.dtype in DTYPES,
        f"{op}: {name} is {tensor.dtype}, but must be {' or '.join(map(str, DTYPES))}",
    )


def check_like(op: str, name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raises RuntimeError unless the tensors agree in shape, dtype and device."""
    check(tensor.device == other.device, f"{op}: {name} is on {tensor.device}, {other_name} on {other.device}")
    check(tensor.dtype == other.dtype, f"{op}: {name} is {tensor.dtype}, but {other_name} is {other.dtype}")
    check(
        tensor.shape == other.shape,
        f"{op}: {name} is {list(tensor.shape)}, but must have the shape of {other_name}, {list(other.shape)}",
    )


def needs_grad(*tensors: torch.Tensor) -> bool:
    """Whether autograd will ask for a gradient of one of the tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if its last dim is not side by side in memory."""
    return tensor if tensor.shape[-1] <= 1 or tensor.stride(-1) == 1 else tensor.contiguous()


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as rows of its last dim; a view where the strides allow it."""
    length = tensor.shape[-1] if tensor.ndim else 1
    return unit_stride(tensor.reshape(tensor.numel() // max(length, 1), length))


def warps(block: int) -> int:
    """How many warps a block of this many elements is worth."""
    return min(max(block // 256, 1), 16)


def programs(rows: int, device: torch.device) -> int:
    """How many programs fill the device when each takes many rows."""
    if device.type != "cuda":
        return min(rows, 2)
    return min(rows, 4 * torch.cuda.get_device_properties(device).multi_processor_count)


def on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
