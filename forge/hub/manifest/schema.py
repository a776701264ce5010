"""The keys of a manifest's sections, as fields of dataclasses, and the reader that walks nodes by them.

    @dataclass(frozen=True)
    class Library:
        name: str = key(text, default="", required=True)      # a reading: (reader, node, what) -> value
        priority: int = key(whole, default=0)

    reader.section(Library, node, "library")                  # reports unknown keys, wrong values, missing ones

A reading raises WrongKind with the expectation, or InvalidText with the problem; the reader adds the place.
"""

import dataclasses
import math
import os
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, TypeVar

from forge.hub.compat import library
from forge.hub.manifest.errors import InvalidText, Mark, Problems, did_you_mean
from forge.hub.manifest.parse import Node
from forge.support.dtypes import show

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
FORGE, EXECUTORCH = "forge", "executorch"  # the dialects: forge_kernels.yaml, and ExecuTorch's functions.yaml
BOTH = (FORGE, EXECUTORCH)

Section = TypeVar("Section")
# A reading takes the reader with the context it needs: of aliases, of one operator's kernels, of a whole manifest.
Reading = Callable[[Any, Node, str], Any]


class WrongKind(InvalidText):
    """The error for a value of the wrong kind; the message is the expected one."""


@dataclass(frozen=True)
class Key:
    """A key of a section. label: its name in errors, if different."""

    read: Reading
    required: bool
    dialects: tuple[str, ...]
    label: str | None


def key(
    read: Reading,
    *,
    default: Any = None,
    required: bool = False,
    dialects: tuple[str, ...] = (FORGE,),
    label: str | None = None,
) -> Any:
    """Return a dataclass field for a key of a manifest."""
    return dataclasses.field(default=default, metadata={"key": Key(read, required, dialects, label)})


@cache
def keys_of(section: type[Any], dialect: str = FORGE) -> dict[str, Key]:
    """Return the keys of a section, by name, in a dialect."""
    keys = {each.name: each.metadata.get("key") for each in dataclasses.fields(section)}
    return {name: each for name, each in keys.items() if each is not None and dialect in each.dialects}


def show_node(node: Node) -> str:
    """Return a node as an error shows it."""
    if node.is_list or node.is_mapping:
        return "a list" if node.is_list else "a mapping"
    if node.value is None or isinstance(node.value, bool):
        return {None: "null", True: "true", False: "false"}[node.value]
    text = show(node.value)
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True)
class Reader:
    """A reader of nodes that reports errors to `problems`. folder: the folder that must hold the sources of a
    manifest."""

    problems: Problems
    dialect: str = FORGE
    folder: Path | None = None

    def read(self, read: Reading, node: Node | None, what: str) -> Any:
        """Return the value of a node; None if it is absent, or wrong and reported."""
        if node is None:
            return None
        try:
            return read(self, node, what)
        except WrongKind as expectation:
            self.problems.add(node.mark, f"{what} is {show_node(node)}, but must be {expectation}")
        except InvalidText as error:
            self.problems.add(node.mark, str(error))
        return None

    def each(self, read: Reading, node: Node, what: str) -> tuple:
        """Return the valid values of a list, or of a single node."""
        values = [self.read(read, item, what) for item in node.items]
        return tuple(value for value in values if value is not None)

    def section(
        self,
        section: type[Section],
        node: Node,
        where: str,
        *,
        prefix: str = "",
        optional: Collection[str] = (),
        ignored: Collection[str] = (),
    ) -> Section:
        """Return the section with the values of its keys, and defaults; report all errors.

        prefix: the prefix of the keys' names in errors. optional: keys that are not required here.
        """
        kind: type = section
        keys = keys_of(kind, self.dialect)
        if not node.is_mapping:
            raise WrongKind(f"a mapping with the keys {', '.join(keys)}")
        unknown = [name for name in node.value if name not in (*keys, *ignored)]
        suggestions = "".join(self._report_unknown_key(kind, name, node, where) for name in unknown)
        values = {}
        for name, each in keys.items():
            value = self.read(each.read, node.get(name), each.label or prefix + name)
            if value is not None:
                values[name] = value
            if each.required and name not in optional and node.get(name) is None and repr(name) not in suggestions:
                self.problems.add(node.mark, f"{where} has no {name!r}")
        return section(**values)

    def _report_unknown_key(self, section: type, name: str, node: Node, where: str) -> str:
        """Report an unknown key; return the known names similar to it."""
        keys = keys_of(section, self.dialect)
        near = did_you_mean(name, keys)
        hint = f"; known: {', '.join(keys)}"
        if self.dialect != FORGE and node.value.keys() & (keys_of(section).keys() - keys.keys()):
            hint = "; begin the file with forge_kernels: 1 to use it"
        self.problems.add(node.place(name), f"unknown key {name!r} in {where}{near or hint}")
        return near


