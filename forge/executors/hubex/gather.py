"""Kernels from what a user names: repositories, folders, manifests, entries declared in Python."""

import hashlib
import importlib
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from forge import hub
from forge.executors.executor import Executor
from forge.executors.hubex.eager import define
from forge.executors.hubex.extension import KernelExtension, is_extension, loader_of, operation_of
from forge.executors.hubex.functions import Declarations
from forge.executors.hubex.kernels import Kernel, Origin
from forge.executors.hubex.operators import Operators, Target
from forge.hub.files import MANIFEST
from forge.hub.imports import ALWAYS
from forge.hub.lockfile import ALONE, as_lock
from forge.hub.manifest import (
    KernelEntry,
    Manifest,
    ManifestError,
    Mark,
    Problem,
    from_function,
    read_manifest,
    unmet,
)
from forge.hub.manifest.builder import find_nothing
from forge.hub.manifest.calls import kernel_problems
from forge.hub.manifest.parse import MAX_BYTES
from forge.hub.manifest.validate import register_resolver
from forge.hub.source import parse_source
from forge.ir.checks import check, check_list
from forge.patterns import Pattern, builtin


@dataclass(frozen=True)
class ManifestFile:
    """A manifest, read once."""

    path: Path
    content: bytes

    def read(self, **options: Any) -> Manifest:
        """Parse the bytes as read_manifest does."""
        return read_manifest(self.path, content=self.content, **options)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


Source = str | os.PathLike[str] | KernelEntry | Kernel | KernelExtension | type[KernelExtension]


def gather(
    sources: Iterable[Source],
    *,
    lock: Any = None,
    policy: hub.Policy | None = None,
    backend: str | None = None,
    allow_imports: Sequence[str] = (),
    argument: str = "kernels",
) -> list[Kernel]:
    """Return the kernels that `sources` name, in order: "org/name@v1", a folder of a repository, a manifest (.yaml), a
    lock file (.lock) with all that it holds, an entry, a class.

    Naming a folder or file allows it; a repository has to be allowed by the policy or the lock. No code of a source is
    imported before it passed every check (forge/hub). allow_imports: modules that kernels may import beyond the Hub's
    rules and the policy. argument: the name of `sources` in errors.
    Raises HubError, ManifestError or TypeError, which name the source and its problem.
    """
    check_list(sources, argument, "repositories, folders, manifests or entries")
    kernels: list[Kernel] = []
    for source in sources:
        if isinstance(source, Kernel):
            kernels.append(source)
        elif isinstance(source, KernelEntry):
            kernels.append(from_entry(source))
        elif is_extension(source):
            kernels.append(from_extension(source))
        elif not isinstance(source, (str, os.PathLike)):
            advice = "; give an executor as executors=[…]" if isinstance(source, Executor) else ""
            raise TypeError(f"{argument}: {source!r} is no repository, folder, manifest, lock file or kernel{advice}")
        else:
            access = (policy or _default_policy(source)).with_imports(allow_imports)
            kernels += _from_files(source, Origin(backend=backend, policy=access, lock=lock))
    return kernels


def _default_policy(source: str | os.PathLike[str]) -> hub.Policy:
    """Return the policy implied by naming a source."""
    if os.fspath(source).endswith(".lock"):
        return hub.Policy(trust="locked", local=True)
    return hub.Policy(local=local_manifest(source) is not None)


def operators(declared: Declarations | None = None) -> Operators:
    """Return the operators that manifests may name: torch's, aten's, forge's, the declared ones, others in torch.ops,
    and the builtin patterns."""
    shipped = (*builtin.ALL, *builtin.OPT_IN)
    return Operators({each.name: each.reference for each in shipped}, declared)


register_resolver(operators)


