"""The resolution of a user's reference to a folder with the files of one variant; nothing is imported."""

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from forge.hub import client, compat
from forge.hub.cache import Record, RepositoryCache, repository_cache
from forge.hub.errors import HubNotice, MalformedError, NotFoundError, Place, RefusedError, UnreachableError
from forge.hub.files import Pins
from forge.hub.lockfile import Lock, LockedKernel, as_lock
from forge.hub.metadata import Metadata, read_metadata
from forge.hub.policy import Policy
from forge.hub.source import COMMIT, Source, parse_source
from forge.hub.variants import Choice, choose, describe

SOURCES = "torch-ext"  # beside build/: the Python sources of a repository


@dataclass(frozen=True)
class Selection:
    """The variants chosen for loading, before any of their files is fetched.

    commit: None for a folder. build: the folder that holds the variants. choice: the variants that fit, the best
    first, and the reasons against the others. record: the Hub's listing. locked: the entry of the lock file.
    """

    source: Source
    commit: str | None
    build: Path
    choice: Choice
    policy: Policy
    backend: str
    record: Record | None = None
    lock: Lock | None = None
    locked: LockedKernel | None = None

    @property
    def variant(self) -> str:
        """The best variant. Raises NotFoundError, with the reason for each, if none fits."""
        if not self.choice.accepted:
            raise NotFoundError(
                f"{self.place()}: no variant fits this system (backend {self.backend}):{describe(self.choice.rejected)}"
            )
        return self.choice.accepted[0]

    def place(self, variant: str | None = None) -> Place:
        return Place(str(self.source), self.commit, variant)

    def is_cached(self, variant: str) -> bool:
        """Return whether the kernel is from the Hub and the cache holds its complete variant."""
        cache = repository_cache(self.source.repository)
        return self.commit is not None and cache.has(self.commit, variant, self.record)


@dataclass(frozen=True)
class ResolvedKernel:
    """A variant of a kernel whose files are local and not yet verified.

    source: "org/name" or the folder. folder: the variant's. rejected: (variant, reason) of each other.
    pins: the required hashes of its files, from the lock or the Hub's listing of the commit. depends: the kernels that
    it requests while it is imported.
    """

    source: str
    commit: str | None
    variant: str
    folder: Path
    metadata: Metadata
    rejected: tuple[tuple[str, str], ...]
    backend: str
    policy: Policy
    pins: Pins | None = None
    blobs: Path | None = None
    depends: tuple["ResolvedKernel", ...] = ()

    def place(self) -> Place:
        return Place(self.source, self.commit, self.variant)


def resolve(
    source: "str | os.PathLike[str]",
    *,
    version: int | None = None,
    revision: str | None = None,
    lock: Lock | Path | str | None = None,
    policy: Policy | None = None,
    backend: str | None = None,
) -> ResolvedKernel:
    """Find a kernel, choose its variant for this system, and fetch it unless the cache has it.

    source: "org/name", "org/name@v1", "org/name@<revision>", or a folder. lock: the lock file that must hold it.
    backend: "cpu" chooses a variant for the CPU even if torch has another backend; by default, it is the fallback for a
    repository without a variant for torch's backend, because CPU tensors exist everywhere.
    Raises: HubError, whose subclass tells the cause.
    """
    selection = select(source, version=version, revision=revision, lock=lock, policy=policy, backend=backend)
    return fetch(selection, selection.variant)


def resolve_locked(
    kernel: LockedKernel, lock: Lock, *, policy: Policy | None = None, backend: str | None = None
) -> ResolvedKernel:
    """Resolve a kernel in a lock file, like `resolve`."""
    source = kernel.source if kernel.commit is not None else str(lock.path.parent / kernel.source)
    version, revision = kernel.version, kernel.revision
    return resolve(source, version=version, revision=revision, lock=lock, policy=policy, backend=backend)


def available(
    source: "str | os.PathLike[str]",
    *,
    version: int | None = None,
    revision: str | None = None,
    policy: Policy | None = None,
    backend: str | None = None,
) -> bool:
    """Return whether a kernel has a variant for this system, False for an unknown repository or version."""
    try:
        selection = select(source, version=version, revision=revision, policy=policy, backend=backend)
    except NotFoundError:
        return False
    return bool(selection.choice.accepted)


def select(
    source: "str | os.PathLike[str]",
    *,
    version: int | None = None,
    revision: str | None = None,
    lock: Lock | Path | str | None = None,
    policy: Policy | None = None,
    backend: str | None = None,
) -> Selection:
    """Choose the variant like `resolve`, but fetch only the Hub's listing."""
    compat.require()
    policy, lock = policy or Policy(), as_lock(lock)
    request = parse_source(source, version=version, revision=revision)
    system = _backend(backend, request)
    locked = lock.find(request) if lock is not None else None
    if locked is None and policy.trust == "locked":
        raise RefusedError(f'{request}: trust="locked" takes what a lock file holds, and no lock was given')
    find = _select_folder if request.path is not None else _select_repository

    def on(backend: str) -> Selection:
        selection = replace(find(request, locked, policy, backend), lock=lock)
        return selection if lock is None or locked is None else _only_locked(selection, lock, locked)

    selection = on(system)
    if selection.choice.accepted or backend is not None or system == "cpu":
        return selection
    on_cpu = on("cpu")
    return on_cpu if on_cpu.choice.accepted else selection


