"""The making of a lock file: each kernel is resolved and fetched, and every file of the wanted variants is hashed."""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from forge.hub.conformance import manifests
from forge.hub.errors import IntegrityError, NotFoundError, Place, RefusedError
from forge.hub.files import MANIFEST, check_pins, is_bytecode, read_files, read_small
from forge.hub.loader import verify
from forge.hub.lockfile import ALONE, Lock, LockedKernel, read_lock
from forge.hub.manifest.parse import MAX_BYTES, parse, texts
from forge.hub.policy import Policy
from forge.hub.resolver import ResolvedKernel, Selection, fetch, resolve_locked, select
from forge.hub.source import Source, parse_source


def lock_kernels(
    sources: "Iterable[str | os.PathLike[str]]",
    path: Path | str,
    *,
    variants: Sequence[str] = (),
    all_variants: bool = False,
    policy: Policy | None = None,
    backend: str | None = None,
    accept: Callable[[Selection, Sequence[str]], None] | None = None,
) -> Lock:
    """Write the commit and the sha256 of every file of these kernels to a lock file, added to its entries.

    sources: as `resolve` takes them; none means all entries of the file, at their newest commits. variants: those to
    lock instead of the one for this system; all_variants: lock all. A kernel's dependencies are locked with it, as are
    the repositories that a standalone manifest (.yaml) names. accept: called for each kernel and its variants once they
    are fetched; if it raises, the file is not changed. Nor does a mistake in a standalone manifest change it.
    Raises: RefusedError for sources that are not built.
    """
    path = Path(path)
    lock = read_lock(path) if path.exists() else Lock(path)
    pending = [parse_source(source) for source in sources] or [_source(kernel, path) for kernel in lock.kernels]
    visited = set()
    while pending:
        source = pending.pop()
        if source in visited:
            continue
        visited.add(source)
        if source.path is not None and source.path.name.endswith(ALONE):
            kernel, sources_of_it = _locked_manifest(lock, source, source.path, checked=accept is not None)
            lock = lock.with_kernel(kernel)
            pending += sources_of_it
            continue
        target, version, revision = source.path or source.repository, source.version, source.revision
        selection = select(target, version=version, revision=revision, policy=policy, backend=backend)
        if source.path is not None and not selection.choice.accepted + selection.choice.rejected:
            _refuse_sources(source.path, read_small(source.path / MANIFEST, selection.place(), MAX_BYTES) or b"")
        names = _variants_to_lock(selection, variants, all_variants)
        resolved = [fetch(selection, name) for name in names]
        if accept is not None:
            accept(selection, names)
        lock = lock.with_kernel(_locked_kernel(lock, selection, resolved))
        depends = [each for one in resolved for each in one.metadata.kernel_depends]
        pending += [Source(each.repository, None, each.version, each.revision) for each in depends]
    lock.write()
    return lock


def _source(kernel: LockedKernel, path: Path) -> Source:
    if kernel.commit is None:
        return Source(path=path.parent / kernel.source)
    return Source(kernel.source, None, kernel.version, kernel.revision)


def _variants_to_lock(selection: Selection, variants: Sequence[str], all_variants: bool) -> Sequence[str]:
    names = (*selection.choice.accepted, *(name for name, _ in selection.choice.rejected))
    if missing := [name for name in variants if name not in names]:
        raise NotFoundError(f"{selection.place()}: has no variant {missing[0]}; it has {', '.join(names) or 'none'}")
    if all_variants:
        return names
    return variants or [selection.variant]


def _locked_kernel(lock: Lock, selection: Selection, resolved: Sequence[ResolvedKernel]) -> LockedKernel:
    files = {each.variant: _hashes(each) for each in resolved}
    source = selection.source
    beside = {} if source.path is None else _beside(source.path)
    return LockedKernel(lock.name_of(source), source.version, source.revision, selection.commit, files, beside)


def _beside(folder: Path) -> dict[str, str]:
    """Return the hash of the manifest at the root of a folder, from which a build copies it into the variants."""
    content = read_small(folder / MANIFEST, Place(str(folder), file=MANIFEST), MAX_BYTES, within=folder)
    return {} if content is None else {MANIFEST: hashlib.sha256(content).hexdigest()}


def _locked_manifest(lock: Lock, source: Source, path: Path, *, checked: bool) -> tuple[LockedKernel, list[Source]]:
    """Return the entry of a standalone manifest, and the repositories that it names.

    Raises: NotFoundError, MalformedError, RefusedError; if `checked`, ManifestError if loading would refuse it.
    """
    content = read_small(path, Place(str(path)), MAX_BYTES)
    if content is None:
        raise NotFoundError(f"{source}: there is no such file")
    _refuse_sources(path.parent, content)
    if checked:
        manifests.read(path, content, with_sources=True)
    files = {path.name: hashlib.sha256(content).hexdigest()}
    repositories = [parse_source(each) for each in named_repositories(content, str(path))]
    return LockedKernel(lock.name_of(source), None, None, None, {}, files), repositories


def _refuse_sources(folder: Path, content: bytes) -> None:
    """Raise RefusedError for a manifest of sources: their binaries belong to one machine and cannot be locked."""
    root = parse(content, MANIFEST).root
    build = root.get("build") if root is not None else None
    if build is not None and build.is_mapping and {"cpp", "cuda"} & build.value.keys():
        raise RefusedError(
            f"{folder}: its manifest has sources (build:), and a lock holds what is built of them; build variants into "
            f"{folder / 'build'} first (forge kernels build, with a build.toml), then lock the folder: "
            f"forge kernels lock {os.path.join('.', folder)}"
        )


def named_repositories(content: bytes, file: str) -> list[str]:
    """Return the repositories of a manifest's kernels: "org/name@v1" of each hub:org/name@v1:function."""
    root = parse(content, file).root
    names = [text for text in texts(root.plain() if root is not None else None) if text.startswith("hub:")]
    return list(dict.fromkeys(name.removeprefix("hub:").rpartition(":")[0] for name in names))


def check_locked(
    kernel: LockedKernel, lock: Lock, *, policy: Policy | None = None, backend: str | None = None
) -> tuple[Place, int]:
    """Run every check that precedes an import on a lock file's entry; return its place and its number of files."""
    folder = lock.path.parent / kernel.source
    if kernel.is_manifest:
        check_beside(kernel, lock, folder.parent)
        return Place(str(folder)), len(kernel.files)
    verified = verify(resolve_locked(kernel, lock, policy=policy, backend=backend))
    if kernel.commit is None:
        check_beside(kernel, lock, folder)
    return verified.resolved.place(), len(verified.files) + len(kernel.files)


def check_beside(kernel: LockedKernel, lock: Lock, folder: Path) -> None:
    """Raise IntegrityError unless the files beside the variants match the lock."""
    names = dict.fromkeys([*kernel.files, *([] if kernel.is_manifest else [MANIFEST])])
    for name in names:
        content = read_small(folder / name, Place(str(folder), file=name), MAX_BYTES, within=folder)
        if content is not None:
            kernel.check(name, content, lock.path)
        elif name in kernel.files:
            raise IntegrityError(f"{kernel.source}: {name} is missing, which {lock.path} holds")


def _hashes(resolved: ResolvedKernel) -> dict[str, str]:
    place, limit = resolved.place(), resolved.policy.max_file_bytes
    files = read_files(resolved.folder, place, max_file_bytes=limit, links_into=resolved.blobs)
    for pins in (resolved.pins, resolved.metadata.digest):
        if pins is not None:
            check_pins(files, pins, place)
    return {path: file.sha256 for path, file in files.items() if not is_bytecode(path)}
