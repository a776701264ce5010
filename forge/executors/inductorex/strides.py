"""Strides of a region's results where its code's differ, computed from the region's sizes at run time."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from forge.ir import check
from forge.ir.printing import symbolic_expression
from forge.ir.proxies import SYMBOLIC_TYPES, Dim
from forge.ir.pytree import names
from forge.ir.strides import to_strides


class Strides(NamedTuple):
    """Strides of a region's results as numbers and Python expressions, for this process and others.

    results: a result's strides, by position. sizes: for each symbol that they read, the expression of `boxed`, the list
    of the region's inputs, that is its value.
    """

    results: Mapping[int, Sequence[int | str]]
    sizes: Mapping[str, str]

    @classmethod
    def of(cls, results: Mapping[int, tuple[Dim, ...]], inputs: Sequence[Any]) -> "Strides":
        """Serialize strides; `inputs` are the region's fake inputs. Raises NotImplementedError for a symbol that no
        input defines."""
        sizes = sizes_of(inputs)
        read = sorted(set(names(list(results.values()))))
        unknown = [name for name in read if name not in sizes]
        check(not unknown, lambda: f"strides of results read {unknown}, which no input tells", NotImplementedError)
        expressions = {place: [_size_expression(each) for each in strides] for place, strides in results.items()}
        return cls(expressions, {name: sizes[name] for name in read})

    def wrap(self, function: Callable) -> Callable:
        """Return an artifact's function with results of these strides."""
        if not self.results:
            return function
        lines = ["def run(boxed):"]
        lines += [f"    {name} = {size}" for name, size in self.sizes.items()]
        lines += ["    results = list(function(boxed))"]
        for place, strides in self.results.items():
            items = "".join(f"{each}, " for each in strides)
            lines.append(f"    results[{place}] = restrided(results[{place}], ({items}))")
        scope: dict[str, Any] = {"function": function, "math": math, "restrided": to_strides}
        exec(compile("\n".join([*lines, "    return results"]), "<forge strides>", "exec"), scope)
        return scope["run"]


NO_STRIDES = Strides({}, {})  # the code's strides are torch's


def sizes_of(inputs: Sequence[Any]) -> dict[str, str]:
    """Return, for each symbol that a region's inputs define, the expression of its value in `boxed`, their list."""
    numbers: dict[str, Any] = {f"boxed[{index}]": each for index, each in enumerate(inputs)}
    sizes = {
        f"boxed[{index}].{method}({dim})": size
        for index, each in enumerate(inputs)
        if isinstance(each, torch.Tensor)
        for method, sizes in (("size", each.shape), ("stride", each.stride()))
        for dim, size in enumerate(sizes)
    }
    expressions: dict[str, str] = {}
    for text, number in {**numbers, **sizes}.items():
        if isinstance(number, torch.SymInt) and number.node.expr.is_symbol:
            expressions.setdefault(str(number.node.expr), text)
    return expressions


def _size_expression(length: Dim) -> int | str:
    return symbolic_expression(length) if isinstance(length, SYMBOLIC_TYPES) else int(length)
