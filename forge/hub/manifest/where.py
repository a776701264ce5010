"""The `where` expressions of a manifest: a small grammar, read by `ast` and never run as Python.

    H % 8 == 0      eps is not None      2 <= width <= 4      approximate in ("none", "tanh")
    input.ndim == 3 and not causal       normalized_shape == [H]

Values: numbers, text, True, False, None, dtypes; an operator's arguments; the named dims of its shapes; a tensor's
`ndim`, `dtype`, `numel` and `shape[i]`. Operators: + - * / // % == != < <= > >= is in and or not.
A failing expression says why in words: `H = 100 is not a multiple of 8`.
"""

import ast
import operator
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from forge.hub.manifest.errors import did_you_mean
from forge.ir.proxies import plain
from forge.support.dtypes import find_dtype, is_tensor, show

MAX_LENGTH = 200
TENSOR_ATTRIBUTES = ("dtype", "ndim", "numel", "shape")

Env = Mapping[str, Any]


class NotAllowed(ValueError):
    """An expression outside of the grammar, or about a name that is not there."""


class Undecided(Exception):
    """An expression whose value is not known, or does not exist, for these arguments."""


# equality and truth that put no guard on a symbolic length


def is_true(condition: Any) -> bool:
    """The truth of a condition. Raises Undecided when it depends on a symbolic length."""
    if condition is True or condition is False:
        return condition
    if isinstance(condition, torch.SymBool):
        if statically_known_true(condition):
            return True
        if statically_known_true(torch.sym_not(condition)):
            return False
        raise Undecided(f"{condition} is not known before the program runs")
    if is_tensor(condition):
        raise Undecided("a tensor's value is not known before the program runs")
    return bool(condition)


