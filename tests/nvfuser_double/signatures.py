"""Calls checked like pybind's: each overload's names, number and kinds of arguments, read from signatures.txt."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nvfuser_double.values import DataType, TensorView, Val

_MISSING = object()
_LITERALS = {"None": None, "True": True, "False": False, "[]": []}


class Parameter(NamedTuple):
    """A parameter of an overload; one named argN is positional."""

    name: str
    kind: str
    default: Any
    keyword_only: bool

    @property
    def by_place(self) -> bool:
        return not self.keyword_only

    @property
    def by_name(self) -> bool:
        return re.fullmatch(r"arg\d+", self.name) is None


class Overload(NamedTuple):
    """A signature of an operator."""

    text: str
    parameters: tuple[Parameter, ...]

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Return the arguments by name, defaults included; None if they do not fit."""
        places = [parameter for parameter in self.parameters if parameter.by_place]
        names = {parameter.name for parameter in self.parameters if parameter.by_name}
        if len(args) > len(places) or not names.issuperset(kwargs):
            return None
        given = {parameter.name: value for parameter, value in zip(places, args, strict=False)}
        if not given.keys().isdisjoint(kwargs):
            return None
        given |= kwargs
        bound = {each.name: given.get(each.name, each.default) for each in self.parameters}
        fits = all(
            (each.name not in given and each.default is not _MISSING) or _is(bound[each.name], each.kind)
            for each in self.parameters
        )
        return bound if fits else None


def _is(value: Any, kind: str) -> bool:
    if kind.startswith("Sequence["):
        inside = kind.removeprefix("Sequence[").removesuffix("]")
        return isinstance(value, (list, tuple)) and all(_is(each, inside) for each in value)
    if " | " in kind:
        return any(_is(value, each) for each in kind.split(" | "))
    if kind in ("list", "tuple"):
        return type(value).__name__ == kind and all(_is(each, "SupportsInt | Val") for each in value)
    if kind == "SupportsInt":
        return isinstance(value, int) and not isinstance(value, bool)
    return value is not _MISSING and isinstance(value, _TYPES[kind])


_TYPES = {
    "TensorView": TensorView,
    "Val": Val,
    "Scalar": (Val, bool, int, float, complex),
    "PyScalar": (bool, int, float, complex),
    "DataType": DataType,
    "bool": bool,
    "None": type(None),
}


class Signature:
    """An operator's name and overloads."""

    def __init__(self, name: str, overloads: Sequence[Overload]) -> None:
        self.name = name
        self.overloads = overloads

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments by name. Raises TypeError if no overload accepts them."""
        for overload in self.overloads:
            bound = overload.bind(args, kwargs)
            if bound is not None:
                return bound
        known = "\n".join(f"    {i}. {each.text}" for i, each in enumerate(self.overloads, 1))
        raise TypeError(
            f"{self.name}(): incompatible function arguments. The following argument types are supported:\n{known}\n\n"
            f"Invoked with: {args}; kwargs: {kwargs}"
        )


def _read() -> dict[str, Signature]:
    found: dict[str, Signature] = {}
    names: list[str] = []
    overloads: list[Overload] = []
    for line in Path(__file__).with_name("signatures.txt").read_text().splitlines():
        if line.startswith("    "):
            overloads.append(_parse(line.strip()))
        elif line and not line.startswith("#"):
            if overloads:
                names, overloads = [], []
            names += line.split()
            continue
        found |= {name: Signature(name, overloads) for name in names}
    return found


def _parse(text: str) -> Overload:
    inside = re.match(r"\((.*)\) -> ", text).group(1)
    parameters, keyword_only = [], False
    for part in re.split(r", (?=\w+: |\*)", inside):
        if part == "*":
            keyword_only = True
            continue
        name, kind = part.split(": ", 1)
        kind, _, default = kind.partition(" = ")
        parameters.append(Parameter(name, kind, _default(default), keyword_only))
    return Overload(text, tuple(parameters))


def _default(text: str) -> Any:
    if not text:
        return _MISSING
    if text in _LITERALS:
        return _LITERALS[text]
    return getattr(DataType, text, None) or int(text)


SIGNATURES = _read()
