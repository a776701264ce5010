"""The checkers of calls against a kernel's constraints, with the first failing constraint in words."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from itertools import islice
from typing import Any

import torch

from forge.hub.manifest.layout import fits, strides_of
from forge.hub.manifest.model import (
    REQUIRED,
    Argument,
    Device,
    DimOrder,
    DtypeAlias,
    KernelEntry,
    OrderAlias,
    Signature,
)
from forge.hub.manifest.shapes import ShapePattern
from forge.hub.manifest.where import UnknownValue, same
from forge.ir import TensorProxy
from forge.support.dtypes import dtype_name, show
from forge.torch_internals.dispatch import is_traceable_wrapper_subclass

PLAIN = {torch.Tensor, torch.nn.Parameter, TensorProxy, type(None)}
TENSORS = (TensorProxy, torch.Tensor)

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


def capability(device: torch.device) -> tuple[int, int] | str:
    """Return the compute capability of this CUDA device, or the reason why it is not known."""
    if device.type != "cuda":
        return f"{device.type} devices have none"
    try:
        return _cuda_capability(torch.cuda.current_device() if device.index is None else device.index)
    except Exception as error:
        lines = str(error).splitlines()
        return lines[0] if lines else type(error).__name__


@cache
def _cuda_capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


class Checker:
    """The decision whether a kernel takes a call, from the metadata of its arguments.

    checker(*args, **kwargs) is True or the first failing constraint in words; `failures` gives all of them. A dim order
    that is not known (a proxy without strides) does not fail: forge.hub.manifest.layout.fix_ups lists the conversions
    at run time. faster: take only calls for which the kernel was measured to be faster.
    """

    def __init__(self, entry: KernelEntry, signature: Signature, *, faster: bool = False) -> None:
        self.entry = entry
        self.signature = signature
        self.subject = next(iter(signature.tensors), None)
        self.dropped = dropped_defaults(entry, signature)
        self.constrained = entry.constrained_arguments
        layout_names = {name for name, layout in entry.layout.items() if layout.order is not None}
        self.ordered = {name: alias for name, alias in entry.orders.items() if name not in layout_names}
        is_overload = "::" in signature.name
        parameters = (p for p in signature.parameters if not (p.out or p.name in entry.constrained_arguments))
        self.typed = tuple(parameters) if is_overload else ()
        self.argument_names = {parameter.name for parameter in signature.parameters if not parameter.out}
        self.faster = entry.faster if faster else ()

    def __call__(self, /, *args: Any, **kwargs: Any) -> bool | str:
        return self.decide(self.signature.bind(args, kwargs))

    def decide(self, values: dict[str, Any]) -> bool | str:
        """Decide a call from the arguments by the operator's names."""
        return next(self._reasons(values), True)

    def failures(self, /, *args: Any, **kwargs: Any) -> list[str]:
        """Return every constraint that fails, in words; empty when the kernel takes the call."""
        return list(self._reasons(self.signature.bind(args, kwargs)))

    def _reasons(self, values: dict[str, Any]) -> Iterator[str]:
        wrapped = self._wrapper_problem(values)
        if wrapped is not None:  # its dtype, shape and device do not describe memory that a kernel could read
            yield wrapped
            return
        if self.entry.device is not None:
            yield from self._device(self.entry.device, values)
        if self.typed:
            yield from self._kinds(values)
        yield from self._dropped_arguments(values)
        tensors: dict[str, list[Any]] = {}
        yield from self._present(values, tensors)
        dims: dict[str, Any] = {}
        yield from self._first(tensors, self.entry.dtypes, partial(self._dtype, bound={}))
        yield from self._first(tensors, self.ordered, partial(self._order, bound={}))
        broken = tuple(self._first(tensors, self.entry.shape, partial(self._shape, dims=dims)))
        yield from broken
        variables = {**values, **dims}
        for condition in self.entry.where:
            if broken and not condition.names <= variables.keys():
                continue  # a dim of a shape that did not match, which was reported
            reason = condition.reason(variables)
            if reason is not None:
                yield reason
        if not broken:
            reasons = (condition.reason(variables) for condition in self.faster)
            yield from (f"the kernel is not known to be faster: {reason}" for reason in reasons if reason is not None)

    def _about(self, name: str) -> str:
        """Return the beginning of a reason: the argument's name, unless it is the first tensor of the call."""
        return "" if name == self.subject else f"{name}: "

    def _wrapper_problem(self, values: Mapping[str, Any]) -> str | None:
        for name in self.signature.tensors:
            value = values.get(name)
            if type(value) in PLAIN:
                continue
            for tensor in _tensors(value):
                if isinstance(tensor, torch.Tensor) and is_traceable_wrapper_subclass(tensor):
                    hint = f"; give it {name}.to_local()" if hasattr(tensor, "to_local") else ""
                    return f"{name} is a {type(tensor).__name__}, whose elements a kernel cannot read{hint}"
        return None

    def _device(self, requirement: Device, values: Mapping[str, Any]) -> Iterator[str]:
        for name in self.signature.tensors:
            for tensor in _tensors(values.get(name)):
                device = tensor.device
                if device.type not in requirement.types:
                    yield f"{self._about(name)}device is {device.type}, needs {' or '.join(requirement.types)}"
                    return
                if not requirement.capability:
                    continue
                reason = _capability_reason(requirement, device)
                if reason is not None:
                    yield self._about(name) + reason
                    return

    def _dropped_arguments(self, values: Mapping[str, Any]) -> Iterator[str]:
        for name, default in self.dropped:
            if not is_default(values.get(name, default), default):
                yield f"{name} is given, but the kernel takes none"

    def _kinds(self, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield the reasons why the arguments belong to another overload, as add(x, 2) is of add.Scalar."""
        for parameter in self.typed:
            value = values.get(parameter.name)
            if value is None and not parameter.optional:
                yield f"{parameter.name} is None, which {self.signature.name} does not take"
            elif value is not None and parameter.kind == "tensor" and not isinstance(value, TENSORS):
                yield f"{parameter.name} is {show(value)}, but {self.signature.name} takes a tensor there"
            elif parameter.kind == "other" and isinstance(value, TENSORS):
                yield f"{parameter.name} is a tensor, but {self.signature.name} takes none there"

    def _present(self, values: Mapping[str, Any], present: dict[str, list[Any]]) -> Iterator[str]:
        """Put the constrained arguments into `present`; yield a reason for each that is missing or not a tensor."""
        for name in self.constrained:
            value = values.get(name)
            tensors = _tensors(value)
            if tensors or (isinstance(value, (tuple, list)) and not value):
                present[name] = tensors
            elif value is not None:
                yield f"{name} is {show(value)}, but must be a tensor"
            elif name not in self.entry.optional and name in self.argument_names:
                yield f"{name} is None, but must be a tensor"

    def _first(
        self,
        tensors: Mapping[str, list[Any]],
        constraints: Mapping[str, Any],
        reason: Callable[[str, Any, Any], str | None],
    ) -> Iterator[str]:
        """Yield, for each argument, the reason against the first of its tensors that does not fit."""
        for name, constraint in constraints.items():
            reasons = (reason(name, constraint, tensor) for tensor in tensors.get(name, ()))
            yield from islice((each for each in reasons if each is not None), 1)

    def _dtype(self, name: str, alias: DtypeAlias, tensor: Any, bound: dict[str, torch.dtype]) -> str | None:
        dtype = tensor.dtype
        if dtype not in alias.dtypes:
            verb = "is not" if alias.name is None else "not in"
            return f"{self._about(name)}dtype {dtype_name(dtype)} {verb} {alias}"
        if alias.name is not None and bound.setdefault(alias.name, dtype) != dtype:
            return f"{name} has dtype {dtype_name(dtype)}, but {alias.name} is {dtype_name(bound[alias.name])} here"
        return None

    def _order(self, name: str, alias: OrderAlias, tensor: Any, bound: dict[str, tuple[DimOrder, ...]]) -> str | None:
        if strides_of(tensor) is None:
            if self.entry.keyed and not any(order.is_contiguous for order in alias.orders):
                return f"{name}'s dim order is not known here, and {alias} is asked for"
            if len(alias.orders) > 1:
                return f"{name}'s dim order is not known, but {alias.name} allows several"
        possible = fits(alias, tensor)
        if not possible:
            is_contiguous = len(alias.orders) == 1 and alias.orders[0].dims is None
            return f"{name} is not contiguous" if is_contiguous else f"{name}'s dim order is not {alias}"
        if alias.name is None:
            return None
        before = bound.setdefault(alias.name, possible)
        bound[alias.name] = tuple(order for order in before if order in possible) or before
        if not set(before) & set(possible):
            return f"{name} has dim order {possible[0]}, but {alias.name} is {before[0]} here"
        return None

    def _shape(self, name: str, pattern: ShapePattern, tensor: Any, dims: dict[str, Any]) -> str | None:
        reason = pattern.mismatch(tensor.shape, dims)
        return None if reason is None else self._about(name) + reason


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, TENSORS):
        return [value]
    if isinstance(value, (tuple, list)):
        return [item for item in value if isinstance(item, TENSORS)]
    return []


def _capability_reason(requirement: Device, device: torch.device) -> str | None:
    actual = capability(device)
    if isinstance(actual, str):
        return f"capability of {device} is not known ({actual}), needs {requirement.capability_text}"
    if all(_COMPARE[compare](actual, limit) for compare, limit in requirement.capability):
        return None
    return f"capability is {actual[0]}.{actual[1]}, needs {requirement.capability_text}"


def passed_arguments(entry: KernelEntry) -> frozenset[str] | None:
    """Return the operator's arguments that are passed to the kernel; None if all are."""
    if entry.args is None:
        return None
    return frozenset(argument.value.name for argument in entry.args if isinstance(argument.value, Argument))


def dropped_defaults(entry: KernelEntry, signature: Signature) -> tuple[tuple[str, Any], ...]:
    """Return the arguments that are not passed to the kernel, with their defaults, the only values for which omitting
    them is correct.

    Arguments in a where expression are left to the kernel's author.
    """
    arguments = passed_arguments(entry)
    if arguments is None:
        return ()
    condition_names = frozenset(name for condition in entry.where for name in condition.names)
    return tuple(
        (parameter.name, parameter.default)
        for parameter in signature.parameters
        if parameter.name not in arguments | condition_names and not parameter.out and parameter.default is not REQUIRED
    )


def is_default(value: Any, default: Any) -> bool:
    """Return whether an argument has its default value."""
    try:
        return value is default or same(value, default)
    except UnknownValue:
        return False


def no_kernel(name: str, args: tuple, kwargs: Mapping[str, Any], reasons: Mapping[str, Iterable[str]]) -> str:
    """Return the message that no kernel takes a call: 'no kernel for aten::add.out(float32[2, 7] cpu): rms_sm80: device
    is cpu,
    …'."""
    arguments = [_describe(value) for value in args] + [f"{key}={_describe(value)}" for key, value in kwargs.items()]
    lines = [f"{kernel}: {'; '.join(failures)}" for kernel, failures in reasons.items()]
    return f"no kernel for {name}({', '.join(arguments)}): {'; '.join(lines) or 'none is registered'}"


def _describe(value: Any) -> str:
    if not isinstance(value, TENSORS):
        return show(value)
    return f"{dtype_name(value.dtype)}[{', '.join(map(str, value.shape))}] {value.device}"
