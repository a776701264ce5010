"""A parser of YAML text to nodes with line and column.

It supports the part of YAML that a manifest needs: one document, text keys, no anchors, aliases or tags. A plain scalar
is null, true, false,
a decimal number or text: `no` is text here, and `2e-3` a number.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Node:
    """A value and its place: a tuple of nodes, a dict of nodes by key, or a scalar. keys: the places of a dict's
    keys."""

    mark: Mark
    value: Any
    keys: Mapping[str, Mark] = field(default_factory=dict)

    @property
    def is_list(self) -> bool:
        return isinstance(self.value, tuple)

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.value, dict)

    @property
    def items(self) -> tuple["Node", ...]:
        """The nodes of a list, or a single node as a list of one."""
        return self.value if self.is_list else (self,)

    def get(self, key: str) -> "Node | None":
        """Return the node of a key; None if it is absent or null, or if this is not a mapping."""
        node = self.value.get(key) if self.is_mapping else None
        return None if node is None or node.value is None else node

    def place(self, key: str) -> Mark:
        """Return the place of a key; the mapping's own if the key is absent."""
        return self.keys.get(key, self.mark)

    def plain(self) -> Any:
        """Return the value as plain data."""
        if self.is_mapping:
            return {key: node.plain() for key, node in self.value.items()}
        return [node.plain() for node in self.value] if self.is_list else self.value


@dataclass(frozen=True)
class Document:
    """A parsed file: its root (None if it is empty) and the problems of its YAML."""

    file: str
    root: Node | None
    problems: tuple


def read_document(path: Path) -> Document:
    """Parse a file; an unreadable file is a problem of the document."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        problems = Problems()
        problems.add(Mark(str(path), 1, 1), f"cannot be read: {error.strerror or error}")
        return Document(str(path), None, tuple(problems.entries))
    return parsed(data, str(path))


def parse(source: str | bytes, file: str) -> Document:
    """Parse a text. Errors in the text are problems of the document and never raised.

    Raises MissingExtraError if PyYAML is not installed.
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
    return Document(file, root, tuple(problems.entries))


parsed = lru_cache(maxsize=16)(parse)  # a manifest is read before its kernels are imported, and with them


def _build(text: str, file: str, problems: Problems) -> Node | None:
    """Return the root of a text. It is parsed by libyaml if PyYAML has it (ten times faster), and by PyYAML itself for
    errors, so that their words and places are the same everywhere."""
    yaml = library("yaml")
    quick = Problems()
    try:
        root = _Builder(yaml, file, quick).build(text, getattr(yaml, _QUICK_LOADER, yaml.SafeLoader))
    except (yaml.YAMLError, UnicodeError):
        return _Builder(yaml, file, problems).build(text, yaml.SafeLoader)
    problems.entries.extend(quick.entries)
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
    """A builder of nodes from YAML's events. It does not recurse, because a text of brackets alone would overflow the
    stack."""

    def __init__(self, yaml: ModuleType, file: str, problems: Problems) -> None:
        self.yaml = yaml
        self.file = file
        self.problems = problems
        self.open: list[tuple[bool, Mark, list[Node]]] = []  # whether it is a mapping, its beginning, its contents
        self.documents: list[Node] = []
        self.skipping = 0

    def build(self, text: str, loader: type) -> Node | None:
        """Return the root of the first document. Raises YAMLError."""
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
            self._put(Node(mark, _value(event)))
        elif isinstance(event, yaml.AliasEvent):
            self._put(Node(mark, None))
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
        if len(self.open) < MAX_DEPTH:
            self.open.append((isinstance(event, self.yaml.MappingStartEvent), mark, []))
            return
        if not self.skipping:
            self.problems.add(mark, f"nested deeper than {MAX_DEPTH} levels")
            self._put(Node(mark, None))
        self.skipping += 1

    def _close(self) -> None:
        if self.skipping:
            self.skipping -= 1
            return
        is_mapping, mark, items = self.open.pop()
        self._put(self._mapping(mark, items) if is_mapping else Node(mark, tuple(items)))

    def _put(self, node: Node) -> None:
        if not self.skipping:
            (self.open[-1][2] if self.open else self.documents).append(node)

    def _mapping(self, mark: Mark, items: list[Node]) -> Node:
        nodes: dict[str, Node] = {}
        keys: dict[str, Mark] = {}
        for key, node in zip(items[::2], items[1::2], strict=False):
            name = key.value if isinstance(key.value, str) else str(key.value)
            if key.is_list or key.is_mapping:
                self.problems.add(key.mark, "a key must be text")
            elif name in keys:
                self.problems.add(key.mark, f"duplicate key {name!r} (first at line {keys[name].line})")
            else:
                nodes[name], keys[name] = node, key.mark
        return Node(mark, nodes, keys)


def _value(event: Any) -> str | int | float | bool | None:
    text = event.value
    if event.style or not event.implicit[0]:  # quoted; a plain one has the style None or ''
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def from_python(value: Any, mark: Mark) -> Node:
    """Convert Python data to nodes that all have one mark: the place of the call that passed it."""
    if isinstance(value, Mapping):
        nodes = {str(key): from_python(item, mark) for key, item in value.items()}
        return Node(mark, nodes, dict.fromkeys(nodes, mark))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return Node(mark, tuple(from_python(item, mark) for item in value))
    return Node(mark, value)


def texts(value: Any) -> Iterator[str]:
    """Yield the strings in plain data of a manifest, which include the names of its functions."""
    if isinstance(value, str):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from texts(each)
