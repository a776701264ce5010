"""The entries of torch's operator database that can be compared with eager."""

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree

DTYPES = (torch.float32, torch.float64, torch.complex64, torch.int64, torch.bool)
OTHER_DTYPES = (torch.complex64, torch.bfloat16, torch.float16, torch.int64, torch.bool)
SAMPLES = 3  # of an entry and dtype: the first, the last, and one between


@dataclass(frozen=True)
class Call:
    """A call of an entry, whose tensors are copied before each use."""

    input: Any
    args: tuple
    kwargs: dict[str, Any]

    def fresh(self, *, grad: bool = False) -> tuple[Any, tuple, dict[str, Any]]:
        """Return new copies of the arguments; with grad, those to which torch gives a gradient require one."""
        memo: dict[int, torch.Tensor] = {}

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return copy.copy(leaf) if isinstance(leaf, torch.Generator) else leaf
            if id(leaf) not in memo:
                requires = grad and leaf.requires_grad
                memo[id(leaf)] = _clone(leaf).requires_grad_(requires)
            return memo[id(leaf)]

        return _pytree.tree_map(copied, (self.input, self.args, self.kwargs))


def _clone(leaf: torch.Tensor) -> torch.Tensor:
    """Copy a tensor with the strides of a view, and with the memory around it."""
    leaf = leaf.detach()
    if leaf.layout != torch.strided or leaf.is_quantized:
        return leaf.clone()
    count = leaf.untyped_storage().nbytes() // leaf.element_size()
    if count == leaf.numel():
        return leaf.clone(memory_format=torch.preserve_format)
    memory = leaf.as_strided((count,), (1,), 0).clone()
    return memory.as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())


class Entry:
    """An entry of the database: an operator, a variant of its samples."""

    def __init__(self, info: Any) -> None:
        self.info = info
        self.name = f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name

    @property
    def function(self) -> Callable:
        """The function f(input, args, kwargs) that is jitted."""
        op = self.info.op
        return lambda input, args, kwargs: op(input, *args, **kwargs)

    @property
    def has_values(self) -> bool:
        """False for an entry with uninitialized results, such as torch.empty."""
        return not self.info.name.startswith(("empty", "new_empty"))

    @property
    def dtype(self) -> torch.dtype | None:
        """The first of DTYPES that it supports."""
        return next((dtype for dtype in DTYPES if dtype in self.info.dtypes), None)

    def dtypes(self) -> list[torch.dtype]:
        return [dtype for dtype in OTHER_DTYPES if dtype in self.info.dtypes and dtype != self.dtype]

    def differentiable(self, dtype: torch.dtype) -> bool:
        return self.info.supports_autograd and dtype in self.info.supported_backward_dtypes("cpu")

    def calls(self, dtype: torch.dtype, *, grad: bool = False, seed: int = 0, most: int = SAMPLES) -> list[Call]:
        """Return a fixed, evenly spread choice of its samples."""
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = [
                Call(each.input, tuple(each.args), dict(each.kwargs))
                for each in self.info.sample_inputs("cpu", dtype, requires_grad=grad)
            ]
        if len(found) <= most:
            return found
        return [found[i * (len(found) - 1) // max(most - 1, 1)] for i in range(most)]

    def refused(self) -> Iterator[tuple[Call, type[Exception] | tuple, str]]:
        """Yield calls that torch refuses, with the exceptions."""
        if self.info.error_inputs_func is None:
            return
        torch.manual_seed(0)
        for each in self.info.error_inputs("cpu"):
            sample = each.sample_input
            yield Call(sample.input, tuple(sample.args), dict(sample.kwargs)), each.error_type, each.error_regex


def _without_seed(op: Callable, *args: Any, **kwargs: Any) -> Any:
    """Return an op without the database's wrapper for random ops, which no compiler captures: the checks set the
    seed."""
    return op(*args, **kwargs)


@cache
def all_entries() -> dict[str, Entry]:
    """Return the entries that this machine can run, by name."""
    from torch.testing._internal import common_methods_invocations as database

    database.wrapper_set_seed = _without_seed
    found = [Entry(info) for info in database.op_db if not info.name.startswith("jiterator")]
    return {each.name: each for each in found if each.dtype is not None}