def same(a: Any, b: Any) -> bool:
    """a == b; lists and tuples are one kind; nothing equals a tensor. Raises Undecided as is_true does."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if is_tensor(a) or is_tensor(b):
        return a is b
    return is_true(plain(a) == plain(b))


# the nodes of an expression: `value` in an environment of names, and `reason` where it is false


class Expression:
    """A part of an expression; `text` is how it was written."""

    text: str

    def value(self, env: Env) -> Any:
        raise NotImplementedError

    def reason(self, env: Env) -> str:
        """Why it is false, in words."""
        return f"{self.shown(env)} is false"

    def shown(self, env: Env) -> str:
        """'H = 100'; a literal as it is."""
        return f"{self.text} = {show(self.value(env))}"

    def opposite(self, env: Env) -> str:
        """Why `not` it is false, in words."""
        return self.shown(env)

    def parts(self) -> tuple["Expression", ...]:
        return ()

    def walk(self) -> Iterator["Expression"]:
        """This part and all inside it."""
        yield self
        for part in self.parts():
            yield from part.walk()


@dataclass(frozen=True)
class Literal(Expression):
    text: str
    held: Any

    def value(self, env: Env) -> Any:
        return self.held

    def shown(self, env: Env) -> str:
        return show(self.held)


@dataclass(frozen=True)
class Name(Expression):
    text: str

    def value(self, env: Env) -> Any:
        if self.text not in env:
            raise Undecided(f"{self.text} has no value here")
        return plain(env[self.text])

    def reason(self, env: Env) -> str:
        return f"{self.text} is {show(self.value(env))}"

    opposite = reason


@dataclass(frozen=True)
class Attribute(Expression):
    text: str
    base: Name
    attribute: str

    def value(self, env: Env) -> Any:
        tensor = self.base.value(env)
        if tensor is None:
            raise Undecided(f"{self.base.text} is None")
        if not is_tensor(tensor):
            raise Undecided(f"{self.base.text} is no tensor")
        return tensor.numel() if self.attribute == "numel" else getattr(tensor, self.attribute)

    def parts(self) -> tuple[Expression, ...]:
        return (self.base,)


@dataclass(frozen=True)
class Index(Expression):
    text: str
    base: Name | Attribute
    index: int

    def value(self, env: Env) -> Any:
        items = self.base.value(env)
        if not isinstance(items, (tuple, list)):
            raise Undecided(f"{self.base.shown(env)} has no items")
        if not -len(items) <= self.index < len(items):
            raise Undecided(f"{self.base.shown(env)} has no item {self.index}")
        return plain(items[self.index])

    def parts(self) -> tuple[Expression, ...]:
        return (self.base,)


@dataclass(frozen=True)
class Items(Expression):
    text: str
    items: tuple[Expression, ...]

    def value(self, env: Env) -> Any:
        return tuple(item.value(env) for item in self.items)

    def shown(self, env: Env) -> str:
        return show(self.value(env))

    def parts(self) -> tuple[Expression, ...]:
        return self.items


@dataclass(frozen=True)
class Arithmetic(Expression):
    text: str
    symbol: str
    left: Expression
    right: Expression

    def value(self, env: Env) -> Any:
        left, right = _number(self.left, env), _number(self.right, env)
        try:
            return _ARITHMETIC[self.symbol](left, right)
        except (ZeroDivisionError, OverflowError, TypeError) as error:
            raise Undecided(f"{error} in {self.text}") from None

    def parts(self) -> tuple[Expression, ...]:
        return self.left, self.right


@dataclass(frozen=True)
class Negative(Expression):
    text: str
    operand: Expression

    def value(self, env: Env) -> Any:
        return -_number(self.operand, env)

    def parts(self) -> tuple[Expression, ...]:
        return (self.operand,)


@dataclass(frozen=True)
class Comparison(Expression):
    text: str
    symbol: str
    left: Expression
    right: Expression

    def value(self, env: Env) -> bool:
        left, right = self.left.value(env), self.right.value(env)
        try:
            return _COMPARE[self.symbol](left, right)
        except TypeError:
            raise Undecided(f"{self.left.shown(env)} cannot be compared with {self.right.shown(env)}") from None

    def reason(self, env: Env) -> str:
        multiple = self._multiple()
        if multiple is not None:
            return f"{multiple.left.shown(env)} is not a multiple of {multiple.right.shown(env)}"
        return self._words(env, _FAILS[self.symbol])

    def opposite(self, env: Env) -> str:
        multiple = self._multiple()
        if multiple is not None:
            return f"{multiple.left.shown(env)} is a multiple of {multiple.right.shown(env)}"
        return self._words(env, _HOLDS[self.symbol])

    def _multiple(self) -> Arithmetic | None:
        """The remainder in `a % b == 0`."""
        remainder = self.symbol == "==" and isinstance(self.left, Arithmetic) and self.left.symbol == "%"
        return self.left if remainder and self.right == Literal("0", 0) else None

    def _words(self, env: Env, verb: str) -> str:
        value = self.left.value(env)
        if self.symbol in ("is", "is not") and (value is None or is_tensor(value)):
            return f"{self.left.text} is {'None' if value is None else 'not None'}"
        return f"{self.left.shown(env)} {verb} {self.right.shown(env)}"

    def parts(self) -> tuple[Expression, ...]:
        return self.left, self.right


@dataclass(frozen=True)
class Not(Expression):
    text: str
    operand: Expression

    def value(self, env: Env) -> bool:
        return not is_true(self.operand.value(env))

    def reason(self, env: Env) -> str:
        return self.operand.opposite(env)

    def opposite(self, env: Env) -> str:
        return self.operand.reason(env)

    def parts(self) -> tuple[Expression, ...]:
        return (self.operand,)


@dataclass(frozen=True)
class All(Expression):
    text: str
    operands: tuple[Expression, ...]

    def value(self, env: Env) -> bool:
        return all(is_true(operand.value(env)) for operand in self.operands)

    def reason(self, env: Env) -> str:
        return next(operand.reason(env) for operand in self.operands if not is_true(operand.value(env)))

    def opposite(self, env: Env) -> str:
        return " and ".join(operand.opposite(env) for operand in self.operands)

    def parts(self) -> tuple[Expression, ...]:
        return self.operands


@dataclass(frozen=True)
class Any_(Expression):
    text: str
    operands: tuple[Expression, ...]

    def value(self, env: Env) -> bool:
        return any(is_true(operand.value(env)) for operand in self.operands)

    def reason(self, env: Env) -> str:
        return " and ".join(operand.reason(env) for operand in self.operands)

    def opposite(self, env: Env) -> str:
        return next(operand.opposite(env) for operand in self.operands if is_true(operand.value(env)))

    def parts(self) -> tuple[Expression, ...]:
        return self.operands


def _number(expression: Expression, env: Env) -> Any:
    value = expression.value(env)
    if not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise Undecided(f"{expression.shown(env)} is no number")
    return value


def _contains(item: Any, items: Any) -> bool:
    if isinstance(items, str) and isinstance(item, str):
        return item in items
    if not isinstance(items, (tuple, list)):
        raise TypeError
    return any(same(item, other) for other in items)


_ARITHMETIC: dict[str, Callable] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "==": same,
    "!=": lambda a, b: not same(a, b),
    "<": lambda a, b: is_true(a < b),
    "<=": lambda a, b: is_true(a <= b),
    ">": lambda a, b: is_true(a > b),
    ">=": lambda a, b: is_true(a >= b),
    "is": lambda a, b: a is b,
    "is not": lambda a, b: a is not b,
    "in": _contains,
    "not in": lambda a, b: not _contains(a, b),
}
_HOLDS = {
    "==": "is",
    "!=": "is not",
    "<": "is less than",
    "<=": "is at most",
    ">": "is greater than",
    ">=": "is at least",
    "is": "is",
    "is not": "is not",
    "in": "is in",
    "not in": "is not in",
}
_OPPOSITE = {
    "==": "!=",
    "!=": "==",
    "<": ">=",
    "<=": ">",
    ">": "<=",
    ">=": "<",
    "is": "is not",
    "is not": "is",
    "in": "not in",
    "not in": "in",
}
_MIRRORED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_FAILS = {symbol: _HOLDS[_OPPOSITE[symbol]] for symbol in _HOLDS}


# reading


_BINARY = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%"}
_COMPARISONS = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
}


@dataclass(frozen=True)
class Where:
    """A condition on the arguments of a call."""

    text: str
    expression: Expression

    def reason(self, env: Env) -> str | None:
        """Why it does not hold, or None when it does."""
        try:
            if is_true(self.expression.value(env)):
                return None
            return self.expression.reason(env)
        except Undecided as error:
            return f"where {self.text!r}: {error}"

    @property
    def names(self) -> frozenset[str]:
        """The arguments and dims that it is about."""
        return frozenset(part.text for part in self.expression.walk() if isinstance(part, Name))

    def misused(self, values: Collection[str], tensors: Collection[str]) -> Iterator[str]:
        """What is wrong with its names: `values` are arguments and dims, `tensors` those arguments that are tensors."""
        compared_with_none = set()
        bases = {id(part.base) for part in self.expression.walk() if isinstance(part, (Attribute, Index))}
        for part in self.expression.walk():
            if isinstance(part, Comparison) and part.symbol in ("is", "is not"):
                compared_with_none.add(id(part.left))
        for part in self.expression.walk():
            if not isinstance(part, Name):
                continue
            if part.text not in values and part.text not in tensors:
                yield (
                    f"where: {part.text!r} in {self.text!r} is neither an argument nor a named dim"
                    f"{did_you_mean(part.text, (*values, *tensors))}"
                )
            elif part.text in tensors and part.text not in values and id(part) not in bases | compared_with_none:
                yield (
                    f"where: {part.text!r} in {self.text!r} is a tensor: compare it with None, or use "
                    f"{', '.join(f'{part.text}.{name}' for name in TENSOR_ATTRIBUTES)}"
                )


def parse_where(text: str) -> Where:
    """The condition in a text. Raises NotAllowed naming the part that is outside of the grammar."""
    if len(text) > MAX_LENGTH:
        raise NotAllowed(f"where: an expression of {len(text)} characters is too long; {MAX_LENGTH} is the most")
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise NotAllowed(f"where: {text!r} is not an expression: {error.msg}") from None
    except (ValueError, MemoryError, RecursionError, OverflowError) as error:
        raise NotAllowed(f"where: {text!r} is not an expression: {error}") from None
    return Where(text.strip(), _read(tree.body))


def _read(node: ast.AST) -> Expression:
    read = _READERS.get(type(node))
    found = read(node, _written(node)) if read else None
    if found is None:
        raise NotAllowed(f"where: {_written(node)!r} is not an allowed expression; {_ALLOWED}")
    return found


_ALLOWED = "there are numbers, names, tensor.shape[0], arithmetic, comparisons, and, or, not"


def _written(node: ast.AST) -> str:
    try:
        return ast.unparse(node)
    except (ValueError, RecursionError):  # a literal that Python does not write out
        return type(node).__name__


def _read_constant(node: ast.Constant, text: str) -> Expression | None:
    allowed = node.value is None or isinstance(node.value, (bool, int, float, str))
    return Literal(text, node.value) if allowed else None


def _read_name(node: ast.Name, text: str) -> Expression:
    dtype = find_dtype(node.id)
    return Name(text) if dtype is None else Literal(text, dtype)


def _read_attribute(node: ast.Attribute, text: str) -> Expression | None:
    if not isinstance(node.value, ast.Name):
        return None
    if node.value.id == "torch":
        dtype = find_dtype(node.attr)
        return None if dtype is None else Literal(text, dtype)
    return Attribute(text, Name(node.value.id), node.attr) if node.attr in TENSOR_ATTRIBUTES else None


def _read_index(node: ast.Subscript, text: str) -> Expression | None:
    base, index = _read(node.value), _constant_index(node.slice)
    return Index(text, base, index) if isinstance(base, (Name, Attribute)) and index is not None else None


def _constant_index(node: ast.AST) -> int | None:
    negative = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
    value = getattr(node.operand if negative else node, "value", None)
    if type(value) is not int:
        return None
    return -value if negative else value


def _read_binary(node: ast.BinOp, text: str) -> Expression | None:
    symbol = _BINARY.get(type(node.op))
    return Arithmetic(text, symbol, _read(node.left), _read(node.right)) if symbol else None


def _read_unary(node: ast.UnaryOp, text: str) -> Expression | None:
    kind = {ast.Not: Not, ast.USub: Negative}.get(type(node.op))
    return kind(text, _read(node.operand)) if kind else None


def _read_boolean(node: ast.BoolOp, text: str) -> Expression:
    kind = All if isinstance(node.op, ast.And) else Any_
    return kind(text, tuple(map(_read, node.values)))


def _read_comparison(node: ast.Compare, text: str) -> Expression | None:
    sides = [node.left, *node.comparators]
    found = []
    for left, op, right in zip(sides, node.ops, node.comparators, strict=False):
        symbol = _COMPARISONS[type(op)]
        written = f"{_written(left)} {symbol} {_written(right)}"
        if symbol in ("is", "is not") and not _is_singleton(right):
            raise NotAllowed(f"where: {written!r} is not an allowed expression; `is` goes with None, True or False")
        found.append(_compare(written, symbol, _read(left), _read(right)))
    return found[0] if len(found) == 1 else All(text, tuple(found))


def _is_singleton(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool))


def _compare(text: str, symbol: str, left: Expression, right: Expression) -> Comparison:
    """The comparison with what varies on its left, so that its reason speaks of that."""
    if isinstance(left, Literal) and symbol in _MIRRORED:
        return Comparison(text, _MIRRORED[symbol], right, left)
    return Comparison(text, symbol, left, right)


def _read_items(node: ast.Tuple | ast.List, text: str) -> Expression:
    return Items(text, tuple(map(_read, node.elts)))


_READERS: dict[type, Callable[[Any, str], Expression | None]] = {
    ast.Constant: _read_constant,
    ast.Name: _read_name,
    ast.Attribute: _read_attribute,
    ast.Subscript: _read_index,
    ast.BinOp: _read_binary,
    ast.UnaryOp: _read_unary,
    ast.BoolOp: _read_boolean,
    ast.Compare: _read_comparison,
    ast.Tuple: _read_items,
    ast.List: _read_items,
}
