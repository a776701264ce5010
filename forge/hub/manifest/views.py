"""Views in a manifest: `query.transpose(1, 2)` in `args`, `result[0].transpose(1, 2)` in `result`; read by `ast` and
never run as Python."""

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from forge.hub.manifest.errors import InvalidText
from forge.hub.manifest.model import Argument

RESULT = "result"  # the name of a kernel's return value

_MAX_LENGTH = 200
_METHODS: dict[str, Callable[[tuple], bool]] = {
    "transpose": lambda args: _numbers(args, 2),
    "permute": lambda args: _numbers(args, len(args)) and len(set(args)) == len(args) > 0,
    "squeeze": lambda args: _numbers(args, 1),
    "unsqueeze": lambda args: _numbers(args, 1),
    "flatten": lambda args: _numbers(args, 2),
    "contiguous": lambda args: not args,
    "view_as": lambda args: len(args) == 1 and isinstance(args[0], str),
}
FORMS = (
    "a name, of a list [i], and then transpose(i, j), permute(i, …), squeeze(i), unsqueeze(i), flatten(i, j), "
    "contiguous() or view_as(argument)"
)


class NotAView(InvalidText):
    """The error for a text that is none of FORMS."""


@dataclass(frozen=True)
class View(Argument):
    """A view of an argument, or of a kernel's return value (`result`). index: the position in a list of tensors. steps:
    tensor methods with their arguments; a string is the name of an operator's argument."""

    index: int | None = None
    steps: tuple[tuple[str, tuple], ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """The arguments that its steps use."""
        return frozenset(each for _, args in self.steps for each in args if isinstance(each, str))

    def of(self, value: Any, arguments: Mapping[str, torch.Tensor]) -> Any:
        """Return the view of a value; `arguments` are tensors by name. None stays None.

        Raises TypeError if the value is not a tensor, IndexError for an index out of range.
        """
        if value is None:
            return None
        if self.index is not None:
            if not isinstance(value, (tuple, list)):
                raise TypeError(f"{self.name}[{self.index}]: {self.name} is {type(value).__name__}, no list or tuple")
            value = value[self.index]
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{self.name} is {type(value).__name__}, but must be a tensor; a list's is {self.name}[i]")
        for method, args in self.steps:
            value = getattr(value, method)(*(arguments[each] if isinstance(each, str) else each for each in args))
        return value


def parse_view(text: str) -> Argument:
    """Parse an argument's name, or a view of it. Raises NotAView."""
    try:
        return _read(ast.parse(text.strip(), mode="eval").body) if len(text) <= _MAX_LENGTH else _no(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return _no(text)


def _read(node: ast.expr) -> Argument:
    match node:
        case ast.Name(name):
            return Argument(name)
        case ast.Subscript(ast.Name(name), ast.Constant(index)) if type(index) is int and index < 64:
            return View(name, index)
        case ast.Call(ast.Attribute(base, method), args, []):
            view, values = _read(base), tuple(each.id if isinstance(each, ast.Name) else _number(each) for each in args)
            if method in _METHODS and _METHODS[method](values):
                return View(view.name, view.index, (*getattr(view, "steps", ()), (method, values)))
    raise NotAView


def _number(node: ast.expr) -> int | None:
    match node:
        case ast.Constant(int(value)) if type(value) is int and value < 64:
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(int(value))) if type(value) is int and value < 64:
            return -value
    return None


def _numbers(args: tuple, count: int) -> bool:
    return len(args) == count and all(type(each) is int for each in args)


def _no(text: str) -> Argument:
    raise NotAView(f"{text!r} is no view, which is {FORMS}")