def _backend(backend: str | None, source: Source) -> str:
    try:
        return compat.active_backend(backend)
    except ValueError as error:
        raise NotFoundError(f"{source}: {error}") from error


def _only_locked(selection: Selection, lock: Lock, locked: LockedKernel) -> Selection:
    variants = locked.variants
    left_out = [(name, f"is not in {lock.path}") for name in selection.choice.accepted if name not in variants]
    accepted = tuple(name for name in selection.choice.accepted if name in variants)
    return replace(selection, choice=Choice(accepted, (*left_out, *selection.choice.rejected)))


def _select_folder(source: Source, locked: LockedKernel | None, policy: Policy, backend: str) -> Selection:
    """Select from a local folder: the variants in it, those in its build/, or the folder itself, in this order."""
    if locked is None and not policy.local:
        raise RefusedError(f"{source}: is a folder of this machine; allow it with Policy(local=True), or lock it")
    root = Path(os.path.realpath(source.folder))  # resolves to one of the links if they form a cycle
    if not root.is_dir():
        problem = "is a file, not a repository's folder" if root.exists() else "there is no such folder"
        raise NotFoundError(f"{source}: {problem}; one of the Hub is 'owner/name'")
    rejected: tuple[tuple[str, str], ...] = ()
    for build, names in ((root, _variant_folders(root)), (root / "build", _folders(root / "build"))):
        choice = choose(names, backend)
        rejected += choice.rejected
        if choice.accepted:
            return Selection(source, None, build, replace(choice, rejected=rejected), policy, backend, locked=locked)
    if any((root / name).is_file() for name in ("__init__.py", "metadata.json")):
        choice = choose([root.name], backend) if _is_variant(root.name) else Choice((root.name,), ())
        return Selection(source, None, root.parent, choice, policy, backend, locked=locked)
    return Selection(source, None, root / "build", Choice((), rejected), policy, backend, locked=locked)


def _folders(build: Path) -> list[str]:
    folders = [each.name for each in build.iterdir() if each.is_dir()] if build.is_dir() else []
    return [name for name in folders if not name.startswith((".", "_"))]


def _variant_folders(root: Path) -> list[str]:
    return [name for name in _folders(root) if _is_variant(name)]


def _is_variant(name: str) -> bool:
    return name != SOURCES and name.startswith(("torch-", "torch1", "torch2", "tvm-ffi"))


def _select_repository(source: Source, locked: LockedKernel | None, policy: Policy, backend: str) -> Selection:
    cache = repository_cache(source.repository)
    commit = _commit(source, cache) if locked is None or locked.commit is None else locked.commit
    cached_record = cache.record(commit)
    trusted = cached_record.trusted if cached_record is not None else None
    if locked is None and not policy.names(source.repository):
        trusted = _check_trust(source, trusted, policy)
    files = cached_record.files if cached_record is not None else _list_files(source, commit, cache)
    record = Record(files, trusted) if files is not None else None
    if record not in (None, cached_record):
        cache.write_record(commit, record)
    names = record.variants() if record is not None else cache.variants(commit)
    build = cache.snapshot(commit) / "build"
    selection = Selection(source, commit, build, choose(names, backend), policy, backend, record, locked=locked)
    return _without_absent(selection)


def _commit(source: Source, cache: RepositoryCache) -> str:
    """Return the commit of a version or revision: requested from the Hub once per process, else the last known one."""
    if source.revision is not None and COMMIT.fullmatch(source.revision):
        return source.revision
    name = f"v{source.version}" if source.version is not None else source.revision or ""
    try:
        refs = client.refs(source.repository)
    except UnreachableError as error:
        refs = cache.refs()
        if name not in refs:
            listing = ", ".join(refs) or "nothing"
            raise UnreachableError(f"{source}: {error}; and the cache holds {listing} of it{_hint(source)}") from error
        if not compat.is_offline():
            _notice(f"{source}: the cache serves commit {refs[name][:12]}, because {error}")
    if name not in refs:
        versions = ", ".join(sorted(refs)) or "none"
        problem = f"there is no {name!r}" if name else f"give a version, as in {source.repository}@v1, or a revision"
        raise NotFoundError(f"{source}: {problem}; branches and tags: {versions}{_hint(source)}")
    if not COMMIT.fullmatch(refs[name]):
        raise MalformedError(f"{source}: the Hub says that {name} is the commit {refs[name]!r}")
    cache.write_ref(name, refs[name])
    return refs[name]


def _hint(source: Source) -> str:
    """Return a hint for a user who means a folder by a string that is parsed as a repository of the Hub."""
    is_folder = Path(source.repository).is_dir()
    return f"; for the folder of this name, write ./{source.repository}" if is_folder else ""


