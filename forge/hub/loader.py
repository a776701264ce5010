"""The loader of resolved kernels: every check first, then an import that touches nothing else.

A kernel is imported under a name made of its own and the hash of its files, so two versions of one kernel, or two
kernels of one id, coexist. Its Python comes from the bytes that were verified: no bytecode is read or written.
Registrations of a native module under torch.ops are not checked.
"""

import ast
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import linecache
import os
import re
import sys
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from forge.hub import compat, private_copies
from forge.hub.errors import HubError, HubNotice, IntegrityError, KernelImportError, MalformedError, Place, RefusedError
from forge.hub.files import NATIVE, File, check_pins, content_hash, is_opened, read_files
from forge.hub.imports import check_id, check_imports
from forge.hub.metadata import Metadata, dependency_modules
from forge.hub.resolver import ResolvedKernel
from forge.ir.interpreter import paused_gc
from forge.ir.locks import new_lock

PREFIX = "forge_kernel_"


@dataclass(frozen=True)
class VerifiedKernel:
    """A kernel whose files passed every check.

    content: the hash of all files. root: the folder of its package. trees: the ASTs from the checks, until it is
    imported. copies: the folder of this process's copies, if code opens any file by its path. allowed: modules that it
    may import besides torch and the standard library.
    """

    resolved: ResolvedKernel
    files: Mapping[str, File]
    content: str
    root: str
    depends: tuple["VerifiedKernel", ...] = ()
    trees: dict[str, ast.Module] = field(default_factory=dict, repr=False, compare=False)
    copies: Path | None = field(default=None, compare=False)
    allowed: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """The kernel's names, as check_imports takes them."""
        return _names(self.resolved.metadata)

    @property
    def module_name(self) -> str:
        name = re.sub(r"\W", "_", self.resolved.metadata.name, flags=re.ASCII)
        return f"{PREFIX}{name}_{self.content[:16]}"


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel that this process has imported."""

    verified: VerifiedKernel
    module: types.ModuleType


_lock = new_lock()
_loaded: dict[str, LoadedKernel] = {}
_packages: dict[str, VerifiedKernel] = {}
_import_checks: set[tuple[str, str, frozenset[str], frozenset[str]]] = set()


def load(
    resolved: ResolvedKernel, before_import: Callable[[VerifiedKernel], None] = lambda verified: None
) -> types.ModuleType:
    """Verify a kernel on every call, and import it on the first. `before_import` may refuse a verified kernel.

    Raises: HubError, whose subclass tells the failed check, before any code of the kernel or of its dependencies runs,
    except for KernelImportError.
    """
    with paused_gc():
        if any(each.verified.resolved.folder == resolved.folder for each in loaded_kernels()):
            verified = verify(resolved)
            before_import(verified)
            if verified.content in _loaded:
                return _loaded[verified.content].module
        verified = verify(resolved, to_load=True)
        before_import(verified)
        with _lock:
            return _load(verified)


def attribute(module: types.ModuleType, name: str, imports: Collection[str] = ()) -> object:
    """Return an attribute of a loaded kernel by its dotted name. A module that the kernel's `__init__` does not import
    is imported after its imports are checked. imports: modules that it may import besides those of its policy.

    Raises: ImportError for an unknown attribute; RefusedError for imports that are not allowed.
    """
    owner: object = module
    for part in name.split("."):
        if not hasattr(owner, part):
            inner = f"{getattr(owner, '__name__', '')}.{part}"
            verified = verified_of(inner) if isinstance(owner, types.ModuleType) else None
            if verified is None or _find(verified, inner, inner.partition(".")[2].replace(".", "/")) is None:
                raise ImportError(f"{getattr(owner, '__name__', owner)} has no {part}")
            _import_inner(verified, inner, imports)
        owner = getattr(owner, part)
    return owner


def _import_inner(verified: VerifiedKernel, name: str, imports: Collection[str]) -> None:
    """Import a submodule of a loaded kernel."""
    check_imports(
        verified.files,
        root=verified.root,
        names=verified.names,
        allowed=verified.allowed | {*imports},
        place=verified.resolved.place(),
        extra_modules=[name.partition(".")[2]],
    )
    with _lock, _nothing_else_changes(verified.resolved.place()):
        try:
            importlib.import_module(name)
        except Exception as error:
            place = verified.resolved.place()
            raise KernelImportError(
                f"{place}: {name.partition('.')[2]} raised while it was imported: {type(error).__name__}: {error}"
            ) from error


def loaded_kernels() -> tuple[LoadedKernel, ...]:
    """Return the kernels of this process, in the order in which they were imported."""
    return tuple(_loaded.values())


def content_of(module: str) -> str | None:
    """Return the hashes of the loaded kernel that a module belongs to and of its dependencies; None for other
    modules."""
    verified = verified_of(module)
    return None if verified is None else " ".join(_contents(verified))


def verified_of(module: str) -> VerifiedKernel | None:
    """Return the loaded kernel that a module belongs to."""
    return _packages.get(module.partition(".")[0])


def _contents(verified: VerifiedKernel) -> Iterator[str]:
    yield verified.content
    for each in verified.depends:
        yield from _contents(each)


def verify(resolved: ResolvedKernel, *, to_load: bool = False) -> VerifiedKernel:
    """Run every check before an import: links, sizes, lock, listing, digest, signature, dependencies, imports and id.

    to_load: copy the files of a kernel that opens any by its path (native libraries, data) for this process while they
    are hashed; they are opened from the copy.
    """
    copy_to = private_copies.new_folder() if to_load and _has_opened(resolved.folder) else None
    try:
        return _verify(resolved, to_load, copy_to)
    except BaseException:
        if copy_to is not None:
            private_copies.drop(copy_to)
        raise


def _has_opened(folder: Path) -> bool:
    """Return whether the system or a variant's code opens files by their path: libraries, tables, other sources."""
    return any(is_opened(name) for _, _, names in os.walk(folder) for name in names)


