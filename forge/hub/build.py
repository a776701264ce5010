"""The build of a manifest's sources: compiled once for each set of inputs, and kept in the user's cache.

builds/<library>-<key>/       the library, and build.json: its inputs and the operators that it registers
builds/<library>-<key>.lock   held by the process that builds it; the system frees it however that process ends

The key is a hash of the sources and headers, the flags, the compilers, torch and its C++ ABI, the ABI of Python, and
the target hardware. Each file is read once: the bytes that are hashed are written to a new folder, and the compiler
sees nothing else; its result is moved into place atomically. Only folders that the user names have sources: the Hub
holds only a kernel's build/.
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from forge.hub import compiler, executorch, private_copies, toolchain
from forge.hub.compat import library
from forge.hub.errors import BuildError, HubNotice, IntegrityError, MalformedError, RefusedError
from forge.hub.files import read_sources, sha256_of
from forge.hub.manifest.model import Build, Manifest
from forge.hub.policy import Policy
from forge.support import child_processes, owner_only_store
from forge.support.owner_only_store import user_cache
from forge.torch_internals.dispatch import dispatch_get_all_op_names

FORMAT = 1
RECORD = "build.json"
# environment variables that compilers read
VARIABLES = ("CC", "CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS")
ERROR_LINES = 12


@dataclass(frozen=True)
class BuiltLibrary:
    """A library that was compiled from a manifest's sources.

    key: the hash of all inputs of the build. seconds: the build time; None if the library came from the cache.
    operators: the operators that it registers in torch.ops. namespaces: those that it defines. skipped: the reasons why
    a prebuilt variant or the cache was not used. sha256: of the library.
    """

    manifest: str
    key: str
    path: Path
    operators: tuple[str, ...]
    namespaces: tuple[str, ...]
    seconds: float | None
    skipped: Mapping[str, str]
    sha256: str = ""


class _BuildFailure(Exception):
    """The reason why there is no library, in words."""


def build_kernels(
    manifest: Manifest, *, policy: Policy | None = None, prebuilt: str = "not asked for", force: bool = False
) -> BuiltLibrary:
    """Return the library of a manifest's sources, from the cache or newly compiled. The library is not loaded.

    prebuilt: the reason why no prebuilt variant is used. force: compile even if the cache has the library.
    Raises: RefusedError if the policy does not allow folders; MalformedError for files that cannot be read; BuildError
    with the reason for each way that was tried.
    """
    policy = policy or Policy()
    _check_allowed(manifest, policy)
    skipped = {"prebuilt": prebuilt}
    try:
        plan = _plan(manifest, skipped)
        built, reason = (None, "the library is to be rebuilt") if force else _cached_library(plan)
        if built is None:
            skipped["cached"] = reason
            if not policy.build:
                raise _BuildFailure("the policy does not allow it (build=False)")
            built = _build_once(plan, force)
    except (_BuildFailure, toolchain.NoCompilerError) as reason:
        skipped.setdefault("cached", "not looked for: what compiles a library is a part of its key")
        raise _error(manifest, {**skipped, "build": str(reason)}) from None
    return replace(built, skipped=skipped)


def _check_allowed(manifest: Manifest, policy: Policy) -> None:
    if not policy.local:
        raise RefusedError(f"{manifest.file}: its sources are in a folder of this machine; allow it with local=True")
    if policy.trust == "locked":
        raise RefusedError(f'{manifest.file}: trust="locked" takes what a lock file holds, and none holds sources')


def _error(manifest: Manifest, reasons: Mapping[str, str]) -> BuildError:
    lines = "".join(f"\n  {way}: {reason}" for way, reason in reasons.items())
    return BuildError(f"{manifest.file}: there is no library with its kernels:{lines}")


# sources and results of a build


@dataclass(frozen=True)
class _Plan:
    """The inputs of a build. files: the sources and headers as they were read."""

    manifest: str
    library: str
    build: Build
    files: Mapping[str, bytes]
    system: Mapping[str, Any]

    @cached_property
    def parts(self) -> dict[str, Any]:
        files = {path: hashlib.sha256(content).hexdigest() for path, content in self.files.items()}
        return {"format": FORMAT, "build": asdict(self.build), "files": files, "system": self.system}

    @cached_property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(self.parts, sort_keys=True).encode()).hexdigest()

    @property
    def target(self) -> Path:
        return builds() / f"{self.library[:64]}-{self.key[:16]}"


def builds() -> Path:
    """Return the folder of all builds of this user."""
    return user_cache() / "builds"


def _plan(manifest: Manifest, skipped: dict[str, str]) -> _Plan:
    """Plan the build for this machine; CUDA sources that cannot be compiled are left out with a warning."""
    build = manifest.build
    problem = toolchain.cuda_problem() if build.cuda else None
    if problem is not None:
        if not build.cpp:
            raise _BuildFailure(problem)
        skipped["cuda sources"] = problem
        build = replace(build, cuda=(), cuda_cflags=())
        if torch.version.cuda is not None:
            notice = f"forge: {manifest.file}: its CUDA sources are left out: {problem}"
            warnings.warn(notice, HubNotice, stacklevel=4)
    files = _read(Path(manifest.file).parent, build)
    try:
        files |= executorch.files_of(manifest)
    except executorch.NotBound as reason:
        raise _BuildFailure(str(reason)) from None
    build = executorch.with_binding(build, files)
    return _Plan(manifest.file, manifest.library.name, build, files, _system(bool(build.cuda)))


def source_files(manifest: Manifest) -> dict[str, bytes]:
    """Return a manifest's sources and the headers that they may include, by path relative to the manifest. Raises
    MalformedError."""
    return _read(Path(manifest.file).parent, manifest.build) if manifest.build.sources else {}


def _read(folder: Path, build: Build) -> dict[str, bytes]:
    """Return the sources, the headers beside them, and all files of the include folders."""
    try:
        paths = {*_paths(folder, build)}
    except OSError as error:
        raise MalformedError(f"{folder}: cannot be read: {error}") from error
    return read_sources(folder, paths, "sources or in an include folder")


def _paths(folder: Path, build: Build) -> Iterator[str]:
    for path in map(os.path.normpath, build.sources):
        yield path
        beside = os.path.dirname(path)
        names = os.listdir(folder / beside)
        yield from (os.path.join(beside, name) for name in names if name.endswith(toolchain.HEADERS))
    for include in build.include:
        for base, folders, names in os.walk(folder / os.path.normpath(include)):
            folders[:] = [name for name in folders if not name.startswith(".")]
            visible = (name for name in names if not name.startswith("."))
            yield from (os.path.relpath(os.path.join(base, name), folder) for name in visible)


# tools and targets of a build


def _system(cuda: bool) -> dict[str, Any]:
    values = {
        "compiler": toolchain.version(toolchain.compiler()),
        "torch": torch.__version__,
        "cxx11_abi": torch.compiled_with_cxx11_abi(),
        "python": sysconfig.get_config_var("EXT_SUFFIX"),
        "cpu": [platform.machine(), toolchain.cpu_features()],
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
    if cuda:
        values |= {"nvcc": toolchain.version(toolchain.nvcc()), "architectures": toolchain.architectures()}
    return values


# the cache


def _cached_library(plan: _Plan) -> tuple[BuiltLibrary | None, str]:
    """Return the library of an earlier build, or the reason why the cache has none that can be used."""
    try:
        with owner_only_store.open_own(plan.target / RECORD) as file:
            values = json.load(file)
        path = plan.target / values["file"]
        with owner_only_store.open_own(path) as file:
            sha256 = sha256_of(file)
        if (values["key"], values["sha256"], path.parent) == (plan.key, sha256, plan.target):
            operators, namespaces = tuple(values["operators"]), tuple(values["namespaces"])
            return BuiltLibrary(plan.manifest, plan.key, path, operators, namespaces, None, {}, sha256), ""
    except FileNotFoundError:
        return None, f"{builds()} has none of these sources, flags, compilers and torch"
    except owner_only_store.UntrustedFile as reason:
        return None, f"{plan.target} is not used: {reason}"
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None, f"{plan.target} is not as it was written"


def _build_once(plan: _Plan, force: bool) -> BuiltLibrary:
    """Compile unless another process just did, and remove what killed builders left behind."""
    target = plan.target
    try:
        owner_only_store.make_folder(target.parent)
        with lock(target.with_name(f"{target.name}.lock"), plan.library):
            built, _ = (None, "") if force else _cached_library(plan)
            if built is not None:
                return built
            for leftover in target.parent.glob(f".{target.name}-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            prefix = f".{target.name}-"
            with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent, ignore_cleanup_errors=True) as work:
                return _build(plan, Path(work))
    except (
        owner_only_store.UntrustedFile,
        OSError,
        NotImplementedError,
    ) as error:  # on a file system without locks
        raise _BuildFailure(f"{target.parent}: {error}") from error


@contextlib.contextmanager
def lock(path: Path, name: str) -> Iterator[None]:
    """Hold the lock of a build folder, and report it when this process has to wait. The system frees the lock however
    its holder ends."""
    filelock = library("filelock")
    file_lock = filelock.FileLock(path)
    try:
        file_lock.acquire(blocking=False)
    except filelock.Timeout:
        _say(f"waiting for another process that builds {name}")
        file_lock.acquire()
    try:
        yield
    finally:
        file_lock.release()


def _build(plan: _Plan, work: Path) -> BuiltLibrary:
    """Compile in an empty folder, and move the result into place."""
    start = time.perf_counter()
    _say(f"building {plan.library} from {', '.join(plan.build.sources)}")
    output = _compile(plan, work)
    path = work / "out" / output["file"]
    seconds = time.perf_counter() - start
    record = {**output, "key": plan.key, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "of": plan.parts}
    result = work / "result"
    result.mkdir(mode=0o700)
    path.chmod(0o700)
    path.rename(result / path.name)
    (result / RECORD).write_text(json.dumps(record, indent=1))
    (result / RECORD).chmod(0o600)
    if plan.target.exists():
        plan.target.rename(work / "before")
    result.rename(plan.target)
    _say(f"built {plan.library} in {seconds:.1f} s: {plan.target}")
    path = plan.target / output["file"]
    operators, namespaces = tuple(output["operators"]), tuple(output["namespaces"])
    return BuiltLibrary(plan.manifest, plan.key, path, operators, namespaces, seconds, {}, record["sha256"])


def _compile(plan: _Plan, work: Path) -> dict[str, Any]:
    """Return the record that compiler.py writes of the library in work/out. Raises _BuildFailure with its errors."""
    inside, out = work / "in", work / "out"
    out.mkdir()
    for path, content in plan.files.items():
        (inside / path).parent.mkdir(parents=True, exist_ok=True)
        (inside / path).write_bytes(content)
    request = {
        "name": f"{re.sub(r'[^a-zA-Z0-9_]', '_', plan.library)}_{plan.key[:16]}",
        "sources": [str(inside / os.path.normpath(path)) for path in plan.build.sources],
        "extra_cflags": plan.build.cflags,
        "extra_cuda_cflags": plan.build.cuda_cflags,
        "extra_ldflags": list(plan.build.ldflags),
        "extra_include_paths": [str(inside / os.path.normpath(path)) for path in plan.build.include],
        "build_directory": str(out),
        "with_cuda": bool(plan.build.cuda),
    }
    process = subprocess.run(
        child_processes.run_file(compiler.__file__),
        input=json.dumps(request),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_environment(),
        cwd=work,
        text=True,
        errors="replace",
    )
    if process.returncode:
        output = process.stdout.replace(f"{inside}{os.sep}", "").replace(f"{out}{os.sep}", "")
        raise _BuildFailure(_first_errors(output, process.returncode))
    return json.loads((out / "output.json").read_bytes())


def _environment() -> dict[str, str]:
    """Return the environment of a subprocess that finds this process's torch, and ninja where pip put it."""
    inherited = child_processes.environment()
    return {**inherited, "PATH": os.pathsep.join([toolchain.programs(), sysconfig.get_path("scripts")])}