def from_entry(entry: KernelEntry, pattern: Pattern | None = None) -> Kernel:
    """Return the kernel of an entry declared in Python, for `pattern` unless that is a builtin one."""
    grad = entry.grad
    functions = {grad.kernel_name: grad.fn, grad.forward: grad.forward_fn, entry.kernel_name or "": entry.fn}
    declared = Declarations()
    kernel = _kernel(entry, functions.get, Origin(), declared, pattern)
    kernel = replace(kernel, assumes=entry.assumes_fn, samples=entry.samples_fn)
    define(declared.new.values(), [])
    return kernel


def operators_for(op: Any) -> tuple[Operators, Pattern | None]:
    """Return the operators that a declaration in Python may name, and the declaration's pattern."""
    return (Operators({op.name: op.reference}), op) if isinstance(op, Pattern) else (operators(), None)


def from_extension(declaration: KernelExtension | type[KernelExtension]) -> Kernel:
    """Return a kernel by class; its function is not loaded. Raises TypeError, or ManifestError with every problem."""
    op = operation_of(declaration)
    resolver, pattern = operators_for(op)
    extension, entry, options = loader_of(declaration, resolver)
    kernel = from_entry(entry, pattern)
    extension.check = lambda function: kernel_problems(replace(entry, fn=function), kernel.signature, find_nothing)
    return replace(kernel, declared=(op, extension, options), extension=extension)


# from files; an origin without a source holds the options with which sources are read


def _from_files(source: str | os.PathLike[str], access: Origin) -> list[Kernel]:
    text = os.fspath(source)
    if text.endswith(".lock"):
        lock = hub.read_lock(text)
        return _from_lock(lock, replace(access, lock=lock))
    path = local_manifest(source)
    if os.path.isfile(os.path.join(text, hub.BUNDLE)):
        return _from_bundle(Path(text), replace(access, lock=None))
    if path is not None and path.is_file():
        if not text.endswith(ALONE):
            _check_within(path, path.parent)
        file = _read(path)
        manifest = file.read(resolver=operators())
        if manifest.build.sources:
            location = os.path.abspath(path if text.endswith(ALONE) else path.parent)
            return _from_sources(manifest, file, replace(access, source=location))
    if path is not None and text.endswith(ALONE):
        return _from_alone(_read(path), access)
    return _from_repository(_resolve(source, access), path is not None, access)


def _resolve(source: str | os.PathLike[str], access: Origin) -> hub.ResolvedKernel:
    return hub.resolve(source, lock=access.lock, policy=access.policy, backend=access.backend)


def local_manifest(source: str | os.PathLike[str]) -> Path | None:
    """Return the path of a local source's manifest: the file itself, or the folder's manifest; None for a
    repository."""
    if os.fspath(source).endswith(ALONE):
        return Path(source)
    folder = parse_source(source).path
    return None if folder is None else folder / MANIFEST


def _read(path: Path) -> ManifestFile:
    """Read a manifest's bytes. Raises ManifestError for a file that cannot be read."""
    try:
        with path.open("rb") as file:
            return ManifestFile(path, file.read(MAX_BYTES + 1))
    except OSError as error:
        problem = Problem(Mark(str(path), 1, 1), f"cannot be read: {error.strerror or error}")
        raise ManifestError([problem]) from error


def _from_alone(file: ManifestFile, access: Origin) -> list[Kernel]:
    """Return the kernels of a standalone manifest: the locked version if the lock has it, else the file, which is
    trusted as the user's own, whoever wrote the functions that it names."""
    lock = as_lock(access.lock)
    entry = None if lock is None else lock.manifest(file.path)
    if lock is not None and entry is not None:
        entry.check(file.path.name, file.content, lock.path)
    return _from_manifest(file, None, replace(access, source=os.path.abspath(file.path), content=file.sha256))


