"""Reading typed values out of nodes: each reader gives a value, or reports what is wrong and gives None."""

import math
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from forge.hub.manifest.errors import Mark, Problems, did_you_mean
from forge.hub.manifest.parse import ListNode, MappingNode, Node, ScalarNode, to_python
from forge.support.dtypes import show

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def shown(node: Node) -> str:
    """A node as an error shows it."""
    if isinstance(node, ScalarNode):
        if node.value is None or isinstance(node.value, bool):
            return {None: "null", True: "true", False: "false"}[node.value]
        return _short(show(node.value))
    return "a list" if isinstance(node, ListNode) else "a mapping"


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def is_null(node: Node | None) -> bool:
    """Whether a key is left out, or null."""
    return node is None or (isinstance(node, ScalarNode) and node.value is None)


@dataclass(frozen=True)
class Fields:
    """The keys of a mapping; `where` names it in errors."""

    node: MappingNode
    where: str
    by_name: dict[str, Node]

    @property
    def mark(self) -> Mark:
        return self.node.mark

    def get(self, name: str) -> Node | None:
        """The node of a key, None when it is left out or null."""
        node = self.by_name.get(name)
        return None if is_null(node) else node

    def mark_of(self, name: str) -> Mark:
        """The place of a key."""
        return next((mark for key, mark, _ in self.node.items if key == name), self.mark)


class Reader:
    """Readers of typed values, which report to `problems`."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems

    def no(self, node: Node, what: str, wanted: str) -> None:
        """Reports a value of a wrong type."""
        self.problems.add(node.mark, f"{what} is {shown(node)}, but must be {wanted}")

    def fields(
        self,
        node: Node,
        where: str,
        known: Collection[str],
        *,
        required: Collection[str] = (),
        ignored: Collection[str] = (),
        hint: str = "",
    ) -> Fields | None:
        """The keys of a mapping; unknown ones, and required ones that are not there, are reported."""
        if not isinstance(node, MappingNode):
            self.no(node, where, f"a mapping with the keys {', '.join(known)}")
            return None
        misspelt = []
        for name, mark, _ in node.items:
            if name not in known and name not in ignored:
                near = did_you_mean(name, known)
                misspelt.append(near)
                self.problems.add(mark, f"unknown key {name!r} in {where}{near or hint or _known(known)}")
        by_name = {name: item for name, _, item in node.items if name in known}
        for name in required:
            if is_null(by_name.get(name)) and not any(repr(name) in near for near in misspelt):
                self.problems.add(node.mark, f"{where} has no {name!r}")
        return Fields(node, where, by_name)

    def text(self, node: Node | None, what: str) -> str | None:
        """A text that is not empty."""
        if node is None:
            return None
        if isinstance(node, ScalarNode) and isinstance(node.value, str) and node.value.strip():
            return node.value
        plain = isinstance(node, ScalarNode) and not isinstance(node.value, str) and node.value is not None
        self.no(node, what, "text; put it in quotes" if plain else "text")
        return None

    def matching(self, node: Node | None, what: str, form: re.Pattern, wanted: str) -> str | None:
        """A text of a form."""
        text = self.text(node, what)
        if text is not None and not form.fullmatch(text):
            self.no(node, what, wanted)
            return None
        return text

    def integer(self, node: Node | None, what: str, *, minimum: int | None = None) -> int | None:
        """A whole number."""
        if node is None:
            return None
        value = node.value if isinstance(node, ScalarNode) else None
        wanted = "a whole number" if minimum is None else f"a whole number of at least {minimum}"
        if type(value) is not int or (minimum is not None and value < minimum):
            self.no(node, what, wanted)
            return None
        return value

    def number(self, node: Node, what: str) -> float | None:
        """A finite number that is not negative."""
        value = node.value if isinstance(node, ScalarNode) else None
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            self.no(node, what, "a number of at least 0")
            return None
        return float(value)

    def boolean(self, node: Node | None, what: str) -> bool:
        """true or false; false when left out."""
        if node is None:
            return False
        value = node.value if isinstance(node, ScalarNode) else None
        if not isinstance(value, bool):
            self.no(node, what, "true or false")
            return False
        return value

    def items(self, node: Node | None, what: str, wanted: str) -> tuple[Node, ...]:
        """The items of a list."""
        if node is None:
            return ()
        if not isinstance(node, ListNode):
            self.no(node, what, wanted)
            return ()
        return node.items

    def one_or_more(self, node: Node | None) -> tuple[Node, ...]:
        """The items of a list, or the one value that stands in its place."""
        if node is None:
            return ()
        return node.items if isinstance(node, ListNode) else (node,)

    def texts(self, node: Node | None, what: str) -> tuple[str, ...]:
        """A list of texts, or one text."""
        found = [self.text(item, what) for item in self.one_or_more(node)]
        return tuple(text for text in found if text is not None)

    def pairs(self, node: Node | None, what: str, wanted: str) -> Iterator[tuple[str, Mark, Node]]:
        """The keys of a mapping whose keys are free."""
        if node is None:
            return
        if not isinstance(node, MappingNode):
            self.no(node, what, wanted)
            return
        yield from node.items

    def converted(self, node: Node, convert: Callable[[str], Any], text: str, errors: type[Exception]) -> Any:
        """convert(text); its error is reported at the node."""
        try:
            return convert(text)
        except errors as error:
            self.problems.add(node.mark, str(error))
            return None


def constant(node: Node) -> Any:
    """The plain data of a node."""
    return to_python(node)


def _known(known: Collection[str]) -> str:
    return f"; known: {', '.join(known)}"
