"""Tensors of a comparison: guarded memory, and the difference of values from the expected ones."""

from collections.abc import Callable, Sequence

import torch

from forge.executors.calls import Passes
from forge.ir.strides import extent

GUARD = 256  # bytes before and after a kernel's tensor
POISON = 0xFF  # NaN in every float dtype
_TIMES = 4  # the accepted error, as a multiple of eager's largest


class KernelFailure(Exception):
    """The failure of a kernel, with a description."""


class GuardedMemory:
    """Memory of tensors between guard bytes; only the tensors that the kernel is to write may change."""

    def __init__(self) -> None:
        self.inputs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.outputs: list[tuple[torch.Tensor, int, int]] = []

    def copy_to_guarded(self, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        """Copy a tensor, in its layout, to `offset` elements after an aligned address."""
        size = tensor.element_size()
        length = extent(tensor) * size
        memory = _poison(2 * GUARD + offset * size + length, tensor.device)
        result = memory[GUARD + offset * size :][:length].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        index = tuple(
            slice(0, 1) if stride == 0 else slice(None) for stride in result.stride()
        )  # expanded dims hold one element, which is written once
        result[index] = tensor[index]
        self.inputs.append((memory, memory.clone()))
        return result

    def copy_all_to_guarded(self, tensors: Sequence[torch.Tensor], offset: int) -> list[torch.Tensor]:
        """Copy each tensor as `copy_to_guarded` does; a tensor that occurs twice is copied once."""
        by_id = {id(each): each for each in tensors}
        copies = {key: self.copy_to_guarded(each, offset) for key, each in by_id.items()}
        return [copies[id(each)] for each in tensors]

    def allocate(self, shape: tuple, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate memory for a result, like torch.empty."""
        size = torch.Size(shape).numel() * dtype.itemsize
        memory = _poison(2 * GUARD + size, device)
        self.outputs.append((memory, GUARD, GUARD + size))
        return memory[GUARD : GUARD + size].view(dtype).view(shape)

    def check(self) -> None:
        """Raise KernelFailure if an argument or a guard was written to."""
        for memory, before in self.inputs:
            if not torch.equal(memory, before):
                raise KernelFailure("an input, or memory beside it, was changed")
        for memory, start, stop in self.outputs:
            if bool((memory[:start] != POISON).any()) or bool((memory[stop:] != POISON).any()):
                raise KernelFailure("memory beside its output was written to")

    def shares(self, tensor: torch.Tensor) -> bool:
        """Return whether a result aliases an argument."""
        address = tensor.untyped_storage().data_ptr()
        return tensor.numel() > 0 and any(memory.data_ptr() == address for memory, _ in self.inputs)


def _poison(length: int, device: torch.device) -> torch.Tensor:
    return torch.full((-(-length // 16) * 16,), POISON, dtype=torch.uint8, device=device)


def difference(
    actual: torch.Tensor,
    expected: torch.Tensor,
    tolerance: tuple[float, float],
    exact: Callable[[], torch.Tensor | None] = lambda: None,
    passes: Passes = None,
) -> str | None:
    """Describe the values that differ by more than the tolerance from both eager's and the exact values, since a value
    that is more exact than eager's is correct."""
    if not actual.numel():
        return None
    close = _close(actual, expected, tolerance)
    if passes is not None:
        close |= passes(actual, expected)
    if not close.all() and expected.is_floating_point() and (best := exact()) is not None:
        close |= _close(actual, best.to(expected.dtype), tolerance) | _as_near(actual, expected, best)
    return None if close.all() else _describe(_wide(actual), _wide(expected), ~close, tolerance[1])


def _close(actual: torch.Tensor, expected: torch.Tensor, tolerance: tuple[float, float]) -> torch.Tensor:
    """Return a mask of the values within tolerance. The error of a reordered sum is relative to the largest value, not
    to the result after cancellation. NaN equals only NaN, an infinity only itself."""
    rtol, atol = tolerance
    a, b = _wide(actual), _wide(expected)
    finite = b.abs()[b.isfinite()]
    largest = max(1.0, finite.max().item()) if finite.numel() else 1.0
    return torch.isclose(a, b, rtol=rtol, atol=atol * largest, equal_nan=True)


def _as_near(actual: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return a mask of the values whose error is comparable to eager's largest error in the tensor: where terms cancel,
    the result is the rounding error of much larger numbers."""
    off = (_wide(expected) - _wide(exact)).abs()
    finite = off[off.isfinite()]
    worst = finite.max() if finite.numel() else 0.0
    return (_wide(actual) - _wide(exact)).abs() <= _TIMES * worst


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def _describe(a: torch.Tensor, b: torch.Tensor, off: torch.Tensor, atol: float) -> str:
    """Describe the values that are `off`."""
    finite = off & a.isfinite() & b.isfinite()
    special = off & ~finite
    by = "values differ"
    if finite.any():
        by = f"{by} by up to {(a - b).abs()[finite].max().item():.2g}, tolerance {atol:.2g}"
    if not special.any():
        return by
    place = tuple(special.nonzero()[0].tolist())
    where = f" at [{', '.join(map(str, place))}]" if place else ""
    many = int(special.sum())
    others = f" ({many} of {a.numel()} values)" if many > 1 else ""
    value, expected = (f"{each[place].item():.4g}" for each in (a, b))
    return f"{by}: {value}{where}, but must be {expected}{others}"