def _from_sources(manifest: Manifest, file: ManifestFile, origin: Origin) -> list[Kernel]:
    """Return the kernels of the matching prebuilt variant next to the sources; else, unless a lock pins the files, of
    the library built from the sources."""
    path = Path(manifest.file)
    selection = variants_beside(path, lock=origin.lock, policy=origin.policy, backend=origin.backend)
    reasons = [f"{name}: {reason}" for name, reason in selection.choice.rejected]
    if origin.lock is not None or selection.choice.accepted:
        resolved = hub.fetch(selection, selection.variant)
        variant_file = _manifest_of(resolved, file) if path.name == MANIFEST else file
        try:
            return _from_variant(resolved, variant_file, origin)
        except hub.KernelImportError as error:
            if origin.lock is not None:
                raise
            warnings.warn(f"forge: {error}; its sources are built instead", hub.HubNotice, stacklevel=2)
            reasons.insert(0, str(error))
    _check_requirements(manifest)
    prebuilt = "; ".join(reasons) or f"there is no variant in {path.parent / 'build'}"
    built = hub.build_kernels(manifest, policy=origin.policy, prebuilt=prebuilt)
    hub.load_built(built)
    return _from_manifest(file, None, replace(origin, content=built.key))


def variants_beside(path: Path, **options: Any) -> hub.Selection:
    """Return the prebuilt variants in a manifest's folder, without the folder itself if it is a package. options: the
    options of hub.select."""
    selection = hub.select(path.parent, **options)
    is_package = selection.build == path.parent.resolve().parent
    return replace(selection, choice=replace(selection.choice, accepted=())) if is_package else selection


def _from_lock(lock: hub.Lock, access: Origin) -> list[Kernel]:
    """Return all kernels of a lock file; repositories that are only dependencies need no manifest."""
    alone = [_read(lock.path.parent / each.source) for each in lock.kernels if each.is_manifest]
    resolved = [
        (hub.resolve_locked(each, lock, policy=access.policy, backend=access.backend), each.commit is None)
        for each in lock.kernels
        if not each.is_manifest
    ]
    dependencies: set[str | None] = {each.source for one, _ in resolved for each in one.depends}
    for file in alone:
        dependencies |= {parse_source(name).repository for name in hub.named_repositories(file.content, str(file.path))}
    kernels: list[Kernel] = []
    for one, local in resolved:
        if one.source not in dependencies or (one.folder / MANIFEST).exists():
            kernels += _from_repository(one, local, access)
    return [*kernels, *(kernel for file in alone for kernel in _from_alone(file, access))]


def _from_bundle(folder: Path, access: Origin) -> list[Kernel]:
    """Return the kernels of a bundle of forge.bundle. Raises NotFoundError, which names the required kernels that
    cannot be used."""
    result: list[Kernel] = []
    for part in hub.read_bundle(folder, access.policy or hub.Policy()):
        names = ", ".join(f"{name} of {op}" for op, name in part.kernels)
        path = folder / part.manifest
        try:
            if part.repository:
                resolved = _resolve(path.parent, access)
                kernels = _from_variant(resolved, _read(path), replace(access, source=os.path.abspath(folder)))
            else:
                kernels = _from_files(path, access)
        except hub.HubError as error:
            raise hub.NotFoundError(
                f"{folder}: the bundle needs {names}, which cannot be used here: {error}"
            ) from error
        available = {(kernel.operation, kernel.name) for kernel in kernels}
        missing = ", ".join(f"{name} of {op}" for op, name in part.kernels if (op, name) not in available)
        check(not missing, lambda path=path, missing=missing: f"{path}: has no kernel {missing}", hub.NotFoundError)
        result += kernels
    return result


def _from_repository(resolved: hub.ResolvedKernel, local: bool, access: Origin) -> list[Kernel]:
    outside = Path(resolved.source) / MANIFEST if local else None
    file = _manifest_of(resolved, _read(outside) if outside is not None and outside.is_file() else None)
    location = os.path.abspath(resolved.source) if local else f"{resolved.source}@{resolved.commit}"
    return _from_variant(resolved, file, replace(access, source=location))


