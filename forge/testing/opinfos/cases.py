"""Sample and error generators from lists of cases, for families whose operations differ in their arguments most."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from forge import torchlang
from forge.testing.opinfo import (
    ErrorGenerator,
    ErrorSample,
    OpInfo,
    Sample,
    SampleGenerator,
    all_opinfos,
    register_opinfo,
    sample,
)


class Maker:
    """Makes the tensors of a sample: `make(2, 3)` in the tested dtype."""

    def __init__(self, info: OpInfo, device: torch.device, dtype: torch.dtype) -> None:
        self.info = info
        self.device = device
        self.dtype = dtype

    def __call__(self, *shape: int) -> torch.Tensor:
        return self.info.tensor(shape, self.device, self.dtype)

    def index(self, shape: Sequence[int], high: int, *, low: int = 0) -> torch.Tensor:
        """Integers in [low, high)."""
        return torch.randint(low, high, tuple(shape), device=self.device)

    def places(self, *numbers: Any) -> torch.Tensor:
        """The given integers."""
        return torch.tensor(numbers, device=self.device, dtype=torch.int64)

    def mask(self, *shape: int) -> torch.Tensor:
        """Trues and falses."""
        return torch.rand(shape, device=self.device) < 0.5

    def permutation(self, *shape: int) -> torch.Tensor:
        """Indices along dim 0 that are distinct in each column."""
        return torch.rand(shape, device=self.device).argsort(0)


Case = Callable[..., Sample]  # of a Maker


def cases(*builders: Case) -> SampleGenerator:
    """One sample of each builder."""

    def samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        make = Maker(info, device, dtype)
        for build in builders:
            yield build(make)

    return samples


def of_input(*shapes: Sequence[int], **kwargs: Any) -> list[Case]:
    """op(x) for x of each shape, and for a transposed one."""
    found: list[Case] = [lambda make, shape=shape: sample(make(*shape), **kwargs) for shape in shapes]
    return [*found, lambda make: sample(make(3, 4).t(), **kwargs)]


ErrorCase = tuple[Case, type[Exception] | tuple[type[Exception], ...], str]


def errors(*wrong: ErrorCase) -> ErrorGenerator:
    """One error sample of each (builder, error, match); tensors are float32."""

    def generate(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
        make = Maker(info, device, torch.float32)
        for build, error, match in wrong:
            yield ErrorSample(build(make), error, match)

    return generate


def no_tensor(*rest: Any, **kwargs: Any) -> ErrorGenerator:
    """A string where a tensor is wanted."""
    return errors(
        (lambda make: sample("x", *rest, **kwargs), TypeError, "must be Tensor|must be a tensor|must be tuple")
    )


def register_computed(names: Sequence[str]) -> None:
    """OpInfos `name.computed`: copies of what view operations show.

    A front end makes a view that a program returns outside of it, where torch differentiates it; a copy is computed
    inside, so that the view's own gradient rule runs.
    """
    known = {info.name: info for info in all_opinfos()}
    for name in names:
        info = known[name]
        symbol = torchlang.find(info.op)
        ids = info.symbols if symbol is None else (symbol.id,)
        register_opinfo(
            replace(info, name=f"{name}.computed", op=_copied(info.op), dtypes=(torch.float32,), symbols=ids)
        )


def _copied(op: Callable) -> Callable:
    def copied(*args: Any, **kwargs: Any) -> Any:
        shown = op(*args, **kwargs)
        return tuple(part.clone() for part in shown) if isinstance(shown, (tuple, list)) else shown.clone()

    copied.__name__ = f"copied_{op.__name__}"
    return copied


def method(name: str) -> Callable:
    """x.name(...) as a function of x."""

    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(x, name)(*args, **kwargs)

    call.__name__ = name
    return call
