"""The requirement on forge_kernels.yaml: the part that loading reads before any import has no problem."""

import os
from collections.abc import Iterator
from pathlib import Path

from forge.hub.conformance.repository import Finding, Repository
from forge.hub.errors import HubError, Place
from forge.hub.files import MANIFEST, read_small
from forge.hub.manifest import Manifest, ManifestError, read_manifest
from forge.hub.manifest.parse import MAX_BYTES
from forge.hub.manifest.validate import registered_resolver


def manifest(repository: Repository) -> Iterator[Finding]:
    """Require that loading accepts each manifest, and that the variants' are copies of the folder's."""
    beside = _beside(repository)
    if beside is not None:
        yield from _problems(repository, repository.folder, beside, with_sources=True)
    for variant in repository.variants:
        if MANIFEST not in variant.files or (beside is not None and not variant.path):
            continue
        try:
            content = variant.files[MANIFEST].read()
        except OSError as error:
            yield variant.finding("manifest", f"cannot be read: {error.strerror or error}", MANIFEST)
            continue
        yield from _problems(repository, repository.folder / variant.path, content, with_sources=False)
        if beside is not None and not variant.is_source and content != beside:
            text = f"is not as the folder's {MANIFEST}, of which it is a copy; build the repository again"
            yield variant.finding("manifest", text, MANIFEST)


def read(path: Path, content: bytes, *, with_sources: bool) -> Manifest:
    """Read a manifest as loading does, without importing the kernel. Raises ManifestError with every problem."""
    return read_manifest(path, registered_resolver(), content=content, with_sources=with_sources)


def has_sources(repository: Repository) -> bool:
    """Return whether the manifest at the root of a folder declares sources to compile."""
    content = _beside(repository)
    try:
        return content is not None and bool(
            read(repository.folder / MANIFEST, content, with_sources=True).build.sources
        )
    except ManifestError:
        return False


def _beside(repository: Repository) -> bytes | None:
    """Read the manifest at the root of a local folder; an unreadable one is another finding."""
    if not repository.is_folder:
        return None
    try:
        place = Place(str(repository.folder), file=MANIFEST)
        return read_small(repository.folder / MANIFEST, place, MAX_BYTES, within=repository.folder)
    except HubError:
        return None


def _problems(repository: Repository, folder: Path, content: bytes, *, with_sources: bool) -> Iterator[Finding]:
    try:
        read(folder / MANIFEST, content, with_sources=with_sources)
    except ManifestError as error:
        for each in error.problems:
            file = Path(os.path.relpath(each.mark.file, repository.folder)).as_posix()
            yield Finding(file, each.mark.line, "manifest", " ".join(each.text.split()))


REQUIREMENTS = (manifest,)
