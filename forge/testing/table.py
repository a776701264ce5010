"""OpInfos as tables: `op` registers a row, whose samples and errors are rows in turn.

    op("roll", [sample(t(2, 3), 1), sample(t(3, 4).t(), (1, -1), (0, 1))], [wrong(t(2), 1, 5, match="out of range")])

A tensor stands in a row by its shape, and is made again in every row for each device and dtype. Rows that several ops
have are lists with a name, and lists of rows may be nested.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from forge import torchlang
from forge.testing.opinfo import (
    Directive,
    ErrorGenerator,
    ErrorSample,
    OpInfo,
    Sample,
    SampleGenerator,
    all_opinfos,
    make_tensor,
    register_opinfo,
)
from forge.torch_internals.dispatch import OpOverloadPacket
from forge.torch_internals.pytree import torch_pytree

# the values of a row


@dataclass
class Target:
    """An OpInfo's device and dtype, for which a table is filled in, and the values that its rows share."""

    info: OpInfo
    device: torch.device
    dtype: torch.dtype
    shared: dict[int, Any] = field(default_factory=dict)

    def fill(self, tree: Any) -> Any:
        """Return a pytree with every Value made."""
        return torch_pytree.tree_map(
            lambda leaf: leaf.make(self) if isinstance(leaf, Value) else leaf,
            tree,
            is_leaf=lambda leaf: isinstance(leaf, torch.Size),  # mapping would give a tuple
        )

    def call(self, row: Sample) -> Sample:
        """Return the call that a row describes."""
        return Sample(self.fill(row.args), self.fill(row.kwargs))


@dataclass(frozen=True, eq=False)
class Value:
    """A value of a row. Calls of a tensor's methods, indices and arithmetic are applied once it is made."""

    make: Callable[[Target], Any]

    def then(self, function: Callable, *args: Any, **kwargs: Any) -> "Value":
        """Return function(value, *args, **kwargs), whose arguments may be Values, too."""
        return Value(lambda target: function(self.make(target), *target.fill(args), **target.fill(kwargs)))

    def __getattr__(self, name: str) -> Callable[..., "Value"]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.then(method(name), *args, **kwargs)

    def __getitem__(self, key: Any) -> "Value":
        return self.then(operator.getitem, key)

    def __add__(self, other: Any) -> "Value":
        return self.then(operator.add, other)

    def __mul__(self, other: Any) -> "Value":
        return self.then(operator.mul, other)

    def __truediv__(self, other: Any) -> "Value":
        return self.then(operator.truediv, other)


DEVICE = Value(lambda target: target.device)
DTYPE = Value(lambda target: target.dtype)


def t(*shape: int, dtype: torch.dtype | None = None, low: float | None = None, high: float | None = None) -> Value:
    """Return a tensor of random values: in the op's domain, or from low to high; in the tested dtype, or another."""

    def make(target: Target) -> torch.Tensor:
        if low is None and high is None:
            return target.info.tensor(shape, target.device, dtype or target.dtype)
        return make_tensor(shape, target.device, dtype or target.dtype, low=low, high=high)

    return Value(make)


def values(data: Any, dtype: torch.dtype | None = None) -> Value:
    """Return torch.tensor(data) in the tested dtype, or another."""
    return Value(lambda target: torch.tensor(data, device=target.device, dtype=dtype or target.dtype))


def ints(*numbers: Any) -> Value:
    """Return a tensor of these int64."""
    return values(numbers, torch.int64)


def index(*shape: int, high: int, low: int = 0) -> Value:
    """Return random int64 in [low, high)."""
    return Value(lambda target: torch.randint(low, high, shape, device=target.device))


def mask(*shape: int) -> Value:
    """Return random bools."""
    return Value(lambda target: torch.rand(shape, device=target.device) < 0.5)


def permutation(*shape: int) -> Value:
    """Return indices along dim 0 that are distinct in each column."""
    return Value(lambda target: torch.rand(shape, device=target.device).argsort(0))


def shared_value(value: Value) -> Value:
    """Return a value that is made once for all rows of a table, and for all its places in a row."""

    def make(target: Target) -> Any:
        if id(value) not in target.shared:
            target.shared[id(value)] = value.make(target)
        return target.shared[id(value)]

    return Value(make)


# the rows


def sample(*args: Any, **kwargs: Any) -> Sample:
    """Return the row of a call: op(*args, **kwargs)."""
    return Sample(args, kwargs)


@dataclass(frozen=True)
class Where:
    """Rows for the dtypes of which `condition` is true."""

    condition: Callable[[torch.dtype], bool]
    rows: Sequence[Sample]


def floats(*rows: Sample) -> Where:
    """Return rows for floating point dtypes alone."""
    return Where(lambda dtype: dtype.is_floating_point, rows)


Row = Sample | Where | ErrorSample
Rows = Row | Iterable["Rows"]


def flat(rows: Rows) -> Iterator[Row]:
    """Yield the rows of nested lists."""
    if isinstance(rows, Row):
        yield rows
    else:
        for each in rows:
            yield from flat(each)


