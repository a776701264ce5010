"""A reader of ELF shared libraries: their machine, the libraries that they need, and the versions of symbols.

The format: the System V ABI's object files, and the symbol versions of the Linux Standard Base.
"""

import struct
from dataclasses import dataclass

MACHINES = {62: "x86_64", 183: "aarch64"}
_DYNSYM, _DYNAMIC, _VERNEED = 11, 6, 0x6FFFFFFE
_NEEDED = 1


class NotElf(ValueError):
    """The error for bytes that are no shared library in this format."""


@dataclass(frozen=True)
class Library:
    """The contents of a shared library. machine: the processor. needed: names of libraries. versions: (library,
    version) of the symbols that it imports. undefined and defined: names of its dynamic symbols."""

    machine: str
    needed: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]
    undefined: tuple[str, ...]
    defined: tuple[str, ...]


@dataclass(frozen=True)
class _Section:
    kind: int
    offset: int
    size: int
    link: int
    info: int


def read_library(content: bytes) -> Library:
    """Read a library. Raises NotElf for anything but a complete 64-bit little-endian library."""
    if content[:4] != b"\x7fELF":
        raise NotElf("is not an ELF library")
    if content[4:6] != b"\x02\x01":
        raise NotElf("is not a 64-bit little-endian library")
    try:
        return _read(content)
    except (struct.error, IndexError, ValueError) as error:
        raise NotElf(f"is cut off or damaged: {error}") from error


def _read(content: bytes) -> Library:
    machine = struct.unpack_from("<H", content, 18)[0]
    sections = _sections(content)
    needed: list[str] = []
    versions: list[tuple[str, str]] = []
    undefined: list[str] = []
    defined: list[str] = []
    for section in sections:
        strings = sections[section.link].offset if section.link < len(sections) else 0
        if section.kind == _DYNAMIC:
            for at in range(section.offset, section.offset + section.size, 16):
                tag, value = struct.unpack_from("<QQ", content, at)
                needed += [_string(content, strings + value)] if tag == _NEEDED else []
        elif section.kind == _DYNSYM:
            for at in range(section.offset + 24, section.offset + section.size, 24):
                name, _, _, index = struct.unpack_from("<IBBH", content, at)
                (defined if index else undefined).append(_string(content, strings + name))
        elif section.kind == _VERNEED:
            versions += _versions(content, section, strings)
    name = MACHINES.get(machine, f"machine {machine}")
    return Library(name, tuple(needed), tuple(versions), tuple(undefined), tuple(defined))


def _sections(content: bytes) -> list[_Section]:
    start = struct.unpack_from("<Q", content, 40)[0]
    size, count = struct.unpack_from("<HH", content, 58)
    if size < 64:
        raise NotElf("has no table of sections")
    sections = []
    for index in range(count):
        at = start + index * size
        kind = struct.unpack_from("<I", content, at + 4)[0]
        offset, length, link, info = struct.unpack_from("<QQII", content, at + 24)
        sections.append(_Section(kind, offset, length, link, info))
    return sections


def _versions(content: bytes, section: _Section, strings: int) -> list[tuple[str, str]]:
    versions, at = [], section.offset
    for _ in range(section.info):
        _, count, file, first, following = struct.unpack_from("<HHIII", content, at)
        each = at + first
        for _ in range(count):
            _, _, _, name, further = struct.unpack_from("<IHHII", content, each)
            versions.append((_string(content, strings + file), _string(content, strings + name)))
            each += further
            if not further:
                break
        at += following
        if not following:
            break
    return versions


def _string(content: bytes, start: int) -> str:
    end = content.index(b"\0", start)
    return content[start:end].decode(errors="replace")
