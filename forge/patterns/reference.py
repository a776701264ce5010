"""Patterns: a reference in plain torch, to be found in a trace.

    @pattern
    def rms_norm(x, weight, eps: float):
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

The reference is traced to prims in normal form (canonical.py). Its *skeleton*, in which casts and broadcasts are
transparent and what depends on sizes matches anything, is what two traces of it have in common.
"""

import inspect
import pickle
import pkgutil
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

import torch

from forge import torchlang
from forge.ir import BoundSymbol, Symbol, TensorProxy, Trace, check, recording, set_language
from forge.ir.bounded import BoundedDict
from forge.ir.pytree import tensors
from forge.patterns.canonical import BROADCAST, CAST, Canonical, Node, relative_args
from forge.torchlang import autocast_mode

TRANSPARENT = frozenset({CAST, BROADCAST})
_SIZES = ((2, 3, 4, 8), (3, 5, 6, 16))
_SCALARS: dict[Any, tuple[tuple, tuple]] = {  # values that no reference writes itself, for each of two traces
    float: ((0.0137, 0.0251, 0.0389), (0.0173, 0.0217, 0.0331)),
    int: ((-1013, -1019, -1021), (-1031, -1033, -1039)),
}
_CPU = torch.device("cpu")


class Wild:
    """An argument of the skeleton that depends on sizes."""


class Scalar:
    """An argument of the skeleton that is a number parameter."""

    def __init__(self, name: str) -> None:
        self.name = name


class Skeleton:
    """One node of a reference's skeleton: a prim over skeletons, wild and number arguments; or a parameter.

    parameters: the names of those that it is made of.
    """

    __slots__ = ("args", "id", "parameter", "parameters")

    def __init__(self, id: str, args: tuple, parameter: str | None) -> None:
        self.id = id
        self.args = args
        self.parameter = parameter
        self.parameters = _parameters(args) if parameter is None else frozenset({parameter})


class Pattern:
    """A reference computation that is matched in programs and replaced by one composite symbol.

    Parameters annotated `float` or `int` are numbers and the others are tensors; a `torch.LongTensor` has one
    integer for each vector of the others, along their last dim. A reference that returns several tensors is
    anchored at the last one. A reference may call another pattern; its calls are matched wherever nothing runs the
    larger pattern.

    Args:
        reference: A function of torch calls.
        name: The name of the pattern, by default the function's.

    Attributes:
        symbol: The composite; its arguments are the parameters in order, and its decomposition is the reference.

    Raises:
        TypeError: For a reference with *args or **kwargs.
        ValueError: For a reference that computes nothing.
    """

    def __init__(self, reference: Callable, name: str | None = None) -> None:
        self.reference = reference
        self.name = name or reference.__name__
        parameters = inspect.signature(reference).parameters.values()
        for parameter in parameters:
            check(
                parameter.kind is parameter.POSITIONAL_OR_KEYWORD,
                lambda parameter=parameter: f"pattern {self.name}: {parameter} is not a plain parameter",
                TypeError,
            )
        self.parameters = [p.name for p in parameters]
        self.annotations = {p.name: p.annotation for p in parameters}
        self.numbers = [p.name for p in parameters if p.annotation in _SCALARS]
        self.tensors = [p.name for p in parameters if p.annotation not in _SCALARS]
        self.symbol = Symbol(self.name, f"pattern.{self.name}", body=self._body)
        self.symbol.__doc__ = reference.__doc__
        self.skeleton = self._trace_skeleton()
        self.size = _count(self.skeleton)
        self._exact: dict[tuple, tuple[list[str], list[BoundSymbol], list[str]] | None] = BoundedDict(256)

    def __reduce__(self) -> tuple:
        """Pickled by its name in a module, where the reference is no longer found. A script's is pickled by the
        reference's code if cloudpickle is there: the script of another process is another one."""
        module = self.reference.__module__
        names = [name for name in (self.reference.__qualname__, self.name) if "<locals>" not in name]
        place = next((f"{module}:{name}" for name in names if object_at(module, name) is self), None)
        if place is None:
            return Pattern, (self.reference, self.name)
        if module == "__main__" and find_spec("cloudpickle") is not None:
            return _from_code, (import_module("cloudpickle").dumps(self.reference), self.name)
        return pkgutil.resolve_name, (place,)

    def __call__(self, *args: Any) -> Any:
        """Return the reference's results on tensors; while a program is recorded, a call of the symbol."""
        return (self.symbol if tensors(args) else self.reference)(*args)

    def _body(self, *args: Any) -> Any:
        with set_language(torchlang.language):
            return self.reference(*args)

    def _trace(self, metadata: dict[str, Any]) -> tuple[list[str], list[BoundSymbol], list[str]]:
        """Return (inputs, calls, outputs) of the reference on tensors (shape, dtype, device) and numbers."""
        trace = Trace(self.name)
        arguments = []
        with autocast_mode.disable(), recording(trace, torchlang.language):  # under which a pattern may be made
            for parameter in self.parameters:
                value = metadata[parameter]
                if isinstance(value, tuple):
                    value = trace.add_input(trace.tensor(*value, name=parameter))
                arguments.append(value)
            result = self.reference(*arguments)
        return trace.input_names, trace.bound_symbols, [proxy.name for proxy in tensors(result)]

    def _trace_skeleton(self) -> list[Skeleton]:
        roots, stand_ins = [], []
        for trial in range(len(_SIZES)):
            metadata = self._stand_ins(trial, alike=True)
            try:
                inputs, calls, outputs = self._trace(metadata)
            except RuntimeError:  # half of a tensor meets a whole one
                metadata = self._stand_ins(trial, alike=False)
                inputs, calls, outputs = self._trace(metadata)
            stand_ins.append(metadata)
            check(bool(calls), lambda: f"pattern {self.name}: the reference computes nothing")
            graph = Canonical((), ())
            leaves = {name: Node("input", (name,), TensorProxy(name, *metadata[name]), name) for name in inputs}
            roots.append(graph.embed(leaves, calls, outputs))
        values = {name: tuple(metadata[name] for metadata in stand_ins) for name in self.numbers}
        memo: dict[int, Skeleton] = {}
        return [_merge(a, b, values, memo) for a, b in zip(*roots, strict=True)]

    def _stand_ins(self, trial: int, *, alike: bool) -> dict[str, Any]:
        """Return the tensors that the skeleton is traced with: of one shape (`alike`), or that broadcast to the
        first."""
        numbers = {kind: iter(values[trial]) for kind, values in _SCALARS.items()}
        metadata: dict[str, Any] = {}
        for name, kind in self.annotations.items():
            *sizes, last = _SIZES[trial]
            if kind in numbers:
                metadata[name] = next(numbers[kind])
            elif kind is torch.LongTensor:
                metadata[name] = (tuple(sizes), torch.int64, _CPU)
            else:
                metadata[name] = ((*sizes, last if alike or name == self.tensors[0] else 1), torch.float32, _CPU)
        return metadata

    def exact(self, binding: dict[str, Any], graph: Canonical) -> tuple[list[str], list[BoundSymbol], list[str]] | None:
        """Return the reference traced on what a binding stands for; None where it does not take that.

        Kept by its metadata: for this program alone where lengths are symbols of it.
        """
        metadata = {
            name: (value.proxy.shape, value.proxy.dtype, value.proxy.device) if isinstance(value, Node) else value
            for name, value in binding.items()
        }
        shapes = [value[0] for value in metadata.values() if isinstance(value, tuple)]
        symbolic = any(not isinstance(dim, int) for shape in shapes for dim in shape)
        cache = graph.traced.setdefault(self, {}) if symbolic else self._exact
        key = tuple([str(metadata[name]) for name in self.parameters])
        traced = cache.get(key, ...)
        if traced is ...:
            try:
                traced = self._trace(metadata)
            except (RuntimeError, ValueError, TypeError, IndexError):  # shapes that do not go together, say
                traced = None
            cache[key] = traced
        return traced

    def __repr__(self) -> str:
        return f"<pattern {self.name}({', '.join(self.parameters)})>"