def _from_variant(resolved: hub.ResolvedKernel, file: ManifestFile, origin: Origin) -> list[Kernel]:
    file.read(resolver=operators(), with_sources=False)  # report mistakes before any import
    lock = as_lock(origin.lock)

    def check_manifest(verified: hub.VerifiedKernel) -> None:
        inside = verified.files.get(MANIFEST)
        if file.path == resolved.folder / MANIFEST and (inside is None or inside.sha256 != file.sha256):
            raise hub.IntegrityError(f"{file.path}: changed after it was read")
        if file.path != resolved.folder / MANIFEST and lock is not None:
            lock.find(parse_source(file.path.parent)).check(file.path.name, file.content, lock.path)

    module = hub.load(resolved, check_manifest)
    origin = replace(origin, content=_content(module), backend=resolved.backend, policy=resolved.policy)
    return _from_manifest(file, module, origin)


def _content(module: ModuleType) -> str:
    return next(each.verified.content for each in hub.loaded_kernels() if each.module is module)


def _manifest_of(resolved: hub.ResolvedKernel, outside: ManifestFile | None) -> ManifestFile:
    """Return the manifest in the selected variant, since only the variant is fetched, locked and hashed. A local folder
    may have the manifest's source at the root, from which a build copies it. Raises NoManifestError if there is none,
    MalformedError if the copy differs from its source."""
    place = resolved.folder / MANIFEST
    _check_within(place, resolved.folder if outside is None else outside.path.parent, resolved.blobs)
    if outside is not None:
        _check_within(outside.path, outside.path.parent, resolved.blobs)
    inside = _read(place) if place.is_file() else None
    if inside is not None and outside is not None and inside.content != outside.content:
        raise hub.MalformedError(f"{place} is not as {outside.path}, of which it is a copy; build the repository again")
    manifest = inside or outside
    if manifest is None:
        raise hub.NoManifestError(
            f"{resolved.place()}: has no {MANIFEST}, so that forge does not know which operators its kernels "
            f"implement; its place is build/{resolved.variant}/{MANIFEST}. For a repository of somebody else, write a "
            'manifest on this machine whose kernel_name is "hub:org/name:function", and pass that file'
        )
    return manifest


def _check_within(place: Path, *folders: Path | None) -> None:
    """Raise MalformedError for a link that leaves both a repository's folder and the cache's files of it."""
    real = place.resolve()
    if not any(real.is_relative_to(folder.resolve()) for folder in folders if folder is not None):
        raise hub.MalformedError(f"{place}: is a link to {real}, which is outside of the repository")


def _from_manifest(file: ManifestFile, module: ModuleType | None, origin: Origin) -> list[Kernel]:
    others: dict[str, ModuleType] = {}

    def load(repository: str, attribute: str) -> Any:
        if repository not in others:
            others[repository] = hub.load(_resolve(repository, origin))
        return hub.attribute(others[repository], attribute, origin.policy.imports if origin.policy is not None else ())

    def find(name: str) -> Any:
        return _find(name, module, file.path, load)

    manifest = file.read(resolver=operators(), find=find, with_sources=module is None)
    _check_requirements(manifest)
    origin = replace(origin, content=" ".join([origin.content, *map(_content, others.values())]))
    declared = Declarations()
    declared.declare([op for op in manifest.ops if op.kind == "func"], find)
    kernels = [_kernel(entry, find, origin, declared) for entry in manifest.kernels]
    _check_not_themselves(kernels)
    if any(each.target.function is not None and not each.target.function.is_reproducible for each in kernels):
        kernels = [replace(each, origin=Origin()) for each in kernels]  # another process cannot read this manifest
    define(declared.new.values(), kernels)
    return kernels


def _check_not_themselves(kernels: list[Kernel]) -> None:
    """Raise ManifestError for a kernel whose function is the operator that it implements."""
    problems = [
        Problem(each.entry.mark, f"kernel {each.entry.kernel_name!r} is the operator itself, which has no other code")
        for each in kernels
        if each.target.function is not None
        and not each.target.function.foreign
        and each.target.function.is_run_by(each.function)
    ]
    if problems:
        raise ManifestError(problems)


