"""What kernels are verified on: OpInfo samples, the very arguments that a model uses, and variations of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from forge import torchlang
from forge.executors.hubex.calls import Call, Case, Meta, with_strides
from forge.executors.hubex.kernels import Kernel
from forge.hub.manifest import REQUIRED
from forge.testing import OpInfo, all_opinfos, make_tensor

ODD = (1, 7, 100)
LARGE = 1 << 20
GENERIC = (2, 3, 8)


def opinfos_of(kernel: Kernel) -> list[OpInfo]:
    """The OpInfos of the operation that a kernel implements; none for a pattern."""
    symbol = kernel.target.symbol
    return [info for info in all_opinfos() if symbol.id in info.symbols or torchlang.find(info.op) is symbol]


def general_cases(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """The operation's OpInfo samples; for a pattern, arguments that its shapes allow, and variations of them."""
    infos = opinfos_of(kernel)
    for info in infos:
        for sample in info.samples(info, device, dtype):
            yield Case(sample.args, sample.kwargs)
    if not infos:
        yield from call_cases(kernel, _generic(kernel, device, dtype))


def _generic(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> Call:
    """Arguments of one shape, but where the manifest says another."""
    pattern = kernel.pattern
    tensors = kernel.target.signature.tensors if pattern is None else pattern.tensors
    values: dict[str, Any] = {}
    for name, parameter in kernel.target.signature.by_name.items():
        theirs = kernel.target.names.get(name, name)
        if name in tensors and (parameter.default is REQUIRED or theirs in kernel.entry.constrained):
            alias = kernel.entry.dtypes.get(theirs)
            kind = dtype if alias is None or dtype in alias.dtypes else alias.dtypes[0]
            meta = Meta(_generic_shape(kernel.entry.shape.get(theirs)), kind, device)
            values[name] = [meta, meta] if parameter.kind == "tensors" else meta
        else:
            values[name] = _generic_number(kernel, name) if parameter.default is REQUIRED else parameter.default
    return Call(tuple(values.values()))


def _generic_number(kernel: Kernel, name: str) -> Any:
    function = kernel.target.function
    return 1e-5 if function is None else function.example(name)


def _generic_shape(pattern: Any) -> tuple[int, ...]:
    if pattern is None:
        return GENERIC
    first, rest = ([_generic_length(dim) for dim in dims or ()] for dims in (pattern.first, pattern.rest))
    missing = 0 if pattern.rest is None else max(0, len(GENERIC) - len(first) - len(rest))
    return (*first, *GENERIC[:missing], *rest)


def _generic_length(dim: Any) -> int:
    return dim.length if dim.length is not None else dim.times * GENERIC[-1]


def call_cases(kernel: Kernel, call: Call) -> Iterator[Case]:
    """The call itself, and variations: odd lengths, memory that is not aligned, strided rows, no elements."""
    made = _Values(kernel, call)
    yield made.case(call)
    yield from variations(kernel, call)


def variations(kernel: Kernel, call: Call) -> Iterator[Case]:
    """What a call of the same form may look like."""
    made, small = _Values(kernel, call), _smaller(call)
    yield made.case(small, "unaligned", offset=1)
    yield made.case(small.map(_strided), "strided rows")
    for resized in _resized(kernel, small):
        yield made.case(resized)
        yield made.case(resized, "unaligned", offset=1)
    first = next((meta for meta in small.metas if meta.shape), None)
    if first is not None:
        yield made.case(_with_lengths(small, {first.shape[0]: 0}), "empty")


class _Values:
    """Random values in the domain of the kernel's operation."""

    def __init__(self, kernel: Kernel, call: Call) -> None:
        self.known = all(meta.strides is not None for meta in call.metas)
        infos = opinfos_of(kernel)
        self.low, self.high = infos[0].domain if infos else (None, None)

    def case(self, call: Call, note: str = "", offset: int = 0) -> Case:
        made = call.map(lambda leaf: self.tensor(leaf) if isinstance(leaf, Meta) else leaf)
        return Case(made.args, made.kwargs, note, offset, self.known)

    def tensor(self, meta: Meta) -> torch.Tensor:
        if meta.dtype.is_floating_point:
            values = make_tensor(meta.shape, meta.device, meta.dtype, low=self.low, high=self.high)
        elif meta.dtype.is_complex:
            values = torch.randn(meta.shape, dtype=meta.dtype, device=meta.device)
        else:  # small enough to be an index
            values = torch.randint(0, 2, meta.shape, device=meta.device).to(meta.dtype)
        return with_strides(values, meta.strides)


def _smaller(call: Call) -> Call:
    """A call of millions of elements with its leading dims cut."""
    first = next(iter(call.metas), None)
    if first is None or prod(first.shape) <= LARGE:
        return call
    kept = first.shape[-1]
    return _with_lengths(call, {length: 5 for length in first.shape[:-1] if length > 16 and length != kept})


def _strided(leaf: Any) -> Any:
    """x[:, ::2] in the place of x."""
    if not isinstance(leaf, Meta) or len(leaf.shape) < 2:
        return leaf
    return replace(leaf, strides=tuple(2 * each for each in _dense(leaf.shape, leaf.strides)))


def _resized(kernel: Kernel, call: Call) -> Iterator[Call]:
    """Odd lengths for each named dim, and for the last dim of the first tensor."""
    names = kernel.bind(call.args, call.kwargs)
    bound: dict[str, int] = {}
    times: dict[str, set[int]] = {}
    for name, pattern in kernel.entry.shape.items():
        if isinstance(names.get(name), Meta) and pattern.mismatch(names[name].shape, bound) is None:
            for dim in (*pattern.first, *(pattern.rest or ())):
                if dim.name is not None:
                    times.setdefault(dim.name, set()).add(dim.times)
    resized = {name: {each * bound[name]: each for each in found} for name, found in times.items()}
    last = next((meta.shape[-1] for meta in call.metas if meta.shape), None)
    if last is not None and not any(last in found for found in resized.values()):
        resized["last dim"] = {last: 1}
    for found in resized.values():
        for length in ODD:
            yield _with_lengths(call, {old: each * length for old, each in found.items()})


def _with_lengths(call: Call, lengths: Mapping[int, int]) -> Call:
    """The call with lengths replaced wherever they stand: in shapes, and in lists of numbers as normalized_shape is."""

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, Meta) or lengths.keys().isdisjoint(leaf.shape):
            return leaf
        shape = tuple(lengths.get(length, length) for length in leaf.shape)
        return replace(leaf, shape=shape, strides=None if leaf.strides is None else _dense(shape, leaf.strides))

    def numbers(value: Any) -> Any:
        if type(value) in (tuple, list, torch.Size) and all(type(each) is int for each in value):
            return tuple(lengths.get(each, each) for each in value)
        return value

    changed = call.map(change)
    return Call(tuple(map(numbers, changed.args)), {name: numbers(value) for name, value in changed.kwargs.items()})


def _dense(shape: Sequence[int], order: Sequence[int] | None) -> tuple[int, ...]:
    """Strides without gaps, the dims lying in the order that other strides say."""
    dims = sorted(range(len(shape)), key=lambda dim: (0 if order is None else order[dim], -dim))
    strides = [0] * len(shape)
    step = 1
    for dim in dims:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)
