"""Arguments for a kernel, generated from its manifest only: a rank, sizes, dtypes and dim orders for each tensor, and
numbers for the other arguments."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from forge.executors.calls import Call, Meta
from forge.executors.hubex.kernels import Kernel
from forge.executors.hubex.verification.search import Constraints, Values, arguments, dtype_of, lengths, search
from forge.hub.manifest import REQUIRED, DimOrder
from forge.hub.manifest.shapes import DimPattern, ShapePattern
from forge.ir.strides import without_gaps

USUAL = (8, 3, 2, 2, 2)  # sizes, from the last dim to the first
RANKS = (3, 2, 4, 1, 5, 0)
DISTINCT = (8, 3, 2, 5, 4, 6, 7)


def generic_calls(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> Iterator[Call]:
    """Yield the calls found that the constraints allow: named dims of equal, then of distinct sizes; each of several
    dim orders. If none is found, yield one call that violates them."""
    builder = _Generic(kernel, device, dtype)
    start = builder.start()
    first = search(builder.constraints, start, builder.build, builder.candidates)
    if first is None:
        yield builder.build(start)
        return
    calls = [builder.build(first)]
    if len(builder.dims) > 1:
        other = search(builder.constraints, {**first, **builder.distinct(first)}, builder.build, builder.candidates)
        calls += [] if other is None else [builder.build(other)]
    orders = max((len(alias.orders) for alias in kernel.entry.orders.values()), default=1)
    yield from calls
    for choice in range(1, orders):
        yield builder.build({**first, "order": choice})


class _Generic:
    """The variables in the arguments of one kernel, and the calls built from their values."""

    def __init__(self, kernel: Kernel, device: torch.device, dtype: torch.dtype) -> None:
        self.kernel, self.device, self.dtype = kernel, device, dtype
        self.constraints = Constraints(kernel)
        pattern = kernel.pattern
        self.tensors = kernel.target.signature.tensors if pattern is None else pattern.tensors
        shapes = kernel.entry.shape.values()
        self.dims = tuple(dict.fromkeys(name for shape in shapes for name in shape.names))

    def start(self) -> Values:
        """Return the variables of the search, with usual values."""
        values: Values = dict.fromkeys(self.dims, USUAL[0])
        if not self.constraints.names.isdisjoint(map(self._theirs, self.tensors)):
            values |= {"all rank": RANKS[0], **{f"all dim {index}": size for index, size in enumerate(USUAL[:3])}}
        for name, parameter in self.kernel.target.signature.by_name.items():
            theirs = self._theirs(name)
            if name not in self.tensors:
                if theirs in self.constraints.names or parameter.default is REQUIRED:
                    values[name] = self._usual(name)
            elif theirs in self.constraints.names:
                values |= {f"{name} dtype": dtype_of(self.kernel, name, self.dtype)}
                if theirs not in self.kernel.entry.shape:
                    values |= {f"{name} rank": None, **{f"{name} dim {index}": None for index in range(4)}}
                if parameter.default is not REQUIRED:
                    values[f"{name} given"] = self._is_passed(name)
        return values

    def distinct(self, values: Values) -> Values:
        """Return distinct sizes for the named dims if they are all equal in `values`."""
        if len({values[name] for name in self.dims}) > 1:
            return {}
        spread = {}
        for name, size in zip(reversed(self.dims), DISTINCT, strict=False):
            spread[name] = values[name] if size == DISTINCT[0] else size
        return spread

    def candidates(self, name: str, values: Values) -> Sequence[Any]:
        """Return the values that are tried for a variable."""
        kind = name.partition(" ")[2].partition(" ")[0]
        if kind == "rank":
            return RANKS
        if kind == "given":
            return (not values[name],)
        if kind == "dtype":
            alias = self.kernel.entry.dtypes.get(self._theirs(name.partition(" ")[0]))
            dtypes = [each for each in self._dtypes_in_conditions() if alias is None or each in alias.dtypes]
            return tuple(dict.fromkeys((*dtypes, *(alias.dtypes if alias is not None else ()))))
        if kind == "dim" or name in self.dims:
            return lengths(self.constraints, values, values[name])
        suggested = self.constraints.compared_values(self._theirs(name), self.build(values))
        choices = [self._usual(name), *suggested, None, True, False, 1, 2, 0.5]
        return [value for index, value in enumerate(choices) if not any(value is each for each in choices[:index])]

    def _dtypes_in_conditions(self) -> list[torch.dtype]:
        return [each for each in self.constraints.constants if isinstance(each, torch.dtype)]

    def _theirs(self, name: str) -> str:
        return self.kernel.target.names.get(name, name)

    def _usual(self, name: str) -> Any:
        parameter = self.kernel.target.signature.by_name[name]
        if parameter.default is not REQUIRED:
            return parameter.default
        function = self.kernel.target.function
        return 1e-5 if function is None else function.example(name)

    def _is_passed(self, name: str) -> bool:
        parameter = self.kernel.target.signature.by_name[name]
        return parameter.default is REQUIRED or self._theirs(name) in self.kernel.entry.constrained_arguments

    def build(self, values: Values) -> Call:
        """Return the call of these values."""
        by_name: dict[str, Any] = {}
        for name, parameter in self.kernel.target.signature.by_name.items():
            if parameter.rest:
                continue
            if name not in self.tensors:
                by_name[name] = values[name] if name in values else self._usual(name)
            elif values.get(f"{name} given", self._is_passed(name)):
                meta = self._meta(name, values)
                by_name[name] = [meta, meta] if parameter.kind == "tensors" else meta
            else:
                by_name[name] = parameter.default if parameter.default is not REQUIRED else None
        return arguments(self.kernel, by_name)

    def _meta(self, name: str, values: Values) -> Meta:
        shape = self._shape(name, values)
        kind = values.get(f"{name} dtype", dtype_of(self.kernel, name, self.dtype))
        return Meta(shape, kind, self.device, self._strides(name, shape, values))

    def _shape(self, name: str, values: Values) -> tuple[int, ...]:
        pattern = self.kernel.entry.shape.get(self._theirs(name))
        if pattern is not None:
            return self._shape_of(pattern, values)
        rank = values.get(f"{name} rank")
        if rank is None:
            rank = self._declared_rank(name, values)
        own: list[int | None] = [values.get(f"{name} dim {index}") for index in range(rank)]
        sizes = [_usual(index, values) if size is None else size for index, size in enumerate(own)]
        return tuple(reversed(sizes))

    def _shape_of(self, pattern: ShapePattern, values: Values) -> tuple[int, ...]:
        first, rest = ([_length(dim, values) for dim in dims or ()] for dims in (pattern.first, pattern.rest))
        rank = values.get("all rank", RANKS[0])
        missing = 0 if pattern.rest is None else max(0, rank - len(first) - len(rest))
        middle = [_usual(index, values) for index in range(len(rest), len(rest) + missing)]
        return (*first, *reversed(middle), *rest)

    def _declared_rank(self, name: str, values: Values) -> int:
        """Return the rank of the dim orders declared for an argument."""
        alias = self.kernel.entry.orders.get(self._theirs(name))
        dims = [order.dims for order in alias.orders if order.dims is not None] if alias is not None else []
        return len(dims[0]) if dims else values.get("all rank", RANKS[0])

    def _strides(self, name: str, shape: tuple[int, ...], values: Values) -> tuple[int, ...] | None:
        """Return the strides of a dim order if the checker depends on it, that is, if several are declared."""
        orders = self.kernel.entry.orders
        if all(len(alias.orders) == 1 for alias in orders.values()):
            return None
        alias = orders.get(self._theirs(name))
        order = DimOrder() if alias is None else alias.orders[values.get("order", 0) % len(alias.orders)]
        dims = range(len(shape)) if order.dims is None or len(order.dims) != len(shape) else order.dims
        return without_gaps([max(size, 1) for size in shape], reversed(dims))


def _usual(place: int, values: Values) -> int:
    """Return the size of a dim without a constraint, counted from the last one."""
    return values.get(f"all dim {place}", USUAL[place])


def _length(dim: DimPattern, values: Values) -> int:
    if dim.length is not None:
        return dim.length
    return dim.times * (USUAL[0] if dim.name is None else values[dim.name])
