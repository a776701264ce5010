"""Making a lock file: each kernel is resolved, fetched, and every file of the wanted variants hashed."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from forge.hub.errors import NotFoundError
from forge.hub.files import check_pins, is_bytecode, read_files
from forge.hub.lockfile import Lock, LockedKernel, read_lock
from forge.hub.policy import Policy
from forge.hub.resolver import Resolved, Selection, fetch, select
from forge.hub.source import Source, parse_source


def lock_kernels(
    sources: "Iterable[str | os.PathLike[str]]",
    path: Path | str,
    *,
    variants: Sequence[str] = (),
    all_variants: bool = False,
    policy: Policy | None = None,
    backend: str | None = None,
) -> Lock:
    """Writes the commit and the sha256 of every file of these kernels to a lock file, beside what it holds already.

    sources: as `resolve` takes them; none means all that the file holds, at their newest commits. variants: which to
    lock instead of the one for this system; all_variants: all. What a kernel depends on is locked with it.
    """
    path = Path(path)
    lock = read_lock(path) if path.exists() else Lock(path)
    pending = [parse_source(source) for source in sources] or [_source(kernel, path) for kernel in lock.kernels]
    done = set()
    while pending:
        source = pending.pop()
        if source in done:
            continue
        done.add(source)
        options = {} if source.path is not None else {"version": source.version, "revision": source.revision}
        selection = select(source.path or source.repository, policy=policy, backend=backend, **options)
        resolved = [fetch(selection, name) for name in _wanted(selection, variants, all_variants)]
        lock = lock.with_kernel(_locked(lock, selection, resolved))
        depends = [each for one in resolved for each in one.metadata.kernel_depends]
        pending += [Source(each.repository, None, each.version, each.revision) for each in depends]
    lock.write()
    return lock


def _source(kernel: LockedKernel, path: Path) -> Source:
    if kernel.commit is None:
        return Source(None, path.parent / kernel.source, None, None)
    return Source(kernel.source, None, kernel.version, kernel.revision)


def _wanted(selection: Selection, variants: Sequence[str], all_variants: bool) -> Sequence[str]:
    known = (*selection.choice.accepted, *(name for name, _ in selection.choice.rejected))
    if missing := [name for name in variants if name not in known]:
        raise NotFoundError(f"{selection.place()}: has no variant {missing[0]}; it has {', '.join(known) or 'none'}")
    if all_variants:
        return known
    return variants or [selection.variant]


def _locked(lock: Lock, selection: Selection, resolved: Sequence[Resolved]) -> LockedKernel:
    files = {each.variant: _hashes(each) for each in resolved}
    source = selection.source
    return LockedKernel(lock.name_of(source), source.version, source.revision, selection.commit, files)


def _hashes(resolved: Resolved) -> dict[str, str]:
    place, limit = resolved.place(), resolved.policy.max_file_bytes
    files = read_files(resolved.folder, place, max_file_bytes=limit, links_into=resolved.blobs)
    for pins in (resolved.pins, resolved.metadata.digest):
        if pins is not None:
            check_pins(files, pins, place)
    return {path: file.sha256 for path, file in files.items() if not is_bytecode(path)}
