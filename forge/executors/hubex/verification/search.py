"""Search for calls that a kernel's constraints allow, over ranks, sizes and numbers, judged by the kernel's checker.

A search starts from usual values and makes changes that lower the number of violated constraints: one value at a time,
then two together, then three. Candidates come from the constraints: their numbers, the multiples and neighbours of
these, and the value of a comparison's other side.
"""

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations, product, takewhile
from math import lcm, prod
from typing import Any

import torch

from forge import clang
from forge.executors.calls import Call, Meta
from forge.executors.hubex.kernels import Kernel
from forge.hub.manifest import REQUIRED, Checker
from forge.hub.manifest.constraints import is_default
from forge.hub.manifest.where import UnknownValue, evaluate
from forge.ir import TensorProxy, Trace, recording

Values = dict[str, Any]  # the values of a search's variables, by name

TRIES = 6000
LARGEST = 1 << 22  # elements of one tensor
USUAL = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64)
TOGETHER = 12  # the number of a variable's candidates that are tried together with others


class Constraints:
    """The constraints of a kernel, split into parts that can be counted."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.conditions = tuple(part for where in kernel.entry.where for part in where.parts())
        self.checker = Checker(replace(kernel.entry, where=()), kernel.signature)
        walked = [part for condition in self.conditions for part in ast.walk(condition.expression)]
        self.names = frozenset(part.id for part in walked if isinstance(part, ast.Name))
        self.comparisons = [part for part in walked if isinstance(part, ast.Compare)]
        positions = {part.slice for part in walked if isinstance(part, ast.Subscript)}
        constants = [part for part in walked if isinstance(part, ast.Constant) and part not in positions]
        self.constants: list[Any] = [constant.value for constant in constants]
        self.numbers = _numbers(self.constants)

    def violations(self, call: Call) -> frozenset[Any]:
        """Return the constraints that a call violates."""
        variables = self.variables(call)
        others = self.checker.failures(**self.arguments(call))
        failures = frozenset((*others, *(each for each in self.conditions if each.reason(variables) is not None)))
        return failures or self._problem_of_operation(call)

    def _problem_of_operation(self, call: Call) -> frozenset[Any]:
        """Return a set of the operation itself if it raises for a call, else an empty set."""
        try:
            record(self.kernel, call)
        except Exception:  # the comparison reports its error
            return frozenset({self.kernel.target.symbol})
        return frozenset()

    def variables(self, call: Call) -> dict[str, Any]:
        """Return the operator's arguments and the named dims."""
        bound = self.arguments(call)
        dims: dict[str, Any] = {}
        for argument, pattern in self.kernel.entry.shape.items():
            if isinstance(bound.get(argument), TensorProxy):
                pattern.mismatch(bound[argument].shape, dims)
        return {**bound, **dims}

    def arguments(self, call: Call) -> dict[str, Any]:
        """Return the operator's arguments by name, with placeholders for tensors."""
        stood = call.map(lambda leaf: _stand_in(leaf) if isinstance(leaf, Meta) else leaf)
        return self.kernel.bind(stood.args, stood.kwargs)

    def compared_values(self, name: str, call: Call) -> Iterator[Any]:
        """Yield the values with which conditions compare an argument."""
        variables = self.variables(call)
        for each in self.comparisons:
            left, right = each.left, each.comparators[0]
            for side, other in ((left, right), (right, left)):
                if isinstance(side, ast.Subscript):
                    side = side.value
                if isinstance(side, ast.Name) and side.id == name:
                    yield from _values_of(other, variables)


def record(kernel: Kernel, call: Call) -> Trace:
    """Return a program of a call of the kernel's symbol."""
    trace = Trace("search")
    with recording(trace, clang.language):
        on_proxies = call.map(
            lambda leaf: (
                trace.tensor(leaf.shape, leaf.dtype, leaf.device, strides=leaf.strides)
                if isinstance(leaf, Meta)
                else leaf
            )
        )
        kernel.target.symbol(*on_proxies.args, **on_proxies.kwargs)
    return trace


def _stand_in(meta: Meta) -> TensorProxy:
    return TensorProxy("x", meta.shape, meta.dtype, meta.device, strides=meta.strides)


