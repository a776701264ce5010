"""The contents of a valid manifest, as plain data."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch

from forge.hub.manifest.errors import Mark
from forge.hub.manifest.schema import (
    file_path,
    folder_path,
    key,
    many,
    package,
    text,
    text_of_form,
    version_range,
    whole,
)
from forge.hub.manifest.shapes import ShapePattern
from forge.hub.manifest.where import Where
from forge.support.dtypes import dtype_name

_LIBRARY = re.compile(r"[A-Za-z_][\w.-]*")
_LIBRARY_FORM = "letters, digits, '_', '-' and '.', such as acme.norms"

# operators


NOWHERE = Mark("", 1, 1)


class _RequiredType:
    def __repr__(self) -> str:
        return "required"


REQUIRED = _RequiredType()


@dataclass(frozen=True)
class Parameter:
    """A parameter of an operator.

    kind: "tensor", "tensors" (a list of them), "other", or "any" if not known.
    optional: None is allowed in place of a tensor. out: an out-variant writes to it. rest: it takes all further
    arguments.
    """

    name: str
    kind: str
    optional: bool = False
    default: Any = REQUIRED
    keyword_only: bool = False
    out: bool = False
    rest: bool = False

    @property
    def may_be_tensor(self) -> bool:
        return self.kind != "other"


@dataclass(frozen=True)
class Signature:
    """An operator's signature. `name` is its canonical name; `returns` is the number of its results, None if not
    known."""

    name: str
    parameters: tuple[Parameter, ...]
    returns: int | None = 1

    @cached_property
    def by_name(self) -> dict[str, Parameter]:
        return {parameter.name: parameter for parameter in self.parameters}

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """The names of the arguments that are, or may be, tensors."""
        return tuple(parameter.name for parameter in self.parameters if parameter.may_be_tensor)

    @cached_property
    def _positional(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.parameters if not (p.keyword_only or p.rest))

    @cached_property
    def _defaults(self) -> dict[str, Any]:
        return {p.name: p.default for p in self.parameters if p.default is not REQUIRED}

    @cached_property
    def _rest(self) -> str | None:
        return next((p.name for p in self.parameters if p.rest), None)

    def bind(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, including defaults."""
        bound = {**self._defaults, **dict(zip(self._positional, args, strict=False)), **kwargs}
        if self._rest is not None:
            bound[self._rest] = tuple(args[len(self._positional) :])
        return bound


class Resolver(Protocol):
    """The operators that `op` may name."""

    def resolve(self, name: str) -> Signature | None:
        """Return the signature of an operator, or None for an unknown name."""

    def names(self) -> Iterable[str]:
        """Return the names of all operators, for suggestions."""


# constraints


@dataclass(frozen=True)
class DtypeAlias:
    """The dtypes that an argument may have. Arguments with the same alias have the same dtype in a call.

    `name` is None for dtypes that are named directly.
    """

    name: str | None
    dtypes: tuple[torch.dtype, ...]

    def __str__(self) -> str:
        dtypes = ", ".join(map(dtype_name, self.dtypes))
        return dtypes if self.name is None else f"{self.name} ({dtypes})"


@dataclass(frozen=True)
class DimOrder:
    """The order of a tensor's dims in memory, outermost first; None is contiguous, for any number of dims."""

    dims: tuple[int, ...] | None = None

    @property
    def is_contiguous(self) -> bool:
        return self.dims is None or self.dims == tuple(range(len(self.dims)))

    def __str__(self) -> str:
        return "contiguous" if self.dims is None else str(list(self.dims))


CONTIGUOUS = DimOrder()


@dataclass(frozen=True)
class OrderAlias:
    """The dim orders that an argument may have. Arguments with the same alias have the same order in a call."""

    name: str | None
    orders: tuple[DimOrder, ...]

    def __str__(self) -> str:
        orders = ", ".join(map(str, self.orders))
        return orders if self.name is None else f"{self.name} ({orders})"


@dataclass(frozen=True)
class Device:
    """The devices that a kernel runs on, and its required compute capability (CUDA)."""

    types: tuple[str, ...]
    capability: tuple[tuple[str, tuple[int, int]], ...] = ()
    capability_text: str = ""


