"""A user's reference to a kernel: "org/name", "org/name@v1", "org/name@<revision>", or a folder."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from forge.ir import check

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
VERSION = re.compile(r"v(\d+)", re.ASCII)


@dataclass(frozen=True)
class Source:
    """A repository of the Hub with the wanted version or revision, or the path of a local folder."""

    repository: str = ""
    path: Path | None = None
    version: int | None = None
    revision: str | None = None

    @property
    def folder(self) -> Path:
        """The path of a folder; an error for a repository."""
        assert self.path is not None, f"{self.repository} is a repository of the Hub"
        return self.path

    def __str__(self) -> str:
        if self.path is not None:
            return str(self.path)
        suffix = f"@v{self.version}" if self.version is not None else f"@{self.revision}" if self.revision else ""
        return f"{self.repository}{suffix}"


def parse_source(
    source: "str | os.PathLike[str]", *, version: int | None = None, revision: str | None = None
) -> Source:
    """Parse a source. A string is a repository if it is "org/name", and a folder otherwise.

    Raises: TypeError and ValueError for an invalid source, and for a version and a revision together.
    """
    check(
        isinstance(source, str | os.PathLike) and bool(os.fspath(source)),
        lambda: f'kernels: {source!r} is neither "org/name" nor a folder',
        TypeError,
    )
    check(
        version is None or (type(version) is int and version >= 0),
        lambda: f"{source}: version={version!r}, but must be an integer such as 1",
        TypeError,
    )
    text = os.fspath(source)
    repository, _, suffix = text.partition("@")
    if not isinstance(source, str) or not REPOSITORY.fullmatch(repository) or ".." in repository:
        check(version is None and revision is None, lambda: f"{source}: is a folder, which has no version or revision")
        return Source(path=Path(text).expanduser())
    if suffix:
        check(
            version is None and revision is None,
            lambda: f"{source}: gives a revision, and version={version} or revision={revision} gives another",
        )
        is_version = VERSION.fullmatch(suffix)
        version, revision = (int(is_version[1]), None) if is_version else (None, suffix)
    check(
        version is None or revision is None, lambda: f"{source}: version={version} and revision={revision!r}; give one"
    )
    check(
        revision is None or (revision != "" and not revision.startswith("/") and ".." not in revision),
        lambda: f"{source}: revision={revision!r} is not a branch, tag or commit",
    )
    return Source(repository, None, version, revision)
