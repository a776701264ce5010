"""YAML text as nodes that know their line and column.

Only what a manifest needs: one document, text keys, no anchors, aliases or tags. A plain scalar is null, true, false,
a decimal number or text: `no` is text here, and `2e-3` a number.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from forge.hub.compat import library
from forge.hub.manifest.errors import Mark, Problems

MAX_BYTES = 1 << 20
MAX_DEPTH = 32

_INTEGER = re.compile(r"[-+]?\d{1,18}")
_FLOAT = re.compile(r"[-+]?(\d{1,40}\.\d{0,40}|\.\d{1,40}|\d{1,40}(?=[eE]))([eE][-+]?\d{1,3})?")
_WORDS: dict[str, Any] = {"": None, "~": None, "null": None, "true": True, "false": False}

_QUICK_LOADER = "CSafeLoader"

ScalarValue = str | int | float | bool | None


@dataclass(frozen=True)
class ScalarNode:
    """One value: text, a number, true, false or null."""

    mark: Mark
    value: Any


@dataclass(frozen=True)
class ListNode:
    """A list of nodes."""

    mark: Mark
    items: tuple["Node", ...]


@dataclass(frozen=True)
class MappingNode:
    """Keys with their marks, and their nodes; a key occurs once."""

    mark: Mark
    items: tuple[tuple[str, Mark, "Node"], ...]


Node = ScalarNode | ListNode | MappingNode


@dataclass(frozen=True)
class Document:
    """A parsed file: its root (None when there is none) and what was wrong with its YAML."""

    file: str
    root: Node | None
    problems: tuple


def read_document(path: Path) -> Document:
    """The document in a file; a file that cannot be read is a problem of the document."""
    problems = Problems()
    start = Mark(str(path), 1, 1)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        return parsed(data, str(path))
    except OSError as error:
        problems.add(start, f"cannot be read: {error.strerror or error}")
    return Document(str(path), None, tuple(problems.found))


def parse(source: str | bytes, file: str) -> Document:
    """The document in a text. Never raises for its contents: the problems are in the document.

    Raises MissingExtraError where PyYAML is not installed.
    """
    yaml = library("yaml")
    problems = Problems()
    text = _decode(source, file, problems)
    root = None
    if text is not None:
        try:
            root = _build(text, file, problems)
        except yaml.MarkedYAMLError as error:
            problems.add(*_syntax_problem(error, file))
        except yaml.reader.ReaderError as error:
            problems.add(_mark_at(file, text, error.position), f"not YAML: {error.reason}")
    return Document(file, root, tuple(problems.found))


parsed = lru_cache(maxsize=16)(parse)  # a manifest is read before its kernels are imported, and with them


def _build(text: str, file: str, problems: Problems) -> Node | None:
    """The root of a text: by libyaml where PyYAML has it (ten times faster); by PyYAML itself for its errors, whose
    words and places are then the same everywhere.
    """
    yaml = library("yaml")
    quick = Problems()
    try:
        root = _Builder(yaml, file, quick).build(text, getattr(yaml, _QUICK_LOADER, yaml.SafeLoader))
    except (yaml.YAMLError, UnicodeError):
        return _Builder(yaml, file, problems).build(text, yaml.SafeLoader)
    problems.found.extend(quick.found)
    return root


def _decode(source: str | bytes, file: str, problems: Problems) -> str | None:
    if len(source) > MAX_BYTES:
        problems.add(Mark(file, 1, 1), f"the file has more than {MAX_BYTES} bytes, too many for a manifest")
        return None
    if isinstance(source, str):
        return source
    try:
        return source.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = source[: error.start].decode("utf-8", "replace")
        problems.add(_mark_at(file, before, len(before)), f"not UTF-8: {error.reason}")
        return None


def _mark_at(file: str, text: str, position: int) -> Mark:
    before = text[:position]
    return Mark(file, before.count("\n") + 1, position - (before.rfind("\n") + 1) + 1)


def _syntax_problem(error: Any, file: str) -> tuple[Mark, str]:
    at = error.problem_mark or error.context_mark
    mark = Mark(file, at.line + 1, at.column + 1) if at else Mark(file, 1, 1)
    context = ""
    if error.context and error.context_mark:
        context = f" ({error.context} that began at line {error.context_mark.line + 1})"
    return mark, f"not YAML: {error.problem or error.context}{context}"


class _Builder:
    """Makes nodes of YAML's events, without recursion."""

    def __init__(self, yaml: ModuleType, file: str, problems: Problems) -> None:
        self.yaml = yaml
        self.file = file
        self.problems = problems
        self.open: list[tuple[type, Mark, list[Node]]] = []
        self.documents: list[Node] = []
        self.skipping = 0

    def build(self, text: str, loader: type) -> Node | None:
        """The root of the first document. Raises YAMLError."""
        for event in self.yaml.parse(text, Loader=loader):
            self._take(event)
        for extra in self.documents[1:2]:
            self.problems.add(extra.mark, "a second document: a manifest is one")
        return self.documents[0] if self.documents else None

    def _take(self, event: Any) -> None:
        yaml = self.yaml
        mark = Mark(self.file, event.start_mark.line + 1, event.start_mark.column + 1)
        if isinstance(event, yaml.NodeEvent):
            self._refuse(event, mark)
        if isinstance(event, yaml.ScalarEvent):
            self._put(ScalarNode(mark, _value(event)))
        elif isinstance(event, yaml.AliasEvent):
            self._put(ScalarNode(mark, None))
        elif isinstance(event, yaml.CollectionStartEvent):
            self._open(event, mark)
        elif isinstance(event, yaml.CollectionEndEvent):
            self._close()

    def _refuse(self, event: Any, mark: Mark) -> None:
        if event.anchor is not None:
            self.problems.add(mark, "anchors and aliases (& and *) are not read here; write the value out, or quote it")
        tag = getattr(event, "tag", None)
        if tag is not None:
            self.problems.add(mark, f"the tag {tag!r} is not read here; leave it out, or quote the value")

    def _open(self, event: Any, mark: Mark) -> None:
        if len(self.open) >= MAX_DEPTH:
            if not self.skipping:
                self.problems.add(mark, f"nested deeper than {MAX_DEPTH} levels")
                self._put(ScalarNode(mark, None))
            self.skipping += 1
            return
        self.open.append((MappingNode if isinstance(event, self.yaml.MappingStartEvent) else ListNode, mark, []))

    def _close(self) -> None:
        if self.skipping:
            self.skipping -= 1
            return
        kind, mark, items = self.open.pop()
        self._put(ListNode(mark, tuple(items)) if kind is ListNode else self._mapping(mark, items))

    def _put(self, node: Node) -> None:
        if self.skipping:
            return
        (self.open[-1][2] if self.open else self.documents).append(node)

    def _mapping(self, mark: Mark, items: list[Node]) -> MappingNode:
        found: dict[str, tuple[Mark, Node]] = {}
        for key, node in zip(items[::2], items[1::2], strict=False):
            if not isinstance(key, ScalarNode):
                self.problems.add(key.mark, "a key must be text")
                continue
            name = key.value if isinstance(key.value, str) else str(key.value)
            if name in found:
                self.problems.add(key.mark, f"duplicate key {name!r} (first at line {found[name][0].line})")
            else:
                found[name] = (key.mark, node)
        return MappingNode(mark, tuple((name, at, node) for name, (at, node) in found.items()))


def _value(event: Any) -> ScalarValue:
    text = event.value
    if event.style or not event.implicit[0]:  # quoted; a plain one has the style None or ''
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def from_python(value: Any, mark: Mark) -> Node:
    """Python data as nodes that all have one mark: the place of the call that gave it."""
    if isinstance(value, Mapping):
        return MappingNode(mark, tuple((str(key), mark, from_python(item, mark)) for key, item in value.items()))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ListNode(mark, tuple(from_python(item, mark) for item in value))
    return ScalarNode(mark, value)


def to_python(node: Node) -> Any:
    """Nodes as plain data."""
    if isinstance(node, ScalarNode):
        return node.value
    if isinstance(node, ListNode):
        return [to_python(item) for item in node.items]
    return {name: to_python(item) for name, _, item in node.items}