@dataclass(frozen=True)
class Layout:
    """The memory layout that a kernel requires of an argument: in `order`, at an address divisible by `align`."""

    order: DimOrder | None = None
    align: int | None = None


# how a kernel is called


@dataclass(frozen=True)
class Argument:
    """An argument of the operator, passed to a parameter of the kernel."""

    name: str

    @property
    def index(self) -> int | None:
        """The index that a view takes from a list of tensors; None for a plain argument."""
        return None

    @property
    def names(self) -> frozenset[str]:
        """The arguments that a view's steps use."""
        return frozenset()


@dataclass(frozen=True)
class Constant:
    """A constant, passed to a parameter of the kernel."""

    value: Any


@dataclass(frozen=True)
class KernelArgument:
    """The value of one parameter of a kernel; `parameter` is None for a positional one."""

    parameter: str | None
    value: Argument | Constant


@dataclass(frozen=True)
class SavedTensor:
    """The metadata of a value that a forward saves for its backward.

    shape: named dims of the arguments' `shape`, lengths, and `...` as in the first argument that has it.
    """

    dtype: DtypeAlias
    shape: ShapePattern


@dataclass(frozen=True)
class Grad:
    """The gradient of a kernel.

    kind: "none" (the kernel is not used for calls that need a gradient), "composite" (backward derived from the
    decomposition), "autograd" (torch's autograd differentiates the kernel, which contains an autograd.Function or calls
    torch's operations; its graph is kept until the backward) or "kernel": `kernel_name`, called with `args` (the
    operator's arguments, `grad_output` and `output`, numbered if there are several, and saved values), returns the
    gradients of the arguments in `returns`, or writes them to its `out` parameters. Without `args` it is called with
    the incoming gradients, the kernel's arguments, and the saved values, by name.
    forward: the function that replaces the kernel in calls that need a gradient. It takes the kernel's arguments and
    returns the saved values after the results (an out-variant writes them to parameters of those names). Without it,
    the kernel itself always returns the saved values. fn, forward_fn: the functions, if given in Python. mutates: the
    arguments that it overwrites. result: the places of the gradients in its return value; empty for the return value
    itself.
    """

    kind: str = "none"
    kernel_name: str | None = None
    args: tuple[KernelArgument, ...] | None = None
    out: tuple[str | int, ...] = ()
    returns: tuple[str, ...] = ()
    forward: str | None = None
    saves: Mapping[str, SavedTensor] = field(default_factory=dict)
    mutates: tuple[str, ...] = ()
    result: tuple[Argument, ...] = ()
    fn: Callable | None = field(default=None, compare=False)
    forward_fn: Callable | None = field(default=None, compare=False)


