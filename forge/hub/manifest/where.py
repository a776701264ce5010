"""The `where` expressions of a manifest: a small grammar, parsed by `ast` and never run as Python.

    H % 8 == 0      eps is not None      2 <= width <= 4      approximate in ("none", "tanh")
    input.ndim == 3 and not causal       normalized_shape == [H]

Values: numbers, text, True, False, None, dtypes; an operator's arguments; the named dims of its shapes; a tensor's
`ndim`, `dtype`, `numel` and `shape[i]`. Operators: + - * / // % == != < <= > >= is in and or not.
A failing expression says why in words: `H = 100 is not a multiple of 8`.
"""

import ast
import copy
import operator
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from forge.hub.manifest.errors import InvalidText, did_you_mean
from forge.ir.proxies import plain
from forge.support.dtypes import find_dtype, is_tensor, show

MAX_LENGTH = 200
TENSOR_ATTRIBUTES = ("dtype", "ndim", "numel", "shape")

Env = Mapping[str, Any]


class InvalidExpression(InvalidText):
    """The error for an expression outside the grammar, or with an unknown name."""


class UnknownValue(Exception):
    """The error for an expression whose value is not known, or does not exist, for these arguments."""


# equality and truth that put no guard on a symbolic size


def is_true(condition: Any) -> bool:
    """Return the truth of a condition. Raises UnknownValue if it depends on a symbolic size."""
    if condition is True or condition is False:
        return condition
    if isinstance(condition, torch.SymBool):
        if statically_known_true(condition):
            return True
        if statically_known_true(torch.sym_not(condition)):
            return False
        raise UnknownValue(f"{condition} is not known before the program runs")
    if is_tensor(condition):
        raise UnknownValue("a tensor's value is not known before the program runs")
    return bool(condition)