def _first_errors(output: str, status: int) -> str:
    lines = toolchain.first_errors(output, ERROR_LINES)
    how = f"loading it ended its process (signal {-status})" if status < 0 else "it failed"
    return "\n    ".join([f"{how}:" if lines else how, *lines])


def _say(text: str) -> None:
    print(f"forge: {text}", file=sys.stderr, flush=True)


# loading


def _private_copy(built: BuiltLibrary) -> Path:
    """Make this process's copy of a library. Raises IntegrityError if its hash is not the recorded one."""
    try:
        target = private_copies.new_folder() / built.path.name
        with built.path.open("rb") as file:
            _, sha256 = private_copies.copy(file, target)
    except OSError as error:
        raise BuildError(f"{built.path}: was built, but cannot be loaded: {error}") from error
    if sha256 != built.sha256:
        raise IntegrityError(f"{built.path}: changed since it was built")
    return target


_loading = threading.Lock()
_loaded: dict[str, BuiltLibrary] = {}


def load_built(built: BuiltLibrary) -> None:
    """Load a library, once.

    Raises: RefusedError if another library registers its operators, because loading it would abort the process;
    BuildError if the system cannot load it.
    """
    with _loading:
        if built.key in _loaded:
            return
        present = set(dispatch_get_all_op_names())
        conflicts = [name for name in built.operators if name in present]
        conflicts += [name for name in built.namespaces if compiler.is_defined(name)]
        if conflicts:
            raise RefusedError(
                f"{built.manifest}: {conflicts[0]} is registered in this process already, by an earlier build of these "
                "sources or by another library; a process takes it once: start a new one"
            )
        private_copy = _private_copy(built)
        try:
            torch.ops.load_library(str(private_copy))
        except (OSError, RuntimeError) as error:
            raise BuildError(f"{built.path}: was built, but cannot be loaded: {error.__cause__ or error}") from error
        _loaded[built.key] = built