def object_at(module: str, name: str) -> Any:
    """Return the object of a qualified name in a module that is imported; None if there is none."""
    try:
        return attrgetter(name)(sys.modules.get(module))
    except AttributeError:
        return None


def _from_code(code: bytes, name: str) -> Pattern:
    return Pattern(pickle.loads(code), name)


def pattern(reference: Callable) -> Pattern:
    """Return the Pattern whose reference the decorated function is.

    Args:
        reference: A function of torch calls; see Pattern.
    """
    return Pattern(reference)


def _merge(a: Any, b: Any, scalars: dict[str, tuple], memo: dict[int, Skeleton]) -> Any:
    """Return the skeleton of two traces of one reference: what differs between them is a number parameter or wild."""
    if isinstance(a, Node):
        while a.id in TRANSPARENT:
            a, b = a.args[0], b.args[0]
        if id(a) not in memo:
            if a.id == "input":
                memo[id(a)] = Skeleton("input", (), a.args[0])
            else:
                pairs = zip(relative_args(a), relative_args(b), strict=True)
                memo[id(a)] = Skeleton(a.id, tuple(_merge(x, y, scalars, memo) for x, y in pairs), None)
        return memo[id(a)]
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return tuple(_merge(x, y, scalars, memo) for x, y in zip(a, b, strict=True))
    for name, values in scalars.items():
        if (a, b) == values:
            return Scalar(name)
    return a if type(a) is type(b) and a == b else Wild()


def _parameters(part: Any) -> frozenset[str]:
    """Return the names of the parameters in a part of a skeleton."""
    if isinstance(part, tuple):
        return frozenset().union(*map(_parameters, part))
    if isinstance(part, Skeleton):
        return part.parameters
    return frozenset({part.name} if isinstance(part, Scalar) else ())


def _count(part: Any) -> int:
    """Return the number of prims in a skeleton."""
    if isinstance(part, Skeleton):
        return (part.parameter is None) + sum(map(_count, part.args))
    return sum(map(_count, part)) if isinstance(part, (tuple, list)) else 0
