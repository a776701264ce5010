"""The shared objects that hold native code: which they are, and a hash of their bytes."""

import hashlib
import mmap
import os
import re
import sys
import sysconfig
from functools import cache
from pathlib import Path

import torch

from forge.torch_internals.dispatch import dispatch_dump

_MAPS = Path("/proc/self/maps")
_LIBRARY = re.compile(r"\.(so(\.[\d.]+)?|dylib|pyd|dll)$")
_SUFFIXES = (b".so", b".dylib", b".pyd", b".dll")
_LONGEST_NAME = 255  # of a file, in bytes
_PYTHON = re.compile(r"registered at (<|/dev/null|.*\.py:)")
_SYSTEM = ("/lib/", "/lib64/", "/usr/lib/", "/usr/lib64/")


def file_hash(path: str) -> str | None:
    """Return a hash of a loaded file's bytes, and of those of the libraries that it names; None where they are not to
    be had, or no longer those that were loaded."""
    real = os.path.realpath(path)
    try:
        return " ".join(_hashes([real], _own())) if real in loaded_files() else None
    except OSError:
        return None


def _hashes(libraries: list[str], own: list[str]) -> list[str]:
    """Return hashes of libraries, and of a user's own that they name, as they do with those that they need."""
    paths = list(libraries)
    for path in paths:
        names = _files_named_by(path, *_state(path))
        paths += [each for each in own if each not in paths and any(name.endswith(_stem(each)) for name in names)]
    return sorted(_hash(path, *_state(path)) for path in paths)


def _stem(path: str) -> bytes:
    """Return a library's name without its version: libm.so of libm.so.6.1."""
    name, mark, _ = os.path.basename(path).partition(".so")
    return f"{name}{mark}".encode()


def operator_hashes(namespace: str, name: str) -> list[str]:
    """Return hashes of all that may hold the code of an operator: the shared objects that mention its name, a user's
    own or else those of installed packages. None are known of an operator whose code is registered from Python."""
    if any(_PYTHON.search(line) for line in _registrations(f"{namespace}::{name}")):
        return []
    libraries, own = _libraries(), _own()
    for group in (own, [path for path in libraries if path not in own]):
        matches = [path for path in group if _mentions(path, *_state(path), name.encode())]
        if matches:
            return _hashes(matches, own)
    return []


def _libraries() -> list[str]:
    """Return the loaded shared objects that are neither the system's, Python's nor torch's."""
    return sorted(path for path in loaded_files() if _LIBRARY.search(path) and not path.startswith(_theirs()))


def _own() -> list[str]:
    """Return the loaded shared objects that are in no installed package."""
    installed = tuple(f"{sysconfig.get_path(each)}{os.sep}" for each in ("purelib", "platlib"))
    return [path for path in _libraries() if not path.startswith(installed)]


def _registrations(operator: str) -> list[str]:
    """Return torch's record of the origin of an operator's kernels, without its metadata, which computes no values."""
    lines = dispatch_dump(operator).splitlines()
    return [line for line in lines if ": registered at " in line and not line.startswith(("Meta", "debug"))]


def loaded_files() -> frozenset[str]:
    """Return the files that this process has mapped and that are still there: by the system's word, else by torch's."""
    if not _MAPS.exists():
        module_files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        return frozenset(os.path.realpath(path) for path in (*torch.ops.loaded_libraries, *module_files) if path)
    lines = _MAPS.read_text().splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in lines if line.count("/")}
    return frozenset(path for path in paths if os.path.isfile(path))  # a replaced file's path ends with "(deleted)"


@cache
def _theirs() -> tuple[str, ...]:
    """Return the folders of the system's, Python's and torch's own shared objects."""
    torchs = os.path.dirname(os.path.realpath(torch.__file__))
    pythons = [os.path.realpath(sysconfig.get_config_var(each) or "/lib") for each in ("LIBDIR", "DESTSHARED")]
    return (*_SYSTEM, *(f"{each}{os.sep}" for each in (torchs, *pythons)))


def _state(path: str) -> tuple[int, int, int]:
    stat = os.stat(path)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


@cache
def _hash(path: str, *state: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def _files_named_by(path: str, inode: int, size: int, changed: int) -> frozenset[bytes]:
    """Return the texts in a library's constants that end as the names of shared objects, without their versions."""
    if not size:
        return frozenset()
    names = set()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        for suffix in _SUFFIXES:
            position = memory.find(suffix)
            while position >= 0:
                first = max(position - _LONGEST_NAME, 0)
                names.add(memory[max(first, memory.rfind(b"\0", first, position) + 1) : position + len(suffix)])
                position = memory.find(suffix, position + 1)
    return frozenset(names)


@cache
def _mentions(path: str, inode: int, size: int, changed: int, name: bytes) -> bool:
    """Return whether a name stands in a shared object's constants, as a schema or a registration has it."""
    if not size:
        return False
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        return any(memory.find(name + end) >= 0 for end in (b"\0", b"(", b"."))