def same(a: Any, b: Any) -> bool:
    """Return a == b; lists and tuples compare equal; nothing equals a tensor. Raises UnknownValue like is_true."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if is_tensor(a) or is_tensor(b):
        return a is b
    return is_true(plain(a) == plain(b))


# operators


def _contains(item: Any, items: Any) -> bool:
    if isinstance(items, str) and isinstance(item, str):
        return item in items
    if not isinstance(items, (tuple, list)):
        raise TypeError
    return any(same(item, other) for other in items)


class _Comparison(NamedTuple):
    """A comparison; `words` state that it holds, `mirrored` is the comparison with its sides swapped."""

    holds: Callable[[Any, Any], bool]
    words: str
    opposite: type[ast.cmpop]
    mirrored: type[ast.cmpop] | None = None


_ARITHMETIC: dict[type[ast.operator], Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], _Comparison] = {
    ast.Eq: _Comparison(same, "is", ast.NotEq, ast.Eq),
    ast.NotEq: _Comparison(lambda a, b: not same(a, b), "is not", ast.Eq, ast.NotEq),
    ast.Lt: _Comparison(lambda a, b: is_true(a < b), "is less than", ast.GtE, ast.Gt),
    ast.LtE: _Comparison(lambda a, b: is_true(a <= b), "is at most", ast.Gt, ast.GtE),
    ast.Gt: _Comparison(lambda a, b: is_true(a > b), "is greater than", ast.LtE, ast.Lt),
    ast.GtE: _Comparison(lambda a, b: is_true(a >= b), "is at least", ast.Lt, ast.LtE),
    ast.Is: _Comparison(operator.is_, "is", ast.IsNot),
    ast.IsNot: _Comparison(operator.is_not, "is not", ast.Is),
    ast.In: _Comparison(_contains, "is in", ast.NotIn),
    ast.NotIn: _Comparison(lambda a, b: not _contains(a, b), "is not in", ast.In),
}


# values


def evaluate(node: ast.expr, env: Env) -> Any:
    """Return the value of an expression of the grammar. Raises UnknownValue if it has none."""
    return _VALUES[type(node)](node, env)


def _name(node: ast.Name, env: Env) -> Any:
    if node.id not in env:
        raise UnknownValue(f"{node.id} has no value here")
    return plain(env[node.id])


def _attribute(node: ast.Attribute, env: Env) -> Any:
    tensor = evaluate(node.value, env)
    if not is_tensor(tensor):
        raise UnknownValue(f"{_unparse(node.value)} is {'None' if tensor is None else 'no tensor'}")
    return tensor.numel() if node.attr == "numel" else getattr(tensor, node.attr)


def _item(node: ast.Subscript, env: Env) -> Any:
    items, index = evaluate(node.value, env), evaluate(node.slice, env)
    if not isinstance(items, (tuple, list)):
        raise UnknownValue(f"{_show(node.value, env)} has no items")
    if not -len(items) <= index < len(items):
        raise UnknownValue(f"{_show(node.value, env)} has no item {index}")
    return plain(items[index])


def _number(node: ast.expr, env: Env) -> Any:
    value = evaluate(node, env)
    if not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise UnknownValue(f"{_show(node, env)} is no number")
    return value


def _arithmetic(node: ast.BinOp, env: Env) -> Any:
    left, right = _number(node.left, env), _number(node.right, env)
    try:
        return _ARITHMETIC[type(node.op)](left, right)
    except (ZeroDivisionError, OverflowError, TypeError) as error:
        raise UnknownValue(f"{error} in {_unparse(node)}") from None


def _comparison(node: ast.Compare, env: Env) -> bool:
    left, right = node.left, node.comparators[0]
    try:
        return _COMPARISONS[type(node.ops[0])].holds(evaluate(left, env), evaluate(right, env))
    except TypeError:
        raise UnknownValue(f"{_show(left, env)} cannot be compared with {_show(right, env)}") from None


def _unary(node: ast.UnaryOp, env: Env) -> Any:
    return not is_true(evaluate(node.operand, env)) if isinstance(node.op, ast.Not) else -_number(node.operand, env)


def _boolean(node: ast.BoolOp, env: Env) -> bool:
    decides = isinstance(node.op, ast.Or)
    for each in node.values:
        if is_true(evaluate(each, env)) is decides:
            return decides
    return not decides


_VALUES: dict[type[ast.expr], Callable[[Any, Env], Any]] = {
    ast.Constant: lambda node, env: node.value,
    ast.Name: _name,
    ast.Attribute: _attribute,
    ast.Subscript: _item,
    ast.Tuple: lambda node, env: tuple(evaluate(each, env) for each in node.elts),
    ast.BinOp: _arithmetic,
    ast.UnaryOp: _unary,
    ast.Compare: _comparison,
    ast.BoolOp: _boolean,
}


# reasons


def _reason(node: ast.expr, env: Env, *, negated: bool = False) -> str:
    """Return the reason why a condition is false; negated: why it is true."""
    match node:
        case ast.UnaryOp(op=ast.Not()):
            return _reason(node.operand, env, negated=not negated)
        case ast.BoolOp():
            parts = node.values
            if isinstance(node.op, ast.And) != negated:  # one false operand decides
                parts = [next(each for each in parts if is_true(evaluate(each, env)) == negated)]
            return " and ".join(_reason(each, env, negated=negated) for each in parts)
        case ast.Compare():
            return _reason_of_comparison(node, env, negated)
        case ast.Name():
            return f"{node.id} is {show(evaluate(node, env))}"
    return _show(node, env) if negated else f"{_show(node, env)} is false"


def _reason_of_comparison(node: ast.Compare, env: Env, negated: bool) -> str:
    left, right = node.left, node.comparators[0]
    match node:
        case ast.Compare(ast.BinOp(dividend, ast.Mod(), divisor), [ast.Eq()], [ast.Constant(int(0))]):
            verb = "is a multiple of" if negated else "is not a multiple of"
            return f"{_show(dividend, env)} {verb} {_show(divisor, env)}"
    value = evaluate(left, env)
    if isinstance(node.ops[0], (ast.Is, ast.IsNot)) and (value is None or is_tensor(value)):
        return f"{_unparse(left)} is {'None' if value is None else 'not None'}"
    kind = type(node.ops[0])
    words = _COMPARISONS[kind if negated else _COMPARISONS[kind].opposite].words
    return f"{_show(left, env)} {words} {_show(right, env)}"


def _show(node: ast.expr, env: Env) -> str:
    """Return 'H = 100', or a literal unchanged."""
    value = show(evaluate(node, env))
    return value if isinstance(node, (ast.Constant, ast.Tuple)) else f"{_unparse(node)} = {value}"


@lru_cache(maxsize=4096)  # keyed by nodes, which are compared by identity
def _unparse(node: ast.AST) -> str:
    try:
        return ast.unparse(node)
    except (ValueError, RecursionError):  # a literal that Python does not write out
        return type(node).__name__


# reading


@dataclass(frozen=True)
class Where:
    """A condition on the arguments of a call.

    expression: normalized to the nodes that `evaluate` accepts: a dtype is a constant, a list a tuple, a chain of
    comparisons an `and`, and a constant side of a comparison is the right one.
    """

    text: str
    expression: ast.expr = field(compare=False, repr=False)
    key: str = field(default="where", compare=False, repr=False)

    def reason(self, env: Env) -> str | None:
        """Return the reason why it does not hold, or None if it holds."""
        try:
            return None if is_true(evaluate(self.expression, env)) else _reason(self.expression, env)
        except UnknownValue as error:
            return f"where {self.text!r}: {error}"

    def parts(self) -> Iterator["Where"]:
        """Yield the conditions of which it is the conjunction."""
        if isinstance(self.expression, ast.BoolOp) and isinstance(self.expression.op, ast.And):
            for operand in self.expression.values:
                yield from Where(_unparse(operand), operand).parts()
        else:
            yield self

    @property
    def names(self) -> frozenset[str]:
        """The arguments and dims that it uses."""
        return frozenset(part.id for part in ast.walk(self.expression) if isinstance(part, ast.Name))

    def rename(self, rename: Callable[[str], str]) -> "Where":
        """Return the condition with its arguments and dims renamed; its text is unchanged."""
        expression = copy.deepcopy(self.expression)
        for part in ast.walk(expression):
            if isinstance(part, ast.Name):
                part.id = rename(part.id)
        return replace(self, expression=expression)

    def name_problems(self, values: Collection[str], tensors: Collection[str]) -> Iterator[str]:
        """Yield the problems of its names: `values` are arguments and dims, `tensors` arguments that are tensors."""
        allowed = set()
        for part in ast.walk(self.expression):
            if isinstance(part, (ast.Attribute, ast.Subscript)):
                allowed.add(id(part.value))
            elif isinstance(part, ast.Compare) and isinstance(part.ops[0], (ast.Is, ast.IsNot)):
                allowed.add(id(part.left))
        for part in ast.walk(self.expression):
            if not isinstance(part, ast.Name) or part.id in values:
                continue
            subject = f"{self.key}: {part.id!r} in {self.text!r} is"
            if part.id not in tensors:
                yield f"{subject} neither an argument nor a named dim{did_you_mean(part.id, (*values, *tensors))}"
            elif id(part) not in allowed:
                attributes = ", ".join(f"{part.id}.{name}" for name in TENSOR_ATTRIBUTES)
                yield f"{subject} a tensor: compare it with None, or use {attributes}"


def parse_where(text: str, *, key: str = "where") -> Where:
    """Parse the condition of a key. Raises InvalidExpression naming the part outside of the grammar."""
    try:
        return Where(text.strip(), _parse(text), key)
    except InvalidExpression as error:
        raise InvalidExpression(f"{key}: {error}") from None


def _parse(text: str) -> ast.expr:
    if len(text) > MAX_LENGTH:
        raise InvalidExpression(f"an expression of {len(text)} characters is too long; {MAX_LENGTH} is the most")
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError, OverflowError) as error:
        problem = error.msg if isinstance(error, SyntaxError) else error
        raise InvalidExpression(f"{text!r} is not an expression: {problem}") from None
    return _normalize(tree.body)


def _normalize(node: ast.expr) -> ast.expr:
    """Return an expression of nodes that can be evaluated. Raises InvalidExpression for other nodes."""
    match node:
        case ast.Constant(None | bool() | int() | float() | str()):
            return node
        case ast.Name(name) | ast.Attribute(ast.Name("torch"), name) if (dtype := find_dtype(name)) is not None:
            return ast.Constant(dtype)  # type: ignore[arg-type]  # a dtype is a constant of this grammar
        case ast.Name(name):
            return ast.Name(name)  # a separate node: `name_problems` distinguishes the uses of a name
        case ast.Attribute(ast.Name(base), name) if base != "torch" and name in TENSOR_ATTRIBUTES:
            return node
        case ast.Subscript(base, item):
            base, index = _normalize(base), _index(item)
            if isinstance(base, (ast.Name, ast.Attribute)) and index is not None:
                return ast.Subscript(base, index)
        case ast.Tuple(items) | ast.List(items):
            return ast.Tuple([_normalize(item) for item in items], ast.Load())
        case ast.BinOp(left, op, right) if type(op) in _ARITHMETIC:
            return ast.BinOp(_normalize(left), op, _normalize(right))
        case ast.UnaryOp(ast.Not() | ast.USub() as op, operand):
            return ast.UnaryOp(op, _normalize(operand))
        case ast.BoolOp(op, operands):
            return ast.BoolOp(op, [_normalize(operand) for operand in operands])
        case ast.Compare(left, ops, rights):
            comparisons: list[ast.expr] = [_compare(*each) for each in zip([left, *rights], ops, rights, strict=False)]
            return comparisons[0] if len(comparisons) == 1 else ast.BoolOp(ast.And(), comparisons)
    there_are = "numbers, names, tensor.shape[0], arithmetic, comparisons, and, or, not"
    raise InvalidExpression(f"{_unparse(node)!r} is not an allowed expression; there are {there_are}")


def _index(node: ast.expr) -> ast.Constant | None:
    match node:
        case ast.Constant(value) if type(value) is int:
            return node
        case ast.UnaryOp(ast.USub(), ast.Constant(value)) if type(value) is int:
            return ast.Constant(-value)
    return None


def _compare(left: ast.expr, op: ast.cmpop, right: ast.expr) -> ast.Compare:
    """Return a comparison with its varying side on the left, which its reason is about."""
    is_singleton = isinstance(right, ast.Constant) and isinstance(right.value, (bool, type(None)))
    if isinstance(op, (ast.Is, ast.IsNot)) and not is_singleton:
        text = _unparse(ast.Compare(left, [op], [right]))
        raise InvalidExpression(f"{text!r} is not an allowed expression; `is` goes with None, True or False")
    left, right, mirrored = _normalize(left), _normalize(right), _COMPARISONS[type(op)].mirrored
    if isinstance(left, ast.Constant) and mirrored is not None:
        left, op, right = right, mirrored(), left
    return ast.Compare(left, [op], [right])
