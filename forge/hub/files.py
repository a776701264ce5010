"""The files of a variant: listed, bounded, hashed, and compared with their pins."""

import base64
import binascii
import hashlib
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from forge.hub import private_copies
from forge.hub.errors import IntegrityError, MalformedError, Place
from forge.support import owner_only_store

MANIFEST = "forge_kernels.yaml"
NATIVE = (".so", ".pyd", ".dylib")
MAX_FILES = 20_000
MAX_SOURCE_BYTES = 16 << 20
MAX_METADATA_BYTES = 1 << 20
UNPINNED = ("metadata.json", "metadata.json.sigstore")


@dataclass(frozen=True)
class File:
    """A file of a variant. content: the hashed bytes of a Python source. copy: this process's copy of any other file,
    if it is to be loaded."""

    path: str
    location: Path
    size: int
    sha256: str
    content: bytes | None = None
    copy: Path | None = field(default=None, compare=False)

    def read(self) -> bytes:
        """Return the bytes that are to be imported, if they are kept in memory; else the file's current content."""
        return (self.copy or self.location).read_bytes() if self.content is None else self.content


@dataclass(frozen=True)
class Pins:
    """The required hashes of files: path → "algorithm:hex". origin: their source, in words. exact: refuse bytecode,
    too."""

    files: Mapping[str, str]
    origin: str
    exact: bool = False


def is_bytecode(path: str) -> bool:
    return path.endswith(".pyc") or "__pycache__" in path.split("/")


def is_opened(path: str) -> bool:
    """Return whether code may open a file by its path: it is neither Python, which is imported from the hashed bytes,
    nor metadata."""
    return not (path.endswith((".py", MANIFEST, *UNPINNED)) or is_bytecode(path))


def unsafe_path(path: str) -> str | None:
    """Return the reason why a path may not stand in a listing of a variant's files, or None."""
    if not path or "\0" in path or "\\" in path or ":" in path:
        return "is not a portable path"
    if PurePosixPath(path).is_absolute():
        return "is absolute"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "leaves its folder or is not in its shortest form"
    return None


def read_files(
    folder: Path, place: Place, *, max_file_bytes: int, links_into: Path | None = None, copy_to: Path | None = None
) -> dict[str, File]:
    """Read and hash every file of a variant, each opened once; return them by path. copy_to: an empty folder for the
    hashed bytes.

    A link may lead to a file in the folder or in `links_into` (the blobs of huggingface_hub's cache).
    Raises: MalformedError for other links, irregular files, and too many or too large files.
    """
    roots = [folder.resolve()] + ([links_into.resolve()] if links_into else [])
    files: dict[str, File] = {}
    try:
        for entry in _walk(folder):
            path = entry.relative_to(folder).as_posix()
            if len(files) >= MAX_FILES:
                raise MalformedError(f"{place}: has more than {MAX_FILES} files")
            files[path] = _read(path, entry, roots, place.at(path), max_file_bytes, copy_to)
    except OSError as error:
        raise MalformedError(f"{place}: cannot be read: {error}") from error
    return dict(sorted(files.items()))


def _walk(folder: Path) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path))
            else:
                yield Path(entry.path)


def read_small(
    location: Path, place: Place, limit: int, *, links_into: Path | None = None, within: Path | None = None
) -> bytes | None:
    """Read the content of one file of at most `limit` bytes; None if it does not exist. Raises like read_files.

    within: the folder that it must lie in after links are resolved.
    """
    try:
        if not os.path.lexists(location):
            return None
        folder = Path(os.path.realpath(location.parent))
        root = folder if within is None else Path(os.path.realpath(within))
        if not folder.is_relative_to(root):
            raise MalformedError(f"{place}: is in {folder}, which is outside of {within}")
        file, _ = _open(location, [root] + ([links_into.resolve()] if links_into else []), place, limit)
        with file:
            return file.read(limit + 1)
    except OSError as error:
        raise MalformedError(f"{place}: cannot be read: {error}") from error


