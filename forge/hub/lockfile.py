"""The lock file: the commit of each kernel, and the sha256 of every file of its variants."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.hub.errors import IntegrityError, MalformedError, NotFoundError, expect
from forge.hub.files import Pins, unsafe_path
from forge.hub.source import COMMIT, Source

VERSION = 1
SUFFIX = ".lock"  # by which kernels= recognizes a lock file
DEFAULT_NAME = "forge-kernels.lock"
SHA256 = re.compile(r"[0-9a-f]{64}")
KEYS = ("source", "version", "revision", "commit", "variants")
ALONE = (".yaml", ".yml")


@dataclass(frozen=True)
class LockedKernel:
    """The entry of one kernel: the request, its commit (None for a folder), and variant → path → sha256.

    files: path → sha256 of the files beside the variants: a folder's own manifest, or a standalone manifest, which has
    no variants.
    """

    source: str
    version: int | None
    revision: str | None
    commit: str | None
    variants: Mapping[str, Mapping[str, str]]
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_manifest(self) -> bool:
        """True for a standalone manifest."""
        return self.commit is None and self.source.endswith(ALONE)

    def check(self, name: str, content: bytes, origin: Path) -> None:
        """Raise IntegrityError unless a file beside the variants matches the lock."""
        expected, actual = self.files.get(name), hashlib.sha256(content).hexdigest()
        if expected is None:
            again = f"forge kernels lock {self.source} -o {origin}"
            raise IntegrityError(f"{self.source}: {name} is not in {origin}; lock it again: {again}")
        if expected != actual:
            raise IntegrityError(f"{self.source}: {name} is sha256:{actual}, but {origin} holds sha256:{expected}")

    def pins(self, variant: str, origin: Path) -> Pins:
        files = {path: f"sha256:{sha}" for path, sha in self.variants[variant].items()}
        return Pins(files, str(origin), exact=True)


@dataclass(frozen=True)
class Lock:
    """A lock file and its entries; folders in it are relative to its own."""

    path: Path
    kernels: tuple[LockedKernel, ...] = ()

    def find(self, source: Source) -> LockedKernel:
        """Return the entry of a source; without a version or revision, any of them matches.

        Raises: NotFoundError if no entry or more than one matches.
        """
        matches = [kernel for kernel in self.kernels if self._is_of(kernel, source)]
        exact = [each for each in matches if (each.version, each.revision) == (source.version, source.revision)]
        matches = exact or matches
        if len(matches) == 1:
            return matches[0]
        if matches:
            listing = ", ".join(_request_of(kernel) for kernel in matches)
            raise NotFoundError(f"{source}: {self.path} holds {listing}; say which")
        listing = ", ".join(f"{kernel.source} {_request_of(kernel)}" for kernel in self.kernels) or "nothing"
        raise NotFoundError(f"{source}: is not in {self.path}, which holds {listing}; run: forge kernels lock {source}")

    def _is_of(self, kernel: LockedKernel, source: Source) -> bool:
        if source.path is not None:
            return kernel.commit is None and (self.path.parent / kernel.source).resolve() == source.path.resolve()
        is_specific = source.version is not None or source.revision is not None
        same = (kernel.version, kernel.revision) == (source.version, source.revision)
        return kernel.source == source.repository and (same or not is_specific or kernel.commit == source.revision)

    def manifest(self, path: Path) -> LockedKernel | None:
        """Return the entry of a standalone manifest."""
        manifests = [each for each in self.kernels if each.is_manifest]
        return next((each for each in manifests if (self.path.parent / each.source).resolve() == path.resolve()), None)

    def name_of(self, source: Source) -> str:
        """Return the name of a source in an entry of this lock."""
        if source.path is None:
            return str(source.repository)
        relative = Path(os.path.relpath(source.path.resolve(), self.path.resolve().parent)).as_posix()
        return relative if relative.startswith("..") else f"./{relative}"

    def with_kernel(self, kernel: LockedKernel) -> "Lock":
        """Return the lock with this entry in place of the one for the same request."""
        key = (kernel.source, kernel.version, kernel.revision)
        others = [each for each in self.kernels if (each.source, each.version, each.revision) != key]
        order = sorted([*others, kernel], key=lambda each: (each.source, each.version or 0, each.revision or ""))
        return Lock(self.path, tuple(order))

    def write(self) -> None:
        """Write the file, in an order that depends only on its content."""
        kernels = [
            {
                **vars(kernel),
                "variants": {name: dict(sorted(files.items())) for name, files in sorted(kernel.variants.items())},
                "files": dict(sorted(kernel.files.items())),
            }
            for kernel in self.kernels
        ]
        for values in kernels:
            if not values["files"]:
                del values["files"]
        text = json.dumps({"forge_kernels_lock": VERSION, "kernels": kernels}, indent=2) + "\n"
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        temporary.write_text(text)
        os.replace(temporary, self.path)


def _request_of(kernel: LockedKernel) -> str:
    if kernel.version is not None:
        return f"version {kernel.version}"
    return f"revision {kernel.revision}" if kernel.revision is not None else "the folder"


def read_lock(path: Path | str) -> Lock:
    """Read a lock file. Raises NotFoundError if it does not exist, MalformedError if it is malformed."""
    path = Path(path)
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise NotFoundError(f"{path}: there is no such lock file; run: forge kernels lock SOURCE -o {path}") from error
    except (ValueError, RecursionError, OSError) as error:
        raise MalformedError(f"{path}: is not a lock file: {error}") from error
    is_lock = isinstance(values, dict) and values.get("forge_kernels_lock") == VERSION
    expect(is_lock, path, "has no forge_kernels_lock: 1")
    kernels = values.get("kernels")
    expect(isinstance(kernels, list) and set(values) == {"forge_kernels_lock", "kernels"}, path, "needs 'kernels': []")
    return Lock(path, tuple(_kernel(each, path) for each in kernels))


def _kernel(values: Any, path: Path) -> LockedKernel:
    has_keys = isinstance(values, dict) and set(values) - {"files"} == {*KEYS}
    expect(has_keys, path, f"each kernel needs the keys {sorted(KEYS)}")
    source, version, revision, commit, variants = (values[key] for key in KEYS)
    expect(isinstance(source, str), path, f"source is {source!r}, but must be a string")
    expect(version is None or type(version) is int, path, f"{source}: version is {version!r}, but must be an integer")
    expect(revision is None or isinstance(revision, str), path, f"{source}: revision is {revision!r}, no string")
    is_commit = commit is None or (isinstance(commit, str) and COMMIT.fullmatch(commit) is not None)
    expect(is_commit, path, f"{source}: commit is {commit!r}, but must be 40 hexadecimal digits")
    expect((commit is None) == source.startswith("."), path, f"{source}: a repository has a commit and a folder none")
    beside = values.get("files", {})
    expect(isinstance(variants, dict), path, f"{source}: variants must be an object")
    is_manifest = commit is None and source.endswith(ALONE)
    expect(variants or (is_manifest and beside), path, f"{source}: has no variants")
    _check_files(beside, path, f"{source}: files")
    for variant, files in variants.items():
        expect(unsafe_path(variant) is None and "/" not in variant, path, f"{source}: {variant!r} names no variant")
        _check_files(files, path, f"{source}: {variant}")
    return LockedKernel(source, version, revision, commit, variants, beside)


def _check_files(files: Any, path: Path, what: str) -> None:
    expect(isinstance(files, dict), path, f"{what} must be an object of path → sha256")
    for name, sha in files.items():
        expect(unsafe_path(name) is None, path, f"{what}: the path {name!r} {unsafe_path(name)}")
        is_sha = isinstance(sha, str) and SHA256.fullmatch(sha) is not None
        expect(is_sha, path, f"{what}: {name} is {sha!r}, but must be a sha256 in hexadecimal digits")


def as_lock(lock: "Lock | Path | str | None") -> Lock | None:
    return lock if lock is None or isinstance(lock, Lock) else read_lock(lock)