def calls(*rows: Sample | Where) -> SampleGenerator:
    """Return a generator of the samples that the rows describe."""

    def samples(info: OpInfo, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        target = Target(info, device, dtype)
        for row in rows:
            if isinstance(row, Sample):
                yield target.call(row)
            elif row.condition(dtype):
                yield from map(target.call, row.rows)

    return samples


def unary(*shapes: Sequence[int], **kwargs: Any) -> list[Sample]:
    """Return rows of op(x) for x of each shape, and for a transposed one."""
    return [*(sample(t(*shape), **kwargs) for shape in shapes), sample(t(3, 4).t(), **kwargs)]


def wrong(
    *args: Any,
    error: type[Exception] | tuple[type[Exception], ...] = RuntimeError,
    match: str,
    stricter: str = "",
    **kwargs: Any,
) -> ErrorSample:
    """Return the row of a call, in float32, that must raise `error` with a message in which `match` is found."""
    return ErrorSample(sample(*args, **kwargs), error, match, stricter)


def errors(*rows: ErrorSample) -> ErrorGenerator:
    """Return a generator of the error samples that the rows describe."""

    def generate(info: OpInfo, device: torch.device) -> Iterator[ErrorSample]:
        target = Target(info, device, torch.float32)
        for row in rows:
            yield replace(row, sample=target.call(row.sample))

    return generate


def no_tensor(*rest: Any, **kwargs: Any) -> ErrorSample:
    """Return the row of a string where a tensor is wanted."""
    return wrong("x", *rest, **kwargs, error=TypeError, match="must be Tensor|must be a tensor|must be tuple")


# registration


def op(
    names: str,
    *rows: Rows,
    family: Rows = (),
    op: Callable | None = None,
    wrap: Callable[[Callable], Callable] | None = None,
    symbols: Sequence[str] | None = None,
    **options: Any,
) -> None:
    """Register an OpInfo for each name, with the rows and those of its family.

    It is one of the function of torch that the name begins with; the rest of a dotted name tells OpInfos of one
    function apart. `wrap` makes of the function what is tested in its place, and `op` is tested instead: the function's
    symbol is covered all the same, unless `symbols` says otherwise. The options are those of OpInfo.
    """
    every = list(flat((*rows, family)))
    samples = calls(*(row for row in every if not isinstance(row, ErrorSample)))
    mistakes = errors(*(row for row in every if isinstance(row, ErrorSample)))
    for name in names.split():
        function = op or function_of(name)
        function = function if wrap is None else wrap(function)
        ids = _symbols_behind(name, function) if symbols is None else symbols
        register_opinfo(OpInfo(name, function, samples, mistakes, symbols=ids, **options))


def function_of(name: str) -> Callable:
    """Return the function of torch that a name begins with. Raises ValueError if there is none."""
    first, *rest = name.split(".")
    if first == "Tensor":
        return method(rest[0])
    value: Any = {"aten": torch.ops.aten, "operator": operator}.get(first) or getattr(torch, first, None)
    for part in rest:
        if (attribute := getattr(value, part, None)) is None:
            break
        value = attribute
    value = value.default if isinstance(value, OpOverloadPacket) else value
    if not callable(value):
        raise ValueError(f"OpInfo {name!r}: torch has no function of this name; give op= and symbols=")
    return value


def _symbols_behind(name: str, function: Callable) -> tuple[str, ...]:
    """Return the id of the symbol that a name means, if `function` stands for it and is not known to torchlang."""
    if torchlang.find(function) is not None:
        return ()
    first, second = [*name.split("."), ""][:2]
    target = getattr(torch.Tensor, second, None) if first == "Tensor" else function_of(name)
    symbol = torchlang.find(target)
    id = f"torch.Tensor.{second}" if symbol is None else symbol.id
    return (id,) if id in torchlang.all_symbols() else ()


def method(name: str) -> Callable:
    """Return x.name(...) as a function of x: a proxy has the method, but is no argument for torch.Tensor.name."""

    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(x, name)(*args, **kwargs)

    call.__name__ = name
    return call


def on_a_clone(function: Callable) -> Callable:
    """Return the function of a clone of its first argument, which it changes."""
    return lambda x, *args, **kwargs: function(x.clone(), *args, **kwargs)


def detach_args(*which: int | str) -> Callable[[Callable], Callable]:
    """Return a decorator that detaches a function's arguments at these positions or of these names.

    It is for arguments for which torch has no gradient.
    """

    def wrap(function: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            positions = {i % len(args) if isinstance(i, int) else i for i in which}
            args = tuple(x.detach() if i in positions and x is not None else x for i, x in enumerate(args))
            return function(*args, **{name: x.detach() if name in positions else x for name, x in kwargs.items()})

        run.__name__ = function.__name__
        return run

    return wrap


def register_computed(names: Sequence[str]) -> None:
    """Register `name.computed` for OpInfos of views: copies of their results.

    A front end makes a view that a program returns outside of it, where torch differentiates it; a copy is computed
    inside, so that the view's own gradient rule runs.
    """
    infos = {info.name: info for info in all_opinfos()}
    for name in names:
        info = infos[name]
        symbol = torchlang.find(info.op)
        ids = info.symbols if symbol is None else (symbol.id,)
        register_opinfo(
            replace(info, name=f"{name}.computed", op=_clone_result(info.op), dtypes=(torch.float32,), symbols=ids)
        )


def _clone_result(op: Callable) -> Callable:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = op(*args, **kwargs)
        return tuple(part.clone() for part in result) if isinstance(result, (tuple, list)) else result.clone()

    wrapper.__name__ = f"copied_{op.__name__}"
    return wrapper


def tolerance(
    reason: str,
    rtol: float = 2e-2,
    atol: float = 2e-2,
    *,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float16),
    executors: Sequence[str] | None = ("torch-prims",),
    devices: Sequence[str] | None = None,
) -> Directive:
    """Return a tolerance for half precision, which the decomposition rounds elsewhere than eager does."""
    return Directive("tolerance", reason, None, executors, devices, dtypes, (rtol, atol))
