"""The writer of a definition: rules append operators, proxies become references to values."""

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

from forge.executors.nvfuserex.definition import CAST, NumberInput, Operation, Ref, TensorInput
from forge.ir import Dim, NumberProxy, Proxy, TensorProxy
from forge.ir.proxies import SYMBOLIC_TYPES
from forge.torch_internals.sympy import FloorDiv

# operators that compute nothing: nvFuser may give an argument's own memory for their result
_ALIASING = frozenset("set permute reshape broadcast broadcast_in_dim expand squeeze slice stride_order".split())
_SCALARS: dict[type, str] = {sympy.Add: "add", sympy.Mul: "mul", FloorDiv: "div"}


class Untranslatable(Exception):
    """The error for a region that has no translation to nvFuser's operators."""


class Writer:
    """A writer of a definition. `inputs` and `places` are those that were read, in order."""

    def __init__(self, inputs: Sequence[Proxy], describe: Callable[[TensorProxy], TensorInput]) -> None:
        self.places = tuple(i for i, proxy in enumerate(inputs) if _is_argument(proxy))
        arguments = [(i, inputs[i]) for i in self.places]
        self.inputs = tuple(
            describe(each) if isinstance(each, TensorProxy) else NumberInput(i) for i, each in arguments
        )
        self.operations: list[Operation] = []
        self.values = {inputs[i].name: Ref(index) for index, i in enumerate(self.places)}
        self.aliases: set[Ref] = set()
        self._lengths = dict(self._input_lengths([inputs[i] for i in self.places]))
        self._sums: dict[sympy.Basic, Ref | int] = {}

    def op(self, name: str, *args: Any, **kwargs: Any) -> Ref:
        """Return the result of the operator of this name."""
        operands = tuple(map(self.of, args))
        self.operations.append(Operation(name, operands, tuple((key, self.of(value)) for key, value in kwargs.items())))
        result = Ref(len(self.inputs) + len(self.operations) - 1)
        if name in _ALIASING or (name == CAST and operands[0] in self.aliases):
            self.aliases.add(result)
        return result

    def cast(self, x: Any, dtype: torch.dtype) -> Ref:
        """Return x in a dtype; x itself if it has that dtype."""
        return self.op(CAST, x, dtype)

    def of(self, value: Any) -> Any:
        """Return an operator's argument: references for proxies and symbolic sizes, tuples for sequences."""
        if isinstance(value, Ref):
            return value
        if isinstance(value, Proxy):
            return self.values[value.name]
        if isinstance(value, torch.SymInt):
            return self._length(value.node.expr)
        if isinstance(value, SYMBOLIC_TYPES):
            raise Untranslatable(f"{value} is a number that differs from run to run")
        return tuple(map(self.of, value)) if isinstance(value, (tuple, list)) else value

    def _input_lengths(self, inputs: Sequence[Proxy]) -> Any:
        """Yield (symbol, expression) for symbols that are sizes of inputs, or inputs themselves."""
        for proxy in reversed(inputs):
            if isinstance(proxy, NumberProxy):
                yield proxy.name, self.values[proxy.name]
        for proxy in reversed(inputs):
            for dim, size in enumerate(proxy.shape if isinstance(proxy, TensorProxy) else ()):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    yield str(size.node.expr), (self.values[proxy.name], dim)

    def _length(self, expression: sympy.Basic) -> Ref | int:
        if expression.is_Integer:
            return int(expression)
        if expression not in self._sums:
            self._sums[expression] = self._scalar(expression)
        return self._sums[expression]

    def _scalar(self, expression: sympy.Basic) -> Ref:
        if expression.is_Symbol and str(expression) in self._lengths:
            length = self._lengths[str(expression)]
            return length if isinstance(length, Ref) else self.op("size", *length)
        name = _SCALARS.get(type(expression))
        if name is None:
            raise Untranslatable(f"a length is {expression}, which has no expression in nvFuser's operators")
        first, second, *others = map(self._length, expression.args)
        result = self.op(name, first, second)
        for each in others:
            result = self.op(name, result, each)
        return result


def _is_argument(proxy: Proxy) -> bool:
    whole = isinstance(proxy, NumberProxy) and isinstance(proxy.value, torch.SymInt)
    return whole or isinstance(proxy, TensorProxy)


def can_say(length: Dim) -> bool:
    """Return whether a size can be expressed in operators on numbers."""
    if isinstance(length, int):
        return True
    parts = sympy.preorder_traversal(length.node.expr)
    return all(part.is_Symbol or part.is_Integer or type(part) in _SCALARS for part in parts)