def _verify(resolved: ResolvedKernel, to_load: bool, copy_to: Path | None) -> VerifiedKernel:
    place, metadata = resolved.place(), resolved.metadata
    depends = tuple(verify(each, to_load=to_load) for each in resolved.depends)
    limit = resolved.policy.max_file_bytes
    files = read_files(resolved.folder, place, max_file_bytes=limit, links_into=resolved.blobs, copy_to=copy_to)
    for pins in (resolved.pins, metadata.digest):
        if pins is not None:
            check_pins(files, pins, place)
    described = files.get("metadata.json")
    if (described and described.sha256) != metadata.sha256:
        raise IntegrityError(f"{place.at('metadata.json')}: changed while the kernel was checked")
    _check_signature(resolved)
    root, content = _package_root(resolved, files), content_hash(files)
    modules = frozenset(dependency_modules(metadata, resolved.backend, place))
    allowed = modules | {*resolved.policy.imports, *(["kernels"] if depends else [])}
    names, trees = _names(metadata), {}
    if (content, root, names, allowed) not in _import_checks:
        trees = check_imports(files, root=root, names=names, allowed=allowed, place=place)
        _import_checks.add((content, root, names, allowed))
    verified = VerifiedKernel(resolved, files, content, root, depends, trees, copy_to, allowed)
    if metadata.id is not None:
        check_id(metadata.id, resolved.folder, place)
        _check_id_is_free(verified)
    return verified


def _names(metadata: Metadata) -> frozenset[str]:
    """Return the names of a kernel, which only relative imports may use."""
    return frozenset([metadata.name.replace("-", "_"), *([metadata.id] if metadata.id else [])])


def _check_signature(resolved: ResolvedKernel) -> None:
    if resolved.policy.signatures == "off":
        return
    problem = compat.signature_problem(resolved.folder)
    if problem is None:
        return
    text = f"{resolved.place()}: is not signed by a trusted publisher: {problem}"
    if resolved.policy.signatures == "enforce":
        raise IntegrityError(text)
    warnings.warn(f"forge: {text}", HubNotice, stacklevel=4)


def _package_root(resolved: ResolvedKernel, files: Mapping[str, File]) -> str:
    """Return the package's folder: "" for __init__.py in the variant's, the inner one for the older nested layout."""
    if "__init__.py" in files:
        return ""
    inner = [path.split("/")[0] for path in files if path.count("/") == 1 and path.endswith("/__init__.py")]
    package = resolved.metadata.name.replace("-", "_")
    if package in inner:
        return package
    is_named = resolved.commit is not None or resolved.metadata.form == "current"
    if len(inner) == 1 and not is_named:
        return inner[0]
    raise MalformedError(f"{resolved.place()}: has neither __init__.py nor {package}/__init__.py")


def _check_id_is_free(verified: VerifiedKernel) -> None:
    """Raise RefusedError unless new content of an id is another version from the same source: an id identifies one
    kernel."""
    resolved = verified.resolved
    for other in _loaded.values() if verified.content not in _loaded else ():
        existing = other.verified.resolved
        if existing.metadata.id == resolved.metadata.id and existing.source != resolved.source:
            raise RefusedError(
                f"{resolved.place()}: the id {resolved.metadata.id!r} was loaded from {existing.place()}, "
                f"which is another kernel"
            )


def _load(verified: VerifiedKernel) -> types.ModuleType:
    depends = {each.resolved.source: _load(each) for each in verified.depends}
    if verified.content not in _loaded:
        _check_natives_are_free(verified)
        verified = _with_copies(verified)
        with compat.kernel_dependencies(depends) if depends else contextlib.nullcontext():
            _loaded[verified.content] = LoadedKernel(verified, _import(verified))
    return _loaded[verified.content].module


def _with_copies(verified: VerifiedKernel) -> VerifiedKernel:
    """Complete this process's copies with all files, so that code opens only hashed files by relative paths. Raises
    IntegrityError for a file that changed since."""
    if verified.copies is None and not any(map(is_opened, verified.files)):
        return verified
    folder = verified.copies or private_copies.new_folder()
    files = {path: _copy_of(file, folder, verified.resolved.place()) for path, file in verified.files.items()}
    return replace(verified, files=files, copies=folder)


