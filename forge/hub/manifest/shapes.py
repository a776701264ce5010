"""Shape patterns: `[..., H]`, `[B, S, 2*D]`, `[_, 4]`. A named dim has one length in a call."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forge.hub.manifest.errors import InvalidText
from forge.hub.manifest.where import UnknownValue, is_true
from forge.ir import Dim

_ITEM = re.compile(r"(?:(\d{1,18})\s*\*\s*)?([A-Za-z][A-Za-z0-9_]*)|(\d{1,18})|_")


class NotAPattern(InvalidText):
    """The error for a text that is not a shape pattern."""


@dataclass(frozen=True)
class DimPattern:
    """A dim of a pattern: `times` * the length called `name`; exactly `length`; or any length."""

    name: str | None = None
    times: int = 1
    length: int | None = None

    @property
    def any(self) -> bool:
        """True if it matches any length."""
        return self.name is None and self.length is None

    def of(self, bound: Mapping[str, Dim]) -> Dim:
        """Return the length, given the lengths of the named dims."""
        if self.name is not None:
            return self.times * bound[self.name]
        assert self.length is not None, "what a forward saves has no dim of any length"
        return self.length

    def __str__(self) -> str:
        if self.name is None:
            return "_" if self.length is None else str(self.length)
        return self.name if self.times == 1 else f"{self.times}*{self.name}"


@dataclass(frozen=True)
class ShapePattern:
    """A pattern: the dims before `...` and, if it is present, after it; `rest` is None without one."""

    first: tuple[DimPattern, ...]
    rest: tuple[DimPattern, ...] | None = None

    def __str__(self) -> str:
        middle = [] if self.rest is None else ["..."]
        return f"[{', '.join(map(str, [*self.first, *middle, *(self.rest or ())]))}]"

    @property
    def names(self) -> tuple[str, ...]:
        """The named dims, in order."""
        dims = (*self.first, *(self.rest or ()))
        return tuple(dict.fromkeys(dim.name for dim in dims if dim.name is not None))

    def of(self, bound: Mapping[str, Dim], middle: Sequence[Dim]) -> tuple[Dim, ...]:
        """Return the shape, given the lengths of the named dims and, for `...`, `middle`."""
        first, rest = ([dim.of(bound) for dim in dims or ()] for dims in (self.first, self.rest))
        return (*first, *([] if self.rest is None else middle), *rest)

    def middle(self, shape: Sequence[Dim]) -> tuple[Dim, ...]:
        """Return the dims that `...` matches in a shape that fits."""
        return tuple(shape[len(self.first) : len(shape) - len(self.rest or ())])

    def mismatch(self, shape: Sequence[Dim], bound: dict[str, Any]) -> str | None:
        """Bind the named dims in `bound` and return None if the shape fits; otherwise return the reason in words."""
        count = len(self.first) + len(self.rest or ())
        if len(shape) < count or (self.rest is None and len(shape) != count):
            return self._no(shape)
        ends = zip((*self.first, *(self.rest or ())), self._ends(shape), strict=True)
        for dim, length in ends:
            problem = self._bind(dim, length, shape, bound)
            if problem is not None:
                return problem
        return None

    def _ends(self, shape: Sequence[Dim]) -> tuple[Dim, ...]:
        if self.rest is None:
            return tuple(shape)
        return (*shape[: len(self.first)], *shape[len(shape) - len(self.rest) :])

    def _bind(self, dim: DimPattern, length: Dim, shape: Sequence[Dim], bound: dict[str, Any]) -> str | None:
        try:
            if dim.name is None:
                return None if dim.length is None or is_true(length == dim.length) else self._no(shape)
            if dim.name in bound:
                fits = is_true(length == dim.times * bound[dim.name])
                return None if fits else f"{self._no(shape)}, for {dim.name} is {bound[dim.name]} here"
            if dim.times != 1 and not is_true(length % dim.times == 0):
                return self._no(shape)
            bound[dim.name] = length if dim.times == 1 else length // dim.times
        except UnknownValue:
            return f"shape {_show(shape)} is not known to fit {self}"
        return None

    def _no(self, shape: Sequence[Dim]) -> str:
        return f"shape {_show(shape)} does not fit {self}"


def _show(shape: Sequence[Dim]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def parse_shape(text: str) -> ShapePattern:
    """Parse the pattern in a text. Raises NotAPattern."""
    inner = text.strip()
    if not (inner.startswith("[") and inner.endswith("]")):
        raise NotAPattern(f'shape {text!r} is no pattern; write it as "[..., H]"')
    items = [item.strip() for item in inner[1:-1].split(",")]
    return make_shape([] if items == [""] else items)


def make_shape(items: Sequence[str]) -> ShapePattern:
    """Make the pattern of these dims. Raises NotAPattern."""
    text = f"[{', '.join(items)}]"
    if items.count("...") > 1:
        raise NotAPattern(f"shape {text} has more than one '...'")
    middle = items.index("...") if "..." in items else len(items)
    first, rest = (tuple(_dim(item, text) for item in part) for part in (items[:middle], items[middle + 1 :]))
    return ShapePattern(first, rest if middle < len(items) else None)


def _dim(item: str, text: str) -> DimPattern:
    match = _ITEM.fullmatch(item)
    if match is None or match[1] == "0":
        raise NotAPattern(
            f"shape {text}: {item!r} is no dim; a dim is a name, a length, a name times a number, _ or ..."
        )
    if match[2] is not None:
        return DimPattern(name=match[2], times=int(match[1] or 1))
    return DimPattern(length=int(match[3])) if match[3] is not None else DimPattern()
