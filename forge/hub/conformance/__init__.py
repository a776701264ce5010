"""The checks of the Hub's requirements for a repository: one function per requirement, one finding per violation.

No code of a repository is executed: its files are read and its Python is parsed.
"""

from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from forge.hub.cache import repository_cache
from forge.hub.conformance import describes, layers, layout, manifests, native, operators, python
from forge.hub.conformance.layers import LayerClass
from forge.hub.conformance.repository import Finding, Repository, read_repository
from forge.hub.policy import Policy
from forge.hub.resolver import ResolvedKernel, Selection

REQUIREMENTS: tuple[Callable[[Repository], Iterator[Finding]], ...] = (
    *layout.REQUIREMENTS,
    *describes.REQUIREMENTS,
    *manifests.REQUIREMENTS,
    *python.REQUIREMENTS,
    *native.REQUIREMENTS,
    *operators.REQUIREMENTS,
    *layers.REQUIREMENTS,
)


def check_repository(
    folder: Path,
    *,
    policy: Policy | None = None,
    name: str | None = None,
    blobs: Path | None = None,
    only: Collection[str] | None = None,
) -> list[Finding]:
    """Return every finding of a repository, its build/ folder or one variant, ordered by file and line.

    policy: its `imports` are allowed besides the Hub's, and its `max_file_bytes` applies. name: the repository's name
    on the Hub. blobs: the folder that links of its files may lead to. only: the variants to check, all by default.
    """
    repository = read_repository(folder, policy=policy or Policy(), name=name, blobs=blobs, only=only)
    return sorted({finding for requirement in REQUIREMENTS for finding in requirement(repository)})


def cached_variants(selection: Selection, variants: Collection[str]) -> list[str]:
    """Return those of these variants of a Hub repository that are completely cached."""
    return list(filter(selection.is_cached, variants))


def check_selection(selection: Selection, variants: Collection[str]) -> list[Finding]:
    """Return every finding of these variants of a kernel, whose files are local."""
    if selection.commit is not None:
        repository = selection.source.repository
        cache = repository_cache(repository)
        folder, name = cache.snapshot(selection.commit), repository.split("/")[1]
        return check_repository(folder, policy=selection.policy, name=name, blobs=cache.blobs, only=variants)
    folder = selection.source.folder.resolve()
    only = variants if selection.build in (folder, folder / "build") else None
    return check_repository(folder, policy=selection.policy, only=only)


def layer_classes(resolved: ResolvedKernel) -> list[LayerClass]:
    """Return the layers of a variant whose files are local."""
    return list(layers.layer_classes(read_repository(resolved.folder, policy=resolved.policy, blobs=resolved.blobs)))
