"""The cache of kernels that huggingface_hub keeps, and the records that forge adds so that it works offline.

kernels--org--name/refs/v1            the commit of a branch, as huggingface_hub writes it for other downloads
kernels--org--name/forge/<commit>.json  the Hub's listing of a commit, and its trust in the publisher at the time
"""

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from forge.hub import compat
from forge.hub.client import ListedFile
from forge.hub.files import is_bytecode
from forge.hub.source import COMMIT


@dataclass(frozen=True)
class Record:
    """The Hub's cached answer about a commit. trusted: whether the Hub marks its publisher as trusted; None if not
    requested."""

    files: Mapping[str, ListedFile]
    trusted: bool | None = None

    def variants(self) -> set[str]:
        return {path.split("/")[1] for path in self.files if path.count("/") >= 2}

    def of(self, variant: str) -> dict[str, ListedFile]:
        """Return the files of a variant, by path relative to it; bytecode is never fetched."""
        prefix = f"build/{variant}/"
        return {
            path.removeprefix(prefix): each
            for path, each in self.files.items()
            if path.startswith(prefix) and not is_bytecode(path)
        }


@dataclass(frozen=True)
class RepositoryCache:
    """The folder of one repository in the cache."""

    folder: Path

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    @property
    def blobs(self) -> Path:
        return self.folder / "blobs"

    def refs(self) -> dict[str, str]:
        """Return the commit of each branch that was requested."""
        folder = self.folder / "refs"
        refs = {}
        for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
            commit = path.read_text(errors="replace").strip() if path.is_file() else ""
            if COMMIT.fullmatch(commit):
                refs[path.relative_to(folder).as_posix()] = commit
        return refs

    def write_ref(self, name: str, commit: str) -> None:
        if self.refs().get(name) != commit:
            _write(self.folder / "refs" / name, commit)

    def record(self, commit: str) -> Record | None:
        """Read the record of a commit; an unreadable file counts as none."""
        try:
            values = json.loads((self.folder / "forge" / f"{commit}.json").read_bytes())
            files = {path: ListedFile(int(each["size"]), str(each["pin"])) for path, each in values["files"].items()}
            return Record(files, values["trusted"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def write_record(self, commit: str, record: Record) -> None:
        values = {"trusted": record.trusted, "files": {path: asdict(each) for path, each in record.files.items()}}
        _write(self.folder / "forge" / f"{commit}.json", json.dumps(values))

    def commits(self) -> list[str]:
        folder = self.folder / "snapshots"
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def variants(self, commit: str) -> list[str]:
        """Return the variants of a commit that are cached, in full or in part."""
        build = self.snapshot(commit) / "build"
        return sorted(path.name for path in build.iterdir() if path.is_dir()) if build.is_dir() else []

    def has(self, commit: str, variant: str, record: Record | None) -> bool:
        """Return whether every listed file of a variant is cached with its size, or its folder if it has no record."""
        folder = self.snapshot(commit) / "build" / variant
        if record is None:
            return folder.is_dir()
        sizes = {path: each.size for path, each in record.of(variant).items()}
        return bool(sizes) and all(_size(folder / path) == size for path, size in sizes.items())


def repository_cache(repository: str) -> RepositoryCache:
    return RepositoryCache(compat.cache_root() / f"kernels--{repository.replace('/', '--')}")


def cached_repositories() -> list[str]:
    """Return every kernel repository with files in the cache."""
    root = compat.cache_root()
    folders = sorted(root.glob("kernels--*--*")) if root.is_dir() else []
    return [folder.name.removeprefix("kernels--").replace("--", "/", 1) for folder in folders]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _write(path: Path, text: str) -> None:
    """Write a file that is optional: a cache that cannot be written to is not an error."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(text)
        os.replace(temporary, path)