def pairs(node: Node | None, expectation: str) -> Iterator[tuple[str, Mark, Node]]:
    """Yield the keys, places and nodes of a mapping with arbitrary keys."""
    if node is None:
        return
    if not node.is_mapping:
        raise WrongKind(expectation)
    for name, mark in node.keys.items():
        yield name, mark, node.value[name]


# readings


def any_node(reader: Reader, node: Node, what: str) -> Node:
    """Return the node itself, to be read later because it depends on other keys."""
    return node


def text(reader: Reader, node: Node, what: str) -> str:
    """Return a nonempty string."""
    if isinstance(node.value, str) and node.value.strip():
        return node.value
    quoted = not (node.is_list or node.is_mapping or node.value is None or isinstance(node.value, str))
    raise WrongKind("text; put it in quotes" if quoted else "text")


def text_of_form(form: re.Pattern, expectation: str) -> Reading:
    """Return a reading of a string that matches a form."""

    def read(reader: Reader, node: Node, what: str) -> str:
        if not form.fullmatch(text(reader, node, what)):
            raise WrongKind(expectation)
        return node.value

    return read


def whole(reader: Reader, node: Node, what: str) -> int:
    """Return a whole number."""
    if type(node.value) is not int:
        raise WrongKind("a whole number")
    return node.value


def number(reader: Reader, node: Node, what: str) -> float:
    """Return a finite number that is not negative."""
    if type(node.value) not in (int, float) or not math.isfinite(node.value) or node.value < 0:
        raise WrongKind("a number of at least 0")
    return float(node.value)


def boolean(reader: Reader, node: Node, what: str) -> bool:
    """Return true or false."""
    if not isinstance(node.value, bool):
        raise WrongKind("true or false")
    return node.value


def many(read: Reading) -> Reading:
    """Return a reading of a list of values, or of one."""
    return lambda reader, node, what: reader.each(read, node, what)


def section(kind: type, prefix: str = "") -> Reading:
    """Return a reading of a mapping by the keys of a dataclass."""
    return lambda reader, node, what: reader.section(kind, node, what, prefix=prefix)


def version_range(reader: Reader, node: Node, what: str) -> str:
    """Return a range of versions."""
    specifiers = library("packaging.specifiers")
    try:
        specifiers.SpecifierSet(text(reader, node, what))
    except specifiers.InvalidSpecifier:
        raise WrongKind("a version range such as '>=2.11'") from None
    return node.value


def package(reader: Reader, node: Node, what: str) -> str:
    """Return a package requirement with its accepted versions."""
    requirements = library("packaging.requirements")
    try:
        valid = not requirements.Requirement(text(reader, node, what)).url
    except requirements.InvalidRequirement:
        valid = False
    if not valid:
        raise WrongKind("packages such as einops or 'einops>=0.7'")
    return node.value


def path_of(exists: Callable[[str], bool]) -> Reading:
    """Return a reading of a path in the manifest's own folder."""

    def read(reader: Reader, node: Node, what: str) -> str:
        path = text(reader, node, what)
        absolute = PurePosixPath(path).is_absolute() or PureWindowsPath(path).anchor or "\0" in path
        if absolute or ".." in re.split(r"[/\\]", path):
            raise InvalidText(f"{what} {path!r} must be a path inside of the manifest's folder")
        if reader.folder is not None:
            base, real = os.path.realpath(reader.folder), os.path.realpath(reader.folder / path)
            if os.path.commonpath([base, real]) != base:
                raise InvalidText(f"{what} {path!r} is a link out of the manifest's folder")
            if not exists(real):
                near = did_you_mean(path, _files_beside(reader.folder, path))
                raise InvalidText(f"{what} {path!r} does not exist in {reader.folder}{near}")
        return path

    return read


def _files_beside(folder: Path, path: str) -> list[str]:
    try:
        return [str(PurePosixPath(path).parent / name) for name in os.listdir((folder / path).parent)]
    except OSError:
        return []


file_path = path_of(os.path.isfile)
folder_path = path_of(os.path.isdir)