@dataclass(frozen=True)
class KernelEntry:
    """A kernel: the operation that it implements, its constraints, and its calling convention.

    op: the operator's canonical name, or the pattern. op_kind: "op", "func" or "pattern". kernel_name: the function
    (`ns::name`, `python:module:function`, `hub:org/repo:function`); `fn`: the function, if given in Python.
    dtypes, orders, shape: constraints by argument; optional: constrained arguments that may be None.
    returns: the dtypes of results, by position. args: the arguments that are passed to the kernel, None for the
    operator's own. out: the kernel's parameters (names or positions) that are allocated from the meta, and returned.
    result: the places of the operator's results in its return value; empty for the return value itself.
    layout: fix-ups by argument. tolerance: (rtol, atol) by dtype. replaces: drop the kernels of earlier manifests.
    keyed: its dim orders are ExecuTorch's keys: it takes only tensors that are known to have them, and no tensor is
    copied into one.
    faster: the calls for which it was measured to be faster than the alternative; it is correct for the others, too.
    mutates: the arguments that it overwrites; it gets copies of them. assumes: the name of a predicate on the values of
    the arguments that the kernel requires; samples: the name of a function that makes arguments for verification;
    assumes_fn, samples_fn: the functions, if given in Python.
    """

    op: str
    name: str
    kernel_name: str | None = None
    fn: Callable | None = field(default=None, compare=False)
    op_kind: str = "op"
    library: str = ""
    priority: int = 0
    device: Device | None = None
    dtypes: Mapping[str, DtypeAlias] = field(default_factory=dict)
    orders: Mapping[str, OrderAlias] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    returns: Mapping[int, DtypeAlias] = field(default_factory=dict)
    shape: Mapping[str, ShapePattern] = field(default_factory=dict)
    where: tuple[Where, ...] = ()
    faster: tuple[Where, ...] = ()
    grad: Grad = Grad()
    tolerance: Mapping[torch.dtype, tuple[float, float]] = field(default_factory=dict)
    args: tuple[KernelArgument, ...] | None = None
    out: tuple[str | int, ...] = ()
    result: tuple[Argument, ...] = ()
    layout: Mapping[str, Layout] = field(default_factory=dict)
    mutates: tuple[str, ...] = ()
    assumes: str | None = None
    samples: str | None = None
    assumes_fn: Callable | None = field(default=None, compare=False)
    samples_fn: Callable | None = field(default=None, compare=False)
    replaces: bool = False
    keyed: bool = False
    mark: Mark = field(default=NOWHERE, compare=False)

    __hash__ = object.__hash__

    @property
    def constrained_arguments(self) -> tuple[str, ...]:
        """The arguments with declared dtypes, dim orders or shapes."""
        return tuple(dict.fromkeys((*self.dtypes, *self.orders, *self.shape)))

    @property
    def specificity(self) -> int:
        """The number of constraints: of two kernels that both fit, the more specific one is preferred."""
        devices = 0 if self.device is None else 1 + len(self.device.capability)
        return devices + len(self.dtypes) + len(self.orders) + len(self.shape) + len(self.where)


# a file


@dataclass(frozen=True)
class Library:
    """The name of a set of kernels, and the priority of those that declare none."""

    name: str = key(text_of_form(_LIBRARY, _LIBRARY_FORM), default="", required=True)
    priority: int = key(whole, default=0)


NO_LIBRARY = Library()


@dataclass(frozen=True)
class Requires:
    """The range of torch versions (">=2.11") and the packages ("einops>=0.7") that must be installed."""

    torch: str = key(version_range, default="")
    python: tuple[str, ...] = key(many(package), default=())


@dataclass(frozen=True)
class Build:
    """The build settings of the kernels: source files and folders (relative to the manifest), and compiler flags."""

    cpp: tuple[str, ...] = key(many(file_path), default=())
    cuda: tuple[str, ...] = key(many(file_path), default=())
    include: tuple[str, ...] = key(many(folder_path), default=())
    cflags: tuple[str, ...] = key(many(text), default=())
    cuda_cflags: tuple[str, ...] = key(many(text), default=())
    ldflags: tuple[str, ...] = key(many(text), default=())

    @property
    def sources(self) -> tuple[str, ...]:
        return self.cpp + self.cuda


@dataclass(frozen=True)
class OpEntry:
    """An operator of a manifest, and its kernels.

    kind "op": `name` exists. "func": a new operator of this `schema`, with an optional `fake` (its meta) and
    `reference` (its decomposition). "pattern": the function `name` in plain torch, to match in traces.
    `signature` is None if it is only known after the pattern is imported. `replace`: drop earlier kernels.
    """

    kind: str
    name: str
    signature: Signature | None
    kernels: tuple[KernelEntry, ...]
    schema: str | None = None
    fake: str | None = None
    reference: str | None = None
    replace: bool = False
    mark: Mark = NOWHERE


@dataclass(frozen=True)
class Manifest:
    """A valid manifest. dialect: "forge", or "executorch" for a functions.yaml."""

    file: str
    dialect: str
    library: Library
    ops: tuple[OpEntry, ...]
    requires: Requires = Requires()
    build: Build = Build()

    @property
    def kernels(self) -> tuple[KernelEntry, ...]:
        """The kernels of all operators, in order of declaration, without those that `replace: true` dropped."""
        by_operator: dict[str, list[KernelEntry]] = {}
        for op in self.ops:
            by_operator[op.name] = [*([] if op.replace else by_operator.get(op.name, [])), *op.kernels]
        return tuple(
            sorted((kernel for kernels in by_operator.values() for kernel in kernels), key=lambda entry: entry.mark)
        )
