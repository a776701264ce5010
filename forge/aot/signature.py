"""The signature of an entry point: what a call must give, and what it returns.

A call is checked by generated code (forge/aot/call.py). A call that does not pass is looked at again by
`Signature.normalize`, which takes what fits in another form (arguments by name, other strides) and says what does not.
"""

import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from forge.aot import tree
from forge.aot.errors import ExportError
from forge.ir.strides import to_strides


@dataclass(frozen=True)
class TensorInput:
    """An input that is a tensor. Sizes and strides are numbers, or Python expressions of the sizes that differ from
    call to call. changes: whether the program writes to it."""

    name: str
    shape: Sequence[int | str]
    strides: Sequence[int | str]
    dtype: str
    device: str
    changes: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}] {self.device}"


@dataclass(frozen=True)
class NumberInput:
    """An input that is an integer, the size of that name."""

    name: str
    size: str

    def __str__(self) -> str:
        return f"{self.name}: int {self.size}"


@dataclass(frozen=True)
class ConstantInput:
    """An input whose value is the one that the program was exported with."""

    name: str
    value: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.value!r}"


Input = TensorInput | NumberInput | ConstantInput
_KINDS = {"tensor": TensorInput, "number": NumberInput, "constant": ConstantInput}


@dataclass(frozen=True)
class Signature:
    """The inputs and results of an entry point.

    parameters: the names of the positional parameters, as far as they are known. arguments, result: nests
    (forge/aot/tree.py); `arguments` is a tuple of the positional ones and a dict of the others. sizes: name → smallest
    and largest, None where there is no limit. guards: Python expressions of sizes that must be true. results: of each
    leaf of the result the number of the tensor, a constant in a list, or the expression of a number. names: the user's
    names of sizes.
    """

    parameters: Sequence[str]
    arguments: Any
    inputs: Sequence[Input]
    sizes: Mapping[str, Sequence[int | None]]
    guards: Sequence[str]
    result: Any
    results: Sequence[Any]
    names: Mapping[str, str]

    def __str__(self) -> str:
        lines = ["inputs:", *[f"  {each}" for each in self.inputs]]
        for name, (low, high) in self.sizes.items():
            lines.append(f"  {low or 0} ≤ {name}" + ("" if high is None else f" ≤ {high}"))
        return self._with_names("\n".join(lines))

    def _with_names(self, text: str) -> str:
        """Return a text with the user's names of sizes."""
        return re.sub(r"\b\w+\b", lambda match: self.names.get(match[0], match[0]), text)

    def as_json(self) -> dict[str, Any]:
        """Return plain data, for `from_json`."""
        kinds = {cls: kind for kind, cls in _KINDS.items()}
        return {**vars(self), "inputs": [[kinds[type(each)], asdict(each)] for each in self.inputs]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Signature":
        """Return the signature that `as_json` described."""
        return cls(**{**data, "inputs": [_KINDS[kind](**fields) for kind, fields in data["inputs"]]})

    @property
    def tensors(self) -> list[TensorInput]:
        """The inputs that are tensors."""
        return [each for each in self.inputs if isinstance(each, TensorInput)]

    # calls

    def normalize(self, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the sizes of a call, then its inputs, each as the program takes it.

        Raises ExportError, naming the input and its dim, for a call that does not fit.
        """
        try:
            return self._normalize(device, args, kwargs)
        except ExportError as error:
            raise ExportError(self._with_names(str(error))) from None

    def _normalize(self, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        args, kwargs = self._bind(args, kwargs)
        names = [
            *self.parameters[: len(args)],
            *(f"argument {place}" for place in range(len(self.parameters), len(args))),
        ]
        parts = [*zip(self.arguments[1][1:], args, names, strict=True)]
        parts += [(part, kwargs[name], name) for name, part in _keyword_arguments(self.arguments[2])]
        leaves = [leaf for part, value, name in parts for _, leaf in tree.flatten(part, value, name)]
        sizes: dict[str, int] = {}
        for each, value in zip(self.inputs, leaves, strict=True):
            _check_kind(each, value, device)
            sizes = {**dict(_sizes_of(each, value)), **sizes}  # the first input tells
        self._check_sizes(sizes)
        return [
            *[sizes[name] for name in self.sizes],
            *[_as_taken(*pair, sizes) for pair in zip(self.inputs, leaves, strict=True)],
        ]

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments by position and by name as they were when the program was exported."""
        count = len(self.arguments[1]) - 1
        names = [name for name, _ in _keyword_arguments(self.arguments[2])]
        if len(args) == count and set(kwargs) == set(names):
            return args, kwargs
        arguments = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        positional = list(self.parameters[:count])
        expected = [*positional, *names]
        if len(positional) < count or len(arguments) != len(args) + len(kwargs) or set(arguments) != set(expected):
            description = f"{len(args)} by position and {sorted(kwargs)} by name" if args else f"{sorted(kwargs)}"
            raise ExportError(f"the call gives the arguments {description}, but was exported with {expected or count}")
        return tuple(arguments[name] for name in positional), {name: arguments[name] for name in names}

    def _check_sizes(self, sizes: Mapping[str, int]) -> None:
        for name, (low, high) in self.sizes.items():
            if name not in sizes:
                raise ExportError(f"the size {name} is given by no input")
            if not (low or 0) <= sizes[name] <= (math.inf if high is None else high):
                limit = f"at least {low or 0}" + ("" if high is None else f" and at most {high}")
                raise ExportError(f"{place_of(name, self.inputs)} is {sizes[name]}, but must be {limit}")
        for each in self.guards:
            if not evaluate(each, sizes):
                text = ", ".join(f"{name} is {value}" for name, value in sizes.items())
                raise ExportError(f"{text}, but the program was exported for sizes with {each}")


def place_of(size: str, inputs: Sequence[Input]) -> str:
    """Return the input and the dim that a size is of, in words."""
    for each in inputs:
        if isinstance(each, TensorInput) and size in each.shape:
            return f"{each.name}: dim {list(each.shape).index(size)}"
        if isinstance(each, NumberInput) and each.size == size:
            return each.name
    return f"the size {size}"


def _keyword_arguments(arguments: Any) -> list[tuple[str, Any]]:
    """Return the arguments that are given by name, in order."""
    return list(zip(arguments[1], arguments[2:], strict=True))


def evaluate(expression: int | str, sizes: Mapping[str, int]) -> Any:
    """Return the value of a size, or of a guard, for the sizes of a call."""
    return expression if isinstance(expression, int) else eval(expression, {**sizes, "math": math})


def _check_kind(each: Input, value: Any, device: torch.device) -> None:
    """Raise ExportError for an input of another kind, dtype, device or number of dims."""
    problem = None
    if isinstance(each, ConstantInput):
        if type(value) is not type(each.value) or value != each.value:
            problem = f"is {value!r}, but the program was exported with {each.value!r}"
    elif isinstance(each, NumberInput):
        if type(value) is not int:
            problem = f"is a {type(value).__name__}, but must be an int"
    else:
        problem = _tensor_problem(each, value, device)
    if problem is not None:
        raise ExportError(f"{each.name} {problem}")


def _tensor_problem(each: TensorInput, value: Any, device: torch.device) -> str | None:
    if not isinstance(value, torch.Tensor):
        return f"is a {type(value).__name__}, but must be a tensor"
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype != each.dtype:
        return f"has dtype {dtype}, but must have {each.dtype}"
    expected = device if each.device == device.type else torch.device(each.device)
    if value.device != expected:
        return f"is on {value.device}, but must be on {expected}"
    if value.ndim != len(each.shape):
        return f"has {value.ndim} dims, but must have {len(each.shape)}"
    return None


def _sizes_of(each: Input, value: Any) -> Iterator[tuple[str, int]]:
    if isinstance(each, NumberInput):
        yield each.size, value
    elif isinstance(each, TensorInput):
        for name, size in zip(each.shape, value.shape, strict=True):
            if isinstance(name, str):
                yield from _solve(name, size)


def _solve(expression: str, size: int) -> Iterator[tuple[str, int]]:
    """Return the size that an expression such as `2*s0 + 1` is of, by name; nothing for another expression."""
    if expression.isidentifier():
        yield expression, size
        return
    code = compile(expression, "<size>", "eval")
    if len(code.co_names) == 1:
        (name,) = code.co_names
        at = [evaluate(expression, {name: value}) for value in (0, 1, 2)]
        step = at[1] - at[0]
        if step and at[2] - at[1] == step and (size - at[0]) % step == 0:
            yield name, (size - at[0]) // step


def _as_taken(each: Input, value: Any, sizes: Mapping[str, int]) -> Any:
    """Return an input as the program takes it. Raises ExportError for one of another size."""
    if not isinstance(each, TensorInput):
        return value
    for dim, (expectation, size) in enumerate(zip(each.shape, value.shape, strict=True)):
        number = evaluate(expectation, sizes)
        text = f"{number}" if isinstance(expectation, int) else f"{number}, which is {expectation}"
        if size != number:
            raise ExportError(f"{each.name}: dim {dim} is {size}, but must be {text}")
    strides = tuple(evaluate(stride, sizes) for stride in each.strides)
    value = value.detach()
    result = to_strides(value, strides)
    if each.changes and result.data_ptr() != value.data_ptr():
        expectation = f"but must have {strides}: the program writes to it"
        raise ExportError(f"{each.name} has the strides {value.stride()}, {expectation}")
    return result


def parameters_of(model: Callable[..., Any]) -> list[str]:
    """Return the names of the positional parameters of a model's forward, or of a function."""
    function = model.forward if isinstance(model, torch.nn.Module) else model
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = itertools.takewhile(lambda each: each.kind in positional, parameters)
    return [each.name for each in names]