def _copy_of(file: File, folder: Path, place: Place) -> File:
    if file.copy is not None:
        return file
    target = folder / file.path
    with io.BytesIO(file.content) if file.content is not None else file.location.open("rb") as source:
        _, sha256 = private_copies.copy(source, target)
    if sha256 != file.sha256:
        raise IntegrityError(f"{place.at(file.path)}: changed after it was hashed")
    return replace(file, copy=target)


def _check_natives_are_free(verified: VerifiedKernel) -> None:
    """Raise RefusedError for a second native module of the same file name: both would register one namespace, which
    aborts the process."""
    for path, file in verified.files.items():
        if not path.endswith(NATIVE):
            continue
        for other in _loaded.values():
            for existing in other.verified.files.values():
                if existing.location.name == file.location.name and existing.sha256 != file.sha256:
                    raise RefusedError(
                        f"{verified.resolved.place().at(path)}: a native module of this name was loaded from "
                        f"{other.verified.resolved.place()}; its name and namespace must be unique to the build"
                    )


def _import(verified: VerifiedKernel) -> types.ModuleType:
    name, place = verified.module_name, verified.resolved.place()
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _packages[name] = verified
    try:
        with _nothing_else_changes(place):
            return importlib.import_module(name)
    except BaseException as error:
        _forget(name)
        if isinstance(error, HubError) or not isinstance(error, Exception | SystemExit):
            raise
        raise KernelImportError(f"{place}: raised while it was imported: {type(error).__name__}: {error}") from error
    finally:
        verified.trees.clear()


def _forget(name: str) -> None:
    del _packages[name]
    for each in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
        del sys.modules[each]


@contextlib.contextmanager
def _nothing_else_changes(place: Place) -> Iterator[None]:
    """Restore the modules that a kernel's own code replaced in sys.modules. Raises RefusedError if it did."""
    before = dict(sys.modules)
    try:
        yield
    finally:
        replaced = [name for name, module in before.items() if sys.modules.get(name) is not module]
        sys.modules.update({name: before[name] for name in replaced})
    if replaced:
        raise RefusedError(f"{place}: replaced modules while it was imported: {', '.join(replaced)}")


class _Source(importlib.machinery.SourceFileLoader):
    """A loader that compiles the verified bytes or their AST; no bytecode is read or written."""

    def __init__(self, name: str, file: File, trees: dict[str, ast.Module]) -> None:
        super().__init__(name, str(file.copy or file.location))
        self._file = file
        self._content = file.content or b""
        self._trees = trees

    def get_code(self, fullname: str) -> types.CodeType:
        path = str(self._file.location)
        code = self.source_to_code(self._trees.pop(self._file.path, self._content), path)
        for name in {path, self.path}:  # readers of a function's source, such as Triton, get the text that was hashed
            lines = importlib.util.decode_source(self._content).splitlines(keepends=True)
            linecache.cache[name] = (self._file.size, None, lines, name)
        return code

    def get_data(self, path: str) -> bytes:
        return self._content if path == self.path else super().get_data(path)


class _Finder(importlib.abc.MetaPathFinder):
    """A finder of the modules of loaded kernels among their verified files."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        top, _, inner = fullname.partition(".")
        verified = _packages.get(top)
        if verified is None:
            return None
        spec = _find(verified, fullname, inner.replace(".", "/"))
        if spec is None:
            raise ModuleNotFoundError(f"{verified.resolved.place()}: has no module {inner!r}", name=fullname)
        return spec


_finder = _Finder()


def _find(verified: VerifiedKernel, fullname: str, inner: str) -> importlib.machinery.ModuleSpec | None:
    stem = "/".join(part for part in (verified.root, inner) if part)
    folder = str((verified.copies or verified.resolved.folder) / stem)
    package = verified.files.get(f"{stem}/__init__.py" if stem else "__init__.py")
    if package is not None:
        return _spec(_Source(fullname, package, verified.trees), package.copy or package.location, folder)
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        native = verified.files.get(f"{stem}{suffix}")
        if native is not None:
            location = _first_location(native)
            return _spec(importlib.machinery.ExtensionFileLoader(fullname, str(location)), location, None)
    source = verified.files.get(f"{stem}.py")
    if source is not None:
        return _spec(_Source(fullname, source, verified.trees), source.copy or source.location, None)
    if any(path.startswith(f"{stem}/") for path in verified.files):
        namespace = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
        namespace.submodule_search_locations = [folder]
        return namespace
    return None


def _spec(
    loader: importlib.machinery.SourceFileLoader | importlib.machinery.ExtensionFileLoader,
    location: Path,
    folder: str | None,
) -> importlib.machinery.ModuleSpec:
    spec = importlib.machinery.ModuleSpec(loader.name, loader, origin=str(location), is_package=folder is not None)
    spec.has_location = True
    if folder is not None:
        spec.submodule_search_locations = [folder]
    return spec


def _first_location(native: File) -> Path:
    """Return the file from which this process first loaded a native module of this name and content, because it must
    not be loaded twice."""
    for other in _loaded.values():
        for existing in other.verified.files.values():
            if existing.location.name == native.location.name and existing.sha256 == native.sha256:
                return existing.copy or existing.location
    return native.copy or native.location
