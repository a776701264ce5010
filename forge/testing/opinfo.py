"""OpInfo: what there is to know of an operation for testing it, and for verifying the kernels that implement it."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)
BOOL = (torch.bool,)
REAL = (*FLOATS, *INTEGERS)
ALL = (*REAL, *BOOL)


@dataclass(frozen=True)
class Sample:
    """One call of an operation: op(*args, **kwargs)."""

    args: tuple
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ErrorSample:
    """A call that must raise `error` with a message that the regular expression `match` finds.

    torch raises the same type for it; where it does not, `stricter` says why forge does.
    """

    sample: Sample
    error: type[Exception] | tuple[type[Exception], ...]
    match: str
    stricter: str = ""


@dataclass(frozen=True)
class Directive:
    """An exception to a test, with its reason: kind is "xfail" (strict), "tolerance" or "skip".

    "skip" is for what torch itself does not run: it lacks the kernel, what it gives is not defined, or its kernel stops
    the device, which fails every test after it.
    test: the test function's name ("test_strided[offset]": of that layout alone), or None for all.
    executors ("torch", "torch-prims"), devices ("cpu", "cuda"), dtypes: where it applies; None is everywhere.
    tolerance: (rtol, atol) of a tolerance.
    """

    kind: str
    reason: str
    test: str | None = None
    executors: Sequence[str] | None = None
    devices: Sequence[str] | None = None
    dtypes: Sequence[torch.dtype] | None = None
    tolerance: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("xfail", "tolerance", "skip"):
            raise ValueError(f"Directive: kind is {self.kind!r}, but must be 'xfail', 'tolerance' or 'skip'")
        if (self.kind == "tolerance") != (self.tolerance is not None):
            raise ValueError("Directive: a tolerance, and only a tolerance, has tolerance=(rtol, atol)")
        for name in ("executors", "devices", "dtypes"):
            value = getattr(self, name)
            if isinstance(value, str) or (value is not None and not isinstance(value, (tuple, list))):
                raise TypeError(f"Directive: {name} is {value!r}, but must be a tuple")

    def applies(self, test: str, executor: str | None, device: str, dtype: torch.dtype | None) -> bool:
        """Return whether it is about this instance of a test; a test of all executors or dtypes has None."""
        return (
            self.test in (None, test)
            and (self.executors is None or executor in self.executors)
            and (self.devices is None or device in self.devices)
            and (self.dtypes is None or dtype in self.dtypes)
        )


NO_COMPLEX_ON_A_GPU = Directive(
    "skip",
    "torch has a kernel for complex numbers on a CPU alone",
    devices=("cuda",),
    dtypes=(torch.complex64, torch.complex128),
)

SampleGenerator = Callable[["OpInfo", torch.device, torch.dtype], Iterator[Sample]]
ErrorGenerator = Callable[["OpInfo", torch.device], Iterator[ErrorSample]]


@dataclass(frozen=True)
class OpInfo:
    """An operation and how to test it.

    name: unique; what `pytest --op name` finds. op: the torch function (or a function of torch functions).
    samples: yields calls for a device and dtype. errors: yields calls that must raise.
    reference: what op is compared with; op itself, run in eager, unless given.
    dtypes: those of the forward test; forge/testing/opinfos/complex.py adds complex64. gradient: whether op has one
    (tested in `precise`, and in complex128 where complex64 is among the dtypes). precise: float32 where torch has no
    kernel of float64.
    domain: (low, high) for the values of float samples, open at None.
    symbols: ids of the torchlang symbols that it covers where op's own is not the only one.
    directives: exceptions, each with a reason.
    """

    name: str
    op: Callable
    samples: SampleGenerator
    errors: ErrorGenerator | None = None
    reference: Callable | None = None
    dtypes: Sequence[torch.dtype] = FLOATS
    gradient: bool = True
    precise: torch.dtype = torch.float64
    domain: tuple[float | None, float | None] = (None, None)
    symbols: Sequence[str] = ()
    directives: Sequence[Directive] = ()

    def __post_init__(self) -> None:
        for name in ("dtypes", "symbols", "directives"):
            value = getattr(self, name)
            if not isinstance(value, (tuple, list)):
                raise TypeError(f"OpInfo({self.name!r}): {name} is {value!r}, but must be a tuple")

    def tensor(self, shape: Sequence[int], device: torch.device, dtype: torch.dtype, **options: Any) -> torch.Tensor:
        """Return a tensor of random values in the op's domain, which is one of real numbers."""
        low, high = (None, None) if dtype.is_complex else self.domain
        return make_tensor(shape, device, dtype, low=low, high=high, **options)


def make_tensor(
    shape: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    *,
    low: float | None = None,
    high: float | None = None,
    noncontiguous: bool = False,
) -> torch.Tensor:
    """Return random values in [low, high).

    By default, floats and the parts of complex numbers are from -3 to 3, integers from -9 to 9, or from 0 if unsigned.
    """
    if dtype.is_floating_point or dtype.is_complex:
        low, high = _interval(low, high)
    elif low is not None or high is not None:  # the integers in the interval, at least one
        low = None if low is None else math.ceil(low)
        high = None if high is None else max(math.ceil(high), (low or 0) + 1)
    return torch.testing.make_tensor(
        tuple(shape), dtype=dtype, device=device, low=low, high=high, noncontiguous=noncontiguous
    )


def _interval(low: float | None, high: float | None) -> tuple[float, float]:
    """Return an interval with its open ends set: 6 away from the other one, or -3 to 3."""
    if low is None:
        low = -3 if high is None else high - 6
    return low, low + 6 if high is None else high


_opinfos: dict[str, OpInfo] = {}


def register_opinfo(info: OpInfo) -> OpInfo:
    """Register an OpInfo. Raises ValueError if its name is taken."""
    if info.name in _opinfos:
        raise ValueError(f"OpInfo {info.name!r} is registered twice")
    _opinfos[info.name] = info
    return info


def add_dtype(names: Sequence[str], dtype: torch.dtype) -> None:
    """Add a dtype to those of the OpInfos of these names. Raises KeyError for a name that none has."""
    for name in names:
        info = _opinfos[name]
        if dtype not in info.dtypes:
            _opinfos[name] = replace(info, dtypes=(*info.dtypes, dtype))


def all_opinfos() -> list[OpInfo]:
    """Return every OpInfo, in order of registration."""
    return list(_opinfos.values())
