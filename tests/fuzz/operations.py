"""The calls of OpInfos' operations, as source text with slots for tensors."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from forge.testing import OpInfo, all_opinfos

# operations that draw at random, leave memory unwritten, break ties, or turn a rounding into another result;
# unsafe_split and its kin, which eager lets be written to where forge refuses it or makes copies (not mended);
# unravel_index, whose results have gaps, which a write to one of them closes (not mended); kron, whose backward in
# eager reads inputs that were changed since without an error; block_diag, whose backward in eager takes the rows before
# those of its result after a vector without elements; segment_reduce, which reads past the end of shorter data; and
# native_group_norm, whose mean requires grad in eager where only the weight does, and has none
UNSUITABLE = re.compile(
    r"linalg\.(?!vector_norm|norm$|cross|matmul|multi_dot|vecdot|diagonal)|lu_|^lu$|qr|svd|eig|cholesky|solve|inverse|det$"
    r"|lstsq|ormqr|householder|matrix_|rand|dropout|bernoulli|multinomial|poisson|normal|empty|rrelu|fractional|sort|topk"
    r"|median|mode|kthvalue|quantile|hash|fft|stft|ctc|lobpcg|cond|gamma|special\.|\bi0|hist|bincount|unique|nonzero|gru"
    r"|lstm|rnn|resize|set_|quant|grid_sampl|lowrank|pdist|cdist|uniform|exponential|cauchy|geometric|complex|polar|angle"
    r"|argwhere|unsafe_|unravel_|kron|block_diag|segment_|native_group_norm|sgn|conj|imag|real|gumbel|_pack|cumprod|window|as_strided|erfinv|masked_select|put|scatter|index_reduce"
)
SAMPLES = 6
DTYPES = (torch.float32, torch.int64, torch.bool)


@dataclass(frozen=True)
class Slot:
    """A tensor argument of an operation, with its value in a sample."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: str  # source of the same tensor, where its values matter
    low: float
    high: float


@dataclass(frozen=True)
class Operation:
    """A call `function(*args, **kwargs)`: an argument is a Slot or source text."""

    function: str
    args: tuple
    kwargs: tuple[tuple[str, Any], ...]

    def source(self, filled: list[str]) -> str:
        """Return the call's source, with `filled` in the slots."""
        names = iter(filled)
        args = [next(names) if isinstance(each, Slot) else each for each in self.args]
        options = [f"{name}={next(names) if isinstance(each, Slot) else each}" for name, each in self.kwargs]
        return f"{self.function}({', '.join([*args, *options])})"

    @property
    def slots(self) -> list[Slot]:
        return [each for each in (*self.args, *(value for _, value in self.kwargs)) if isinstance(each, Slot)]


def literal(value: Any) -> str | None:
    """Return the source of a number, a dtype, a string, None or a nest of them; None for other values."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return None if isinstance(value, float) and value - value != 0 else repr(value)
    if isinstance(value, list | tuple):
        entries = [literal(each) for each in value]
        if None in entries:
            return None
        text = ", ".join(entries)
        return f"[{text}]" if isinstance(value, list) else f"({text},)" if entries else "()"
    return None


@cache
def operations() -> list[Operation]:
    """Return a call for each kind of sample of each suitable OpInfo with arguments that can be written as source."""
    found: dict[Operation, None] = {}
    for info in all_opinfos():
        name = _name(info)
        if name is None or UNSUITABLE.search(info.name):
            continue
        for dtype in DTYPES:
            if dtype in info.dtypes:
                found.update(dict.fromkeys(_calls(info, name, dtype)))
    return list(found)


def _name(info: OpInfo) -> str | None:
    """Return the source of the OpInfo's operation, or None if it is not a function of torch."""
    function: Any = torch
    for part in info.name.split("."):
        function = getattr(function, part, None)
    return f"torch.{info.name}" if function is info.op and callable(function) else None


def _calls(info: OpInfo, name: str, dtype: torch.dtype) -> Iterator[Operation]:
    torch.manual_seed(0)
    for count, sample in enumerate(info.samples(info, torch.device("cpu"), dtype)):
        if count == SAMPLES:
            return
        args = tuple(_argument(info, each) for each in sample.args)
        kwargs = tuple((key, _argument(info, each)) for key, each in sample.kwargs.items())
        call = Operation(name, args, kwargs)
        if None not in args and all(value is not None for _, value in kwargs) and call.slots:
            yield call


def _argument(info: OpInfo, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return literal(value)
    low, high = info.domain
    low = (-2.0 if high is None else high - 4) if low is None else low
    high = low + 4 if high is None else high
    if value.dtype.is_floating_point:
        values = ""
    elif value.numel() <= 64 and not value.dtype.is_complex:
        values = f"torch.tensor({value.tolist()}, dtype={value.dtype})"
    else:
        return None
    return Slot(tuple(value.shape), value.dtype, values, low, high)
