"""Errors of kernel repositories: one family of exceptions, and the place that a message names."""

from dataclasses import dataclass, replace


class HubError(RuntimeError):
    """A kernel cannot be used. The text names the repository, the variant, the file, what came and what was wanted."""


class MissingExtraError(HubError, ImportError):
    """forge[hub] is not installed."""


class NotFoundError(HubError):
    """No such repository, version, revision or lock entry, or no variant for this system."""


class NoManifestError(NotFoundError):
    """A repository without a manifest: nothing says which operations its kernels are for."""


class UnreachableError(HubError):
    """The Hub does not answer and the cache does not have what is needed."""


class MalformedError(HubError):
    """The repository is not laid out as the Hub's requirements say, or a file of it cannot be read."""


def expect(ok: object, place: object, problem: str) -> None:
    """Raise MalformedError unless something that was read is as it must be."""
    if not ok:
        raise MalformedError(f"{place}: {problem}")


class IntegrityError(HubError):
    """The files are not those that were locked, listed, digested or signed."""


class RefusedError(HubError):
    """The policy does not allow this kernel: its publisher, its path, its id or what it imports."""


class KernelImportError(HubError, ImportError):
    """Every check passed and the kernel's own code raised while it was imported."""


class BuildError(HubError):
    """A kernel's sources: neither a prebuilt variant nor a cached library serves, and compiling them failed."""


class HubNotice(UserWarning):
    """Something that the user should know and that changes nothing: for one, that the cache serves a kernel."""


@dataclass(frozen=True)
class Place:
    """Where an error is: the source as the user named it, and as much of the rest as is known."""

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