def _check_requirements(manifest: Manifest) -> None:
    missing = unmet(manifest.requires)
    if missing:
        raise hub.NotFoundError(f"{manifest.file}: its requirements are not met: {'; '.join(missing)}")


def _kernel(
    entry: KernelEntry,
    find: Callable[[str], Any],
    origin: Origin,
    declared: Declarations,
    pattern: Pattern | None = None,
) -> Kernel:
    resolver = operators(declared)
    if entry.op_kind == "pattern":
        pattern = pattern or _pattern(entry.op, find)
        parameters = {name: name for name in pattern.parameters}
        target: Target | None = Target(pattern.symbol, from_function(pattern.reference, pattern.name), parameters)
        signature = None if target is None else target.signature
    else:
        signature, target = resolver.resolve(entry.op), resolver.target(entry.op)
    if signature is None or target is None:
        raise NotImplementedError(
            f"{entry.mark}: kernel {entry.name}: forge has no symbol for {entry.op} with the same arguments"
        )
    if target.function is not None and not target.function.is_reproducible:
        origin = Origin()
    names = entry.grad.kernel_name, entry.grad.forward, entry.assumes, entry.samples
    backward, forward, assumes, samples = (find(name) if name else None for name in names)
    function = find(entry.kernel_name or "")
    return Kernel(entry, signature, target, function, backward, forward, pattern, origin, assumes, samples)


def kernel_of(entry: KernelEntry, find: Callable[[str], Any], origin: Origin) -> Kernel:
    """Return the kernel of an entry for operators and patterns of torch or forge, without an import."""
    return _kernel(entry, find, origin, Declarations())


_patterns: dict[Any, Pattern] = {}


def _pattern(name: str, find: Callable[[str], Any]) -> Pattern:
    """Return a builtin pattern, or a pattern whose reference is in a kernel's repository."""
    if not name.startswith("python:"):
        return builtin.by_name(name)
    reference = find(name)
    if isinstance(reference, Pattern):
        return reference
    return _patterns.setdefault(reference, Pattern(reference))


def _find(name: str, module: ModuleType | None, path: Path, load: Callable[[str, str], Any]) -> Any:
    """Resolve a manifest's function: `ns::op`, `python:module:function` (`.module` within the repository),
    `hub:org/repo:function`, or a name in the repository's module. Raises ImportError if there is none."""
    if name.startswith("hub:"):
        repository, _, attribute = name.removeprefix("hub:").rpartition(":")
        return load(repository, attribute)
    if name.startswith("python:"):
        where, _, attribute = name.removeprefix("python:").rpartition(":")
        return _attribute(_import(where, module, path), attribute)
    if "::" in name:
        namespace, _, operator = name.partition("::")
        return _attribute(getattr(torch.ops, namespace), operator)
    if module is None:
        raise ImportError(f"{name} is a name in a repository, but {path.name} stands alone; write python:module:{name}")
    return _attribute(module, name)


def _import(where: str, module: ModuleType | None, path: Path) -> ModuleType:
    if where.startswith("."):
        if module is None:
            raise ImportError(f"{where} is relative to a repository, but {path.name} stands alone")
        return importlib.import_module(where, module.__name__)
    if module is not None and where.split(".")[0] not in ALWAYS:
        raise ImportError(
            f"{where} is neither the standard library nor torch, and no part of the repository, whose modules are "
            "written python:.module:function"
        )
    return importlib.import_module(where)


def _attribute(owner: Any, name: str) -> Any:
    for part in name.split("."):
        if not hasattr(owner, part):
            raise ImportError(f"{getattr(owner, '__name__', owner)} has no {part}")
        owner = getattr(owner, part)
    return owner
