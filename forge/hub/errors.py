"""The errors of kernel repositories: a family of exceptions, and the place that a message names."""

from dataclasses import dataclass, replace


class HubError(RuntimeError):
    """The base class of errors of kernels. The text names the repository, the variant, the file, the value that was
    found and the one that was expected."""


class MissingExtraError(HubError, ImportError):
    """The error when forge[hub] is not installed."""


class NotFoundError(HubError):
    """The error for an unknown repository, version, revision or lock entry, or no variant for this system."""


class NoManifestError(NotFoundError):
    """The error for a repository without a manifest, which would name the operations of its kernels."""


class UnreachableError(HubError):
    """The error when the Hub does not answer and the cache does not have what is needed."""


class MalformedError(HubError):
    """The error for a repository whose layout violates the Hub's requirements, or a file of it that cannot be read."""


def expect(ok: object, place: object, problem: str) -> None:
    """Raise MalformedError at `place` with `problem` unless `ok`."""
    if not ok:
        raise MalformedError(f"{place}: {problem}")


class IntegrityError(HubError):
    """The error for files that are not those that were locked, listed, digested or signed."""


class RefusedError(HubError):
    """The error for a kernel that the policy does not allow: its publisher, its path, its id or its imports."""


class KernelImportError(HubError, ImportError):
    """The error when a kernel's own code raises while it is imported, after every check passed."""


class BuildError(HubError):
    """The error for a kernel's sources: no prebuilt variant or cached library can be used, and compiling failed."""


class HubNotice(UserWarning):
    """The warning of an event that changes nothing in results, such as a kernel that is served from the cache."""


@dataclass(frozen=True)
class Place:
    """The place of an error: the source as the user named it, and the other parts as far as they are known."""

    source: str
    commit: str | None = None
    variant: str | None = None
    file: str | None = None

    def at(self, file: str) -> "Place":
        return replace(self, file=file)

    def __str__(self) -> str:
        parts = [f"commit {self.commit[:12]}"] if self.commit else []
        parts += [f"variant {self.variant}"] if self.variant else []
        parts += [self.file] if self.file else []
        return f"{self.source} ({', '.join(parts)})" if parts else self.source
