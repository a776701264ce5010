"""Samples as data: calls whose tensors are named by their shapes, filled in for each device and dtype."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from forge.testing.opinfo import (
    ErrorGenerator,
    ErrorSample,
    OpInfo,
    Sample,
    SampleGenerator,
    make_tensor,
    sample,
)
from forge.torch_internals.pytree import torch_pytree


@dataclass(frozen=True)
class Spec:
    """A tensor of random values.

    dtype: another one than the test's. low, high: other values than the op's domain. swapped: made with the first and
    last dims exchanged, so that it is not contiguous. values: these instead of random ones.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    low: float | None = None
    high: float | None = None
    swapped: bool = False
    values: Any = None

    def tensor(self, info: OpInfo, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        dtype = self.dtype or dtype
        if self.values is not None:
            return torch.tensor(self.values, device=device, dtype=dtype)
        shape = (self.shape[-1], *self.shape[1:-1], self.shape[0]) if self.swapped else self.shape
        given = self.low is not None or self.high is not None
        if given:
            x = make_tensor(shape, device, dtype, low=self.low, high=self.high)
        else:
            x = info.tensor(shape, device, dtype)
        return x.transpose(0, -1) if self.swapped else x


def t(*shape: int, **options: Any) -> Spec:
    """Spec(shape, ...)."""
    return Spec(shape, **options)


def classes(*shape: int, count: int) -> Spec:
    """Indices of `count` classes."""
    return Spec(shape, dtype=torch.int64, low=0, high=count)


def given(*values: Any, dtype: torch.dtype | None = None) -> Spec:
    """A vector of these values."""
    return Spec((len(values),), dtype=dtype, values=list(values))


def fill(call: Sample, info: OpInfo, device: torch.device, dtype: torch.dtype) -> Sample:
    """The call with a tensor for every Spec."""

    def make(leaf: Any) -> Any:
        return leaf.tensor(info, device, dtype) if isinstance(leaf, Spec) else leaf

    return Sample(torch_pytree.tree_map(make, call.args), torch_pytree.tree_map(make, call.kwargs))


def calls(*wanted: Sample) -> SampleGenerator:
    """These calls, filled in."""

    def samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        for call in wanted:
            yield fill(call, info, device, dtype)

    return samples


def wrong(
    *args: Any, error: type[Exception] = RuntimeError, match: str, stricter: str = "", **kwargs: Any
) -> ErrorSample:
    """A call that must raise `error` with a message in which `match` is found."""
    return ErrorSample(sample(*args, **kwargs), error, match, **({"stricter": stricter} if stricter else {}))


def errors(*wanted: ErrorSample) -> ErrorGenerator:
    """These wrong calls, filled in with float32."""

    def generate(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
        for each in wanted:
            filled = fill(each.sample, info, device, torch.float32)
            yield ErrorSample(filled, each.error, each.match, **({"stricter": each.stricter} if each.stricter else {}))

    return generate