def _check_trust(source: Source, trusted: bool | None, policy: Policy) -> bool:
    """Return the Hub's trust in the publisher, or `trusted` if it was requested before. Raises RefusedError unless it
    is trusted."""
    publisher = source.repository.split("/")[0]
    allow = f"allow it with Policy(repositories=({source.repository!r},)), or lock it: forge kernels lock --trust any"
    if trusted is None and policy.hub_publishers:
        try:
            trusted = client.is_trusted(publisher)
        except UnreachableError as error:
            raise RefusedError(f"{source}: nobody says whether {publisher!r} is trusted: {error}; {allow}") from error
    if not (trusted and policy.hub_publishers):
        raise RefusedError(f"{source}: {publisher!r} is not among the trusted publishers; {allow}")
    return trusted


def _list_files(source: Source, commit: str, cache: RepositoryCache) -> Mapping[str, client.ListedFile] | None:
    """List the files of a commit; None if the Hub does not answer and another tool filled the cache."""
    try:
        client.refs(source.repository)
        return client.files(source.repository, commit)
    except UnreachableError as error:
        if not cache.variants(commit):
            raise UnreachableError(f"{source}: commit {commit[:12]} is not in the cache, and {error}") from error
        return None


def _without_absent(selection: Selection) -> Selection:
    """Return the selection, limited to cached variants if the best one is not cached and the Hub does not answer."""
    accepted = selection.choice.accepted
    if not accepted or selection.is_cached(accepted[0]):
        return selection
    try:
        client.refs(selection.source.repository)
    except UnreachableError as error:
        variants = tuple(filter(selection.is_cached, accepted))
        absent = [(name, f"is not in the cache, and {error}") for name in accepted if name not in variants]
        return replace(selection, choice=Choice(variants, (*absent, *selection.choice.rejected)))
    return selection


def _notice(text: str) -> None:
    warnings.warn(f"forge: {text}", HubNotice, stacklevel=2)


def fetch(selection: Selection, variant: str) -> ResolvedKernel:
    """Fetch the files and metadata of a variant, and its dependencies, from the cache or the Hub."""
    return _fetch(selection, variant, ())


def _fetch(selection: Selection, variant: str, dependents: tuple[str, ...]) -> ResolvedKernel:
    """Fetch like `fetch`. dependents: the kernels that depend on this one, the outermost first."""
    place, blobs = selection.place(variant), None
    folder = selection.build / variant
    if selection.commit is not None:
        blobs = repository_cache(selection.source.repository).blobs
        _download(selection, variant, selection.commit)
    elif not folder.resolve().is_relative_to(selection.build):
        raise MalformedError(f"{place}: is a link to {folder.resolve()}, which is outside of the repository")
    if not folder.is_dir():
        raise MalformedError(f"{place}: has no folder build/{variant}")
    name = _name(selection.source, variant)
    metadata = read_metadata(folder, place, name=name, backend=selection.backend, links_into=blobs)
    return ResolvedKernel(
        selection.source.repository or str(selection.source.folder.resolve()),
        selection.commit,
        variant,
        folder,
        metadata,
        selection.choice.rejected,
        selection.backend,
        selection.policy,
        _pins(selection, variant),
        blobs,
        _depends(selection, metadata, (*dependents, selection.source.repository)),
    )


def _download(selection: Selection, variant: str, commit: str) -> None:
    if selection.is_cached(variant):
        return
    limit = selection.policy.max_file_bytes
    for path, entry in selection.record.of(variant).items() if selection.record else ():
        if entry.size > limit:
            place = selection.place(variant).at(path)
            raise MalformedError(f"{place}: has {entry.size} bytes, but at most {limit} are allowed")
    try:
        client.download(selection.source.repository, commit, variant, compat.cache_root())
    except UnreachableError as error:
        raise UnreachableError(f"{selection.place(variant)}: is not in the cache, and {error}") from error


def _name(source: Source, variant: str) -> str:
    """Return the name of a kernel without one in its metadata: its repository's, or that of the parent folder of
    build/."""
    if source.repository:
        return source.repository.split("/")[1]
    root = source.folder.resolve()
    return next(each.name for each in (root, *root.parents) if each.name not in ("build", variant))


def _pins(selection: Selection, variant: str) -> Pins | None:
    if selection.locked is not None and selection.lock is not None:
        return selection.locked.pins(variant, selection.lock.path)
    if selection.record is None:
        return None
    pins = {path: each.pin for path, each in selection.record.of(variant).items()}
    return Pins(pins, f"the Hub's listing of commit {str(selection.commit)[:12]}")


def _depends(selection: Selection, metadata: Metadata, dependents: tuple[str, ...]) -> tuple[ResolvedKernel, ...]:
    result = []
    for each in metadata.kernel_depends:
        if each.repository in dependents:
            way = " and ".join(dependents[dependents.index(each.repository) + 1 :]) or "its own metadata"
            raise MalformedError(f"{each.repository}: depends on itself, by way of {way}")
        dependency = select(
            each.repository,
            version=each.version,
            revision=each.revision,
            lock=selection.lock,
            policy=selection.policy,
            backend=selection.backend,
        )
        result.append(_fetch(dependency, dependency.variant, dependents))
    return tuple(result)
