"""A double of the module `nvfuser_direct`, for tests without a GPU: it records definitions and runs them with torch.

It checks a call's names, number and kinds of arguments (signatures.txt), returns nvFuser's dtypes, checks inputs
against their declarations, and lays out results as nvFuser may: in its own order unless one is requested, with repeated
dims without memory, and with moved values in the memory of others.
"""

import itertools
import traceback
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from nvfuser_double.operators import OPERATORS, ordered
from nvfuser_double.signatures import SIGNATURES
from nvfuser_double.values import DataType, TensorView, Val, Value

__all__ = ["DataType", "FusionDefinition", "compute_tensor_descriptor", "version"]


def version() -> str:
    """Return the version of the signatures."""
    return "0.2.35+double"


def compute_tensor_descriptor(sizes: Sequence[int], strides: Sequence[int]) -> tuple[list[bool | None], list[int]]:
    """Return (contiguity, slowest dim first; stride order: the number of faster dims of each dim)."""
    slowest_first = sorted(range(len(sizes)), key=lambda dim: -strides[dim])
    contiguity: list[bool | None] = []
    step = 1
    for dim in reversed(slowest_first):
        if sizes[dim] == 1 or strides[dim] == 0:
            contiguity.append(None)
        else:
            contiguity.append(strides[dim] == step)
            step = strides[dim] * sizes[dim]
    order = [len(sizes) - 1 - slowest_first.index(dim) for dim in range(len(sizes))]
    return contiguity[::-1], order


class _Tensor(NamedTuple):
    """The declared metadata of an input."""

    shape: Sequence[int]
    contiguity: Sequence[bool | None]
    dtype: DataType
    is_cpu: bool
    stride_order: Sequence[int]

    def check(self, given: torch.Tensor) -> None:
        """Raise RuntimeError if a tensor does not match its declaration."""
        lengths = zip(self.shape, given.shape, strict=True)
        right = given.dtype == self.dtype.value and all(
            declared == length or (declared == -1 and length > 1) for declared, length in lengths
        )
        if not right or not self._is_laid_out(given):
            raise RuntimeError(f"{self} was given {given.dtype}, {given.shape}, {given.stride()}\nframe #0: in C++")

    def _is_laid_out(self, given: torch.Tensor) -> bool:
        order = self.stride_order or range(given.ndim)[::-1]
        slowest_first = sorted(range(given.ndim), key=lambda dim: -order[dim])
        step = 1
        for dim, contiguous in zip(reversed(slowest_first), reversed(self.contiguity), strict=True):
            length, stride = given.shape[dim], given.stride(dim)
            if contiguous is None and not (length == 1 or stride == 0):
                return False
            if contiguous and stride != step:
                return False
            step = step if contiguous is None else stride * length
        return True


class _Operators:
    """The operators of `fd.ops`."""

    def __init__(self, definition: "FusionDefinition") -> None:
        self._definition = definition

    def __getattr__(self, name: str) -> Any:
        if name.startswith("define_") or name not in SIGNATURES:
            raise AttributeError(f"module 'nvfuser_direct.ops' has no attribute '{name}'")
        return partial(self._definition.record, name)


class FusionDefinition:
    """A fusion definition, which becomes a function when it is complete."""

    def __init__(self) -> None:
        self.ops = _Operators(self)
        self.inputs: list[tuple[Value, _Tensor | None]] = []
        self.calls: list[tuple[str, dict[str, Any], Value]] = []
        self.outputs: list[Value] = []
        self._places = itertools.count()

    def __enter__(self) -> "FusionDefinition":
        return self

    def __exit__(self, kind: type | None, value: Any, trace: Any) -> None:
        if kind is not None:
            print(f"Exception occurred: {kind.__name__}: {value}")
            traceback.print_tb(trace)

    def define_tensor(self, *args: Any, **kwargs: Any) -> TensorView:
        """Define an input tensor."""
        given = _Tensor(**SIGNATURES["define_tensor"].bind(args, kwargs))
        tensor = TensorView(next(self._places), given.dtype)
        self.inputs.append((tensor, given))
        return tensor

    def define_scalar(self, *args: Any, **kwargs: Any) -> Val:
        """Define an input number."""
        number = Val(next(self._places), SIGNATURES["define_scalar"].bind(args, kwargs)["dtype"])
        self.inputs.append((number, None))
        return number

    def record(self, name: str, *args: Any, **kwargs: Any) -> Value:
        """Record a call of an operator."""
        arguments = SIGNATURES[name].bind(args, kwargs)
        if name not in OPERATORS:
            raise NotImplementedError(f"the double does not run {name}")
        _, dtype = OPERATORS[name].dtypes(arguments)
        on_tensors = name in ("full", "iota") or any(isinstance(each, TensorView) for each in _flat(arguments.values()))
        kind = TensorView if on_tensors and name != "size" else Val
        made = kind(next(self._places), DataType(dtype))
        self.calls.append((name, arguments, made))
        return made

    def add_output(self, output: TensorView) -> None:
        """Add a result. Raises RuntimeError for a value that is already a result, or an input."""
        if output in self.outputs or any(output is value for value, _ in self.inputs):
            raise RuntimeError(f"{output} is given out twice\nframe #0: in C++")
        self.outputs.append(output)

    def execute(self, inputs: Sequence[Any], *, device: Any = None) -> list[torch.Tensor]:
        """Run the definition and return its results."""
        if not self.outputs:
            raise NotImplementedError("Fusion is empty!")
        known: dict[int, Any] = {}
        for (value, declared), given in zip(self.inputs, inputs, strict=True):
            if declared is not None:
                declared.check(given)
            known[value.place] = given
        for name, arguments, made in self.calls:
            known[made.place] = _run(name, arguments, known)
        asked = {made.place for name, _, made in self.calls if name == "stride_order"}
        return [_returned(known[each.place], each.place in asked) for each in self.outputs]


def _flat(values: Any) -> Any:
    for each in values:
        yield from each if isinstance(each, (list, tuple)) else (each,)


def _run(name: str, arguments: dict[str, Any], known: dict[int, Any]) -> Any:
    operator = OPERATORS[name]
    computed, dtype = operator.dtypes(arguments)

    def given(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [given(each) for each in value]
        value = known[value.place] if isinstance(value, Value) else value
        return value.to(computed) if computed is not None and torch.is_tensor(value) else value

    values = list(map(given, arguments.values()))
    result = operator.function(*values)
    if not torch.is_tensor(result):
        return result
    return (_repeated(result, values) if computed is not None else result).to(dtype)


def _repeated(result: torch.Tensor, operands: Sequence[Any]) -> torch.Tensor:
    """Return the result expanded along the dims in which all operands repeat their elements, as nvFuser does."""
    layouts = [each.stride() for each in operands if torch.is_tensor(each) and each.ndim]
    for dim, length in enumerate(result.shape):
        if length > 1 and all(strides[dim] == 0 for strides in layouts):
            result = result.narrow(dim, 0, 1).expand(result.shape)
    return result


def _returned(result: torch.Tensor, asked: bool) -> torch.Tensor:
    return result if asked or result.ndim < 2 else ordered(result, range(result.ndim))