def _values_of(expression: ast.expr, variables: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the value of one side of a comparison, its items, and a number's neighbours."""
    for part in expression.elts if isinstance(expression, ast.Tuple) else ():
        yield from _values_of(part, variables)
    try:
        value = evaluate(expression, variables)
    except UnknownValue:
        return
    yield value
    if type(value) in (int, float):
        yield from (value + 1, value - 1)
    if type(value) is float:  # a value between it and another one
        yield from (value * 1.01, value / 1.01, value * 1.5, value / 1.5)


def _numbers(values: Iterable[Any]) -> tuple[int, ...]:
    """Return candidate sizes from the numbers in conditions: the numbers, their neighbours and multiples, and multiples
    of one number beyond another."""
    numbers = sorted({value for value in values if type(value) is int and 0 < value < LARGEST})
    near = [each + step for each in numbers for step in (-1, 0, 1)]
    multiples = [each * times for each in numbers for times in (2, 3, 4, 5)]
    pairs = [*combinations(numbers, 2), *((b, a) for a, b in combinations(numbers, 2))]
    past = [each for a, b in pairs for each in ((b // a) * a, (b // a + 1) * a, a + b, a * b, lcm(a, b))]
    return tuple(sorted({each for each in (*USUAL, *near, *multiples, *past) if 0 < each < LARGEST}))


def search(
    constraints: Constraints,
    start: Values,
    build: Callable[[Values], Call],
    candidates: Callable[[str, Values], Sequence[Any]],
    tries: int = TRIES,
) -> Values | None:
    """Return values of the variables that satisfy every constraint, or None if none were found."""
    budget = iter(range(tries))

    def violations(values: Values) -> frozenset[Any] | None:
        call = build(values) if next(budget, None) is not None else None
        if call is None or any(prod(meta.shape) > LARGEST for meta in call.metas):
            return None
        return constraints.violations(call)

    values, reasons = start, violations(start)
    while reasons:
        better = _better(values, reasons, violations, candidates)
        if better is None:
            return None
        values, reasons = better
    return None if reasons is None else values


Failing = Callable[[Values], frozenset[Any] | None]


def _better(
    values: Values, reasons: frozenset[Any], failing: Failing, candidates: Callable[[str, Values], Sequence[Any]]
) -> tuple[Values, frozenset[Any]] | None:
    """Return the values with one or several changed such that fewer constraints fail."""
    promising: dict[str, list[Any]] = {}
    for name in values:
        ranking = []
        for value in candidates(name, values):
            changed = {**values, name: value}
            failures = failing(changed)
            if failures is not None and len(failures) < len(reasons):
                return changed, failures
            if failures is not None:
                ranking.append(((len(reasons & failures), len(failures)), value))
        promising[name] = [value for _, value in sorted(ranking, key=lambda pair: pair[0])]
    for names in chain(combinations(values, 2), combinations(values, 3)):
        for combination in product(*(promising[name][:TOGETHER] for name in names)):
            changed = {**values, **dict(zip(names, combination, strict=True))}
            failures = failing(changed)
            if failures is not None and len(failures) < len(reasons):
                return changed, failures
    return None


def lengths(constraints: Constraints, values: Values, own: Any = None) -> list[int]:
    """Return the candidates of a size: the values in the constraints and the other sizes, with multiples."""
    others = sorted({value for value in values.values() if type(value) is int and value > 0})[:8]
    related = [each * times for each in others for times in (1, 2, 3, 4)]
    products = [a * b for a, b in combinations(others, 2)]
    choices = dict.fromkeys(chain(constraints.numbers, related, products))
    return [each for each in choices if each != own and each < LARGEST]


def arguments(kernel: Kernel, values: Mapping[str, Any]) -> Call:
    """Return a call of the kernel's symbol from arguments by name: arguments without a default by position, the others
    by keyword unless they equal their default."""
    parameters = [each for each in kernel.target.signature.parameters if each.name in values]
    first = list(takewhile(lambda each: each.default is REQUIRED and not each.keyword_only, parameters))
    others = [each for each in parameters[len(first) :] if not is_default(values[each.name], each.default)]
    return Call(tuple(values[each.name] for each in first), {each.name: values[each.name] for each in others})


def dtype_of(kernel: Kernel, argument: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of an argument for a requested `dtype`: the manifest's, if it prescribes another."""
    alias = kernel.entry.dtypes.get(kernel.target.names.get(argument, argument))
    return dtype if alias is None or dtype in alias.dtypes else alias.dtypes[0]
