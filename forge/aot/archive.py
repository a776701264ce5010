"""The file: a zip in the layout of torch's packages, with an index of its members and what it requires.

package/data/aotinductor/NAME/   an entry point's AOTInductor package
package/data/weights/            weights that entry points share, as safetensors
package/data/forge/NAME/         an entry point's generated functions and compiled regions
package/data/forge/index.json    entry points, requirements, and the size and hash of each member
package/data/forge/digest        the hash of the index

Members are read and compared with the index before anything of them is used.
"""

import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from forge.aot.errors import ExportError
from forge.torch_internals.packages import PackageWriter

FORMAT = 1
INDEX, DIGEST = "data/forge/index.json", "data/forge/digest"
_TORCHS = frozenset(
    {
        "archive_format",
        "archive_version",
        "byteorder",
        "version",
        ".data/version",
        ".data/serialization_id",
        ".format_version",
        ".storage_alignment",
    }
)
_INDEX_BYTES = 1 << 28
_CHUNK = 1 << 22
_ROOT = "package"  # the folder in the zip


def write(path: str | os.PathLike[str], index: Mapping[str, Any], members: Mapping[str, bytes]) -> str:
    """Write a file, whole or not at all, and return its digest."""
    path = Path(path)
    listing = {name: [len(content), _hash(content)] for name, content in sorted(members.items())}
    head = json.dumps({"format": FORMAT, **index, "members": listing}).encode()
    digest = _hash(head)
    with tempfile.TemporaryDirectory(prefix=f".{path.stem}", dir=path.parent) as folder:
        unfinished = Path(folder, f"{_ROOT}.pt2")
        with PackageWriter(str(unfinished)) as writer:
            for name, content in {**members, INDEX: head, DIGEST: digest.encode()}.items():
                writer.write_bytes(name, content)
        unfinished.replace(path)
    return digest


class Archive:
    """A file that was opened: `index` is its index, and members are read from it.

    Raises ExportError for a file that is not what forge.export wrote. digest: what the file's must be, if it is known.
    """

    def __init__(self, path: str | os.PathLike[str], digest: str | None = None) -> None:
        self.path = Path(path)
        try:
            self._file = self.path.open("rb")
        except OSError as error:
            raise self.error(f"cannot be read: {error.strerror or error}") from error
        try:
            self._zip = zipfile.ZipFile(self._file)
        except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            self._file.close()
            raise self.error(f"is no zip file, or only a part of one: {error}") from error
        try:
            self._members = self._find_members()
            self.digest, self.index = self._read_index(digest)
            self._check_members()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Archive":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._zip.close()
        self._file.close()

    @property
    def members(self) -> list[str]:
        """The names of the members that the index lists."""
        return list(self.index["members"])

    def error(self, problem: str) -> ExportError:
        """Return the error of this file."""
        return ExportError(f"forge.load: {self.path} {problem}")

    def read(self, name: str) -> bytes:
        """Return a member's content. Raises ExportError where it is not what was written."""
        return bytes(self.read_memory(name).numpy().tobytes())

    def read_memory(self, name: str) -> torch.Tensor:
        """Return a member's content as a tensor of bytes, in memory of its own. Raises ExportError as `read`."""
        size, digest = self.index["members"][name]
        memory = torch.empty(size, dtype=torch.uint8)
        view = memoryview(memory.numpy().data) if size else memoryview(b"")
        length = 0
        try:
            with self._zip.open(self._members[name]) as member:
                while part := member.read(_CHUNK):
                    view[length : length + len(part)] = part
                    length += len(part)
        except (zipfile.BadZipFile, OSError, ValueError, EOFError) as error:
            raise self.error(f"is damaged: {name}: {error}") from error
        if length != size or hashlib.sha256(view).hexdigest() != digest:
            raise self.error(f"is damaged: {name} is not what was written")
        return memory

    def _find_members(self) -> dict[str, zipfile.ZipInfo]:
        members: dict[str, zipfile.ZipInfo] = {}
        for info in self._zip.infolist():
            name = info.filename.partition("/")[2]
            if name in members or info.compress_type != zipfile.ZIP_STORED:
                raise self.error(f"is no file of forge.export: {info.filename} is compressed, or there twice")
            members[name] = info
        if INDEX not in members or DIGEST not in members:
            raise self.error(f"is no file of forge.export: it has no {INDEX}")
        return members

    def _read_index(self, digest: str | None) -> tuple[str, dict[str, Any]]:
        try:
            infos = [self._members[name] for name in (INDEX, DIGEST)]
            if max(info.file_size for info in infos) > _INDEX_BYTES:
                raise self.error("is damaged: its index is too long")
            head, own = (self._zip.read(info) for info in infos)
        except (zipfile.BadZipFile, OSError, ValueError) as error:
            raise self.error(f"is damaged: its index: {error}") from error
        actual = _hash(head)
        if actual.encode() != own:
            raise self.error("is damaged: its index is not what was written")
        if digest is not None and digest != actual:
            raise self.error(f"has the digest {actual}, but must have {digest}")
        index: dict[str, Any] = json.loads(head)
        if index.get("format") != FORMAT:
            raise self.error(f"has format {index.get('format')}, but this forge reads format {FORMAT}")
        return actual, index

    def _check_members(self) -> None:
        expected = {*self.index["members"], INDEX, DIGEST}
        added = sorted(set(self._members) - expected - _TORCHS)
        missing = sorted(expected - set(self._members))
        if added:
            raise self.error(f"is damaged: {', '.join(added)} was added to it")
        if missing:
            raise self.error(f"is damaged: {', '.join(missing)} is missing")


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