def read_sources(folder: Path, paths: Collection[str], what: str) -> dict[str, bytes]:
    """Read sources and headers of a folder, ordered by path. what: their description in errors."""
    if len(paths) > MAX_FILES:
        raise MalformedError(f"{folder}: more than {MAX_FILES} files are {what}")
    files = {}
    for path in sorted(paths):
        place = Place(str(folder), file=path)
        content = read_small(folder / path, place, MAX_SOURCE_BYTES, within=folder)
        if content is None:
            raise MalformedError(f"{place}: is no longer there")
        files[path] = content
    return files


def _open(location: Path, roots: list[Path], place: Place, limit: int) -> tuple[BinaryIO, int]:
    """Open a regular file that lies in one of the roots; return it and its size."""
    if location.is_symlink():
        target = Path(os.path.realpath(location))  # resolves to one of the links if they form a cycle
        if not any(target.is_relative_to(root) for root in roots):
            raise MalformedError(f"{place}: is a link to {target}, which is outside of the kernel's folder")
        location = target
    if not stat.S_ISREG(location.lstat().st_mode):
        raise MalformedError(f"{place}: is not a regular file")
    file = owner_only_store.open_itself(location)
    status = os.fstat(file.fileno())
    if stat.S_ISREG(status.st_mode) and status.st_size <= limit:
        return file, status.st_size
    file.close()
    if not stat.S_ISREG(status.st_mode):
        raise MalformedError(f"{place}: is not a regular file")
    raise MalformedError(f"{place}: has {status.st_size} bytes, but at most {limit} are allowed")


def _read(
    path: str, location: Path, roots: list[Path], place: Place, max_file_bytes: int, copy_to: Path | None
) -> File:
    is_source = path.endswith(".py")
    file, size = _open(location, roots, place, min(max_file_bytes, MAX_SOURCE_BYTES) if is_source else max_file_bytes)
    with file:
        if is_source:
            content = file.read()
            return File(path, location, len(content), hashlib.sha256(content).hexdigest(), content)
        if copy_to is None:
            return File(path, location, size, sha256_of(file))
        size, sha256 = private_copies.copy(file, copy_to / path)
        return File(path, location, size, sha256, copy=copy_to / path)


def sha256_of(file: BinaryIO) -> str:
    """Return the hash of the rest of an open file."""
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # typeshed wants readinto


def content_hash(files: Mapping[str, File]) -> str:
    """Return one hash of all paths and contents except bytecode."""
    digest = hashlib.sha256()
    for path, file in sorted(files.items()):
        if not is_bytecode(path):
            digest.update(f"{path}\0{file.sha256}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def check_pins(files: Mapping[str, File], pins: Pins, place: Place) -> None:
    """Raise IntegrityError, naming every missing, extra and changed file, unless the files match their pins."""
    missing = [f"{path} is missing" for path in pins.files if path not in files]
    extra = [
        f"{path} is not among them"
        for path in files
        if path not in pins.files and (pins.exact or not (is_bytecode(path) or path in UNPINNED))
    ]
    changed = []
    for path, expected in pins.files.items():
        if path in files and (actual := _hash(files[path], expected.partition(":")[0])) != expected:
            changed.append(f"{path} is {actual}, wanted {expected}")
    problems = missing + extra + changed
    if problems:
        more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
        lines = "".join(f"\n  {problem}" for problem in problems[:8])
        raise IntegrityError(f"{place}: the files are not those of {pins.origin}:{lines}{more}")


def _hash(file: File, algorithm: str) -> str:
    if algorithm == "sha256":
        return f"sha256:{file.sha256}"
    if algorithm == "git":
        digest = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
        digest.update(file.read())
        return f"git:{digest.hexdigest()}"
    return f"{algorithm}:{hashlib.new(algorithm, file.read()).hexdigest()}"


def digest_pins(algorithm: str, digests: Mapping[str, str], place: Place) -> Pins:
    """Return the pins from metadata.json's digest. Raises MalformedError for invalid paths and values."""
    pins = {}
    for path, value in digests.items():
        if reason := unsafe_path(path):
            raise MalformedError(f"{place}: the digest's path {path!r} {reason}")
        try:
            pins[path] = f"{algorithm}:{base64.b64decode(value, validate=True).hex()}"
        except binascii.Error as error:
            raise MalformedError(f"{place}: the digest of {path} is {value!r}, which is not base64: {error}") from error
    return Pins(pins, "the digest in metadata.json")
