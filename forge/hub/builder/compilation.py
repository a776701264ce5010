"""The compilation of a target's sources into one shared object.

Every source and header is read once and copied to a separate folder; the compilers see no other files of the tree.
Objects are cached by their inputs (the source, all headers, the command, the compiler, torch), so unchanged sources are
not compiled again.
"""

import hashlib
import os
import shlex
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from forge.hub import toolchain
from forge.hub.builder.config import Config
from forge.hub.builder.targets import Target
from forge.hub.errors import BuildError
from forge.hub.files import read_sources
from forge.support import child_processes, owner_only_store
from forge.support.owner_only_store import user_cache

REGISTRATION = "registration.h"
CXX_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-DPy_LIMITED_API=0x03090000")
CUDA_FLAGS = ("-std=c++20", "-O3", "--expt-relaxed-constexpr", "-DPy_LIMITED_API=0x03090000")
OBJECT_HEADER = b"forge object 1\n"
STORE_BYTES = 2**30
ERROR_LINES = 20

# A header that sources of the Hub include: macros that expand the library's name, which is a macro itself, and a module
# that Python can import.
_REGISTRATION = """\
#pragma once

#include <Python.h>

#define TORCH_LIBRARY_EXPAND(name, library) TORCH_LIBRARY(name, library)
#define TORCH_LIBRARY_IMPL_EXPAND(name, key, library) TORCH_LIBRARY_IMPL(name, key, library)
#define STABLE_TORCH_LIBRARY_EXPAND(name, library) STABLE_TORCH_LIBRARY(name, library)
#define STABLE_TORCH_LIBRARY_IMPL_EXPAND(name, key, library) STABLE_TORCH_LIBRARY_IMPL(name, key, library)

#define FORGE_MODULE(name)                                                                          \\
  PyMODINIT_FUNC PyInit_##name(void) {                                                              \\
    static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, #name, nullptr, 0, nullptr};     \\
    return PyModule_Create(&definition);                                                            \\
  }
#define REGISTER_EXTENSION(name) FORGE_MODULE(name)
"""

# Symbols that a newer compiler would take from systems newer than manylinux_2_28, the Hub's target, are defined in the
# library: constructors of streams, in libstdc++ since GLIBCXX_3.4.26, and the flag of glibc 2.32 that lets shared_ptr
# count without atomics. False is always right.
MANYLINUX = "forge_manylinux.h"
_MANYLINUX = """\
#pragma once

#include <cstddef>

#ifdef __GLIBCXX__
#undef _GLIBCXX_EXTERN_TEMPLATE
#define _GLIBCXX_EXTERN_TEMPLATE 0
extern "C" {
__attribute__((visibility("hidden"), weak)) char __libc_single_threaded = 0;
}
#endif
"""
_GENERATED = {REGISTRATION: _REGISTRATION.encode(), MANYLINUX: _MANYLINUX.encode()}


@dataclass(frozen=True)
class Step:
    """The compilation of one object: `command` compiles `source`, a path in the copied tree, to a given path."""

    source: str
    command: tuple[str, ...]
    key: str


class TargetCompilation:
    """The files of a target and the steps that compile them."""

    def __init__(self, config: Config, target: Target) -> None:
        self.config = config
        self.target = target
        self.files = _read(config, target)
        self.compilers = _compilers(target)

    def key(self, *more: bytes) -> str:
        """Return a hash of all inputs of the compilation, and of `more`."""
        config, target = self.config, self.target
        files = _digest(*[part for path, content in self.files.items() for part in (path.encode(), content)])
        flags = [
            (target.variant, config.src, config.include, config.cxx_flags),
            *[
                (each.name, each.src, each.include, each.cxx_flags, each.flags, each.archs)
                for each in target.components
            ],
        ]
        parts = (files, sorted(self.compilers.items()), _headers(), flags, _GENERATED)
        return _digest(repr(parts).encode(), *more)

    def run(self, id: str, work: Path, *, jobs: int, logs: Path) -> Path:
        """Compile and link in `work`, and return the shared object. Raises BuildError with the compiler's errors and
        its command."""
        inside, objects = work / "in", work / "objects"
        objects.mkdir(parents=True)
        for path, content in {**self.files, **_GENERATED}.items():
            (inside / path).parent.mkdir(parents=True, exist_ok=True)
            (inside / path).write_bytes(content)
        steps = list(self._steps(id))
        logs.mkdir(parents=True, exist_ok=True)
        outputs = [objects / f"{index}.o" for index in range(len(steps))]
        with _progress(self.target.variant, len(steps)) as report, ThreadPoolExecutor(jobs) as pool:
            compile = partial(_compile, inside=inside, logs=logs, report=report)
            results = [pool.submit(compile, step, output) for step, output in zip(steps, outputs, strict=True)]
        failed = [error for each in results if (error := each.exception()) is not None]
        if failed:
            raise (
                BuildError("\n".join(map(str, failed))) if all(isinstance(e, BuildError) for e in failed) else failed[0]
            )
        module = work / f"{id}.abi3.so"
        linker = Step("linking", (toolchain.compiler(), *map(str, outputs), *_link_flags(self.target)), "")
        _run(linker, module, inside, logs)
        return module

    def _steps(self, id: str) -> Iterator[Step]:
        config, target = self.config, self.target
        common = [f"-I{path}" for path in (".", *config.include)] + [f"-D{target.backend.upper()}_KERNEL"]
        if target.stable_abi is not None:
            major, minor = map(int, target.stable_abi.split("."))
            common.append(f"-DTORCH_TARGET_VERSION=0x{major:02x}{minor:02x}000000000000")
        yield from self._steps_of(config.src, [*common, *config.cxx_flags], [], id)
        for part in target.components:
            own = [*common, *[f"-I{path}" for path in part.include]]
            yield from self._steps_of(part.src, [*own, *part.cxx_flags], [*own, *part.flags, *_archs(part.archs)], id)

    def _steps_of(self, sources: Sequence[str], cxx: Sequence[str], cuda: Sequence[str], id: str) -> Iterator[Step]:
        system = [f"-isystem{path}" for path in _include_paths()]
        for source in sources:
            if source.endswith(toolchain.HEADERS):
                continue
            needs_name = b"TORCH_EXTENSION_NAME" in self.files[source] or REGISTRATION.encode() in self.files[source]
            name = [f"-DTORCH_EXTENSION_NAME={id}"] if needs_name else []
            if source.endswith(".cu"):
                program, flags = str(toolchain.nvcc()), [*CUDA_FLAGS, "-Xcompiler=-fPIC", *cuda]
            else:
                program, flags = toolchain.compiler(), [*CXX_FLAGS, "-include", MANYLINUX, *cxx]
            command = (program, *flags, *name, *system, "-c", source)
            headers = _digest(*[self.files[path] for path in self.files if path.endswith(toolchain.HEADERS)])
            context = repr((command, self.compilers, _headers(), headers, _GENERATED)).encode()
            yield Step(source, command, _digest(context, self.files[source]))


def _compilers(target: Target) -> dict[str, str]:
    programs = [toolchain.compiler()] + ([str(toolchain.nvcc())] if target.backend == "cuda" else [])
    return {program: toolchain.version(program) for program in programs}


def _read(config: Config, target: Target) -> dict[str, bytes]:
    """Return the sources, the headers beside them, and those in their include folders; by path, in order."""
    sources = [*config.src, *[path for part in target.components for path in part.src]]
    paths = set(sources)
    for folder in map(os.path.dirname, sources):
        paths |= {os.path.join(folder, name) for name in os.listdir(config.folder / folder) if _is_header(name)}
    for include in {*config.include, *[path for part in target.components for path in part.include]}:
        for base, inner, names in os.walk(config.folder / include):
            inner[:] = [name for name in inner if not name.startswith(".") and name != "build"]
            paths |= {os.path.join(os.path.relpath(base, config.folder), name) for name in names if _is_header(name)}
    return read_sources(config.folder, set(map(os.path.normpath, paths)), "sources or headers")


def _is_header(name: str) -> bool:
    return name.endswith(toolchain.HEADERS)


def _headers() -> tuple[str, ...]:
    """Return the versions and locations of the included headers."""
    return torch.__version__, sysconfig.get_paths()["include"]


def _include_paths() -> list[str]:
    inside = Path(torch.__file__).parent / "include"
    return [str(inside), str(inside / "torch/csrc/api/include"), sysconfig.get_paths()["include"]]


def _archs(archs: Sequence[str]) -> list[str]:
    """Return nvcc's options for capabilities such as 9.0; those of this machine's devices for a part that names
    none."""
    capabilities = [each for entry in archs or toolchain.architectures() for each in entry.replace(";", " ").split()]
    numbers = [each.removesuffix("+PTX").replace(".", "") for each in capabilities]
    return [f"-gencode=arch=compute_{number},code=sm_{number}" for number in numbers]


def _link_flags(target: Target) -> list[str]:
    libraries = ["torch", "torch_cpu"] + (["torch_cuda"] if target.backend == "cuda" else [])
    if target.stable_abi is None:
        libraries += ["c10"] + (["c10_cuda"] if target.backend == "cuda" else [])
    undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    return ["-shared", *undefined, f"-L{Path(torch.__file__).parent / 'lib'}", *[f"-l{name}" for name in libraries]]


def _compile(step: Step, output: Path, *, inside: Path, logs: Path, report: Any) -> None:
    place = user_cache() / "objects" / step.key
    start = time.perf_counter()
    how = "as it was compiled before"
    try:
        output.write_bytes(owner_only_store.read(place, OBJECT_HEADER))
    except (OSError, owner_only_store.UntrustedFile):
        _run(step, output, inside, logs)
        how = f"{time.perf_counter() - start:.1f} s"
        with suppress(OSError, owner_only_store.UntrustedFile):  # it is compiled again when it is needed again
            owner_only_store.write(place, OBJECT_HEADER, output.read_bytes(), STORE_BYTES)
    report(step.source, how)


def _run(step: Step, output: Path, inside: Path, logs: Path) -> None:
    """Run a command. Raises BuildError with the command and the first errors."""
    command = [*step.command, "-o", str(output)]
    try:
        process = subprocess.run(
            command,
            cwd=inside,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=child_processes.environment(),
        )
    except OSError as error:
        raise BuildError(f"{step.source}: {command[0]} cannot be run: {error}") from error
    text = process.stdout.decode(errors="replace")
    log = logs / f"{step.source.replace('/', '_')}.log"
    log.write_text(f"$ {shlex.join(command)}\n{text}")
    if process.returncode:
        how = f"was ended by signal {-process.returncode}" if process.returncode < 0 else "failed"
        errors = toolchain.first_errors(text, ERROR_LINES)
        raise BuildError(
            "\n    ".join(
                [f"{step.source}: the compiler {how}", *errors, f"$ {shlex.join(command)}", f"all of its output: {log}"]
            )
        )


@contextmanager
def _progress(name: str, count: int) -> Iterator[Any]:
    """Show a bar on a terminal, a line for each object elsewhere; nothing with FORGE_PROGRESS=0."""
    lock, finished = threading.Lock(), [0]
    is_enabled = os.environ.get("FORGE_PROGRESS") != "0"
    bar = None
    if is_enabled and sys.stderr.isatty():
        bar = Progress(console=Console(stderr=True), transient=True)
        task = bar.add_task(name, total=count)

    def report(source: str, how: str) -> None:
        with lock:
            finished[0] += 1
            if bar is not None:
                bar.update(task, advance=1, description=source)
            elif is_enabled:
                print(f"forge: {name} [{finished[0]}/{count}] {source}: {how}", file=sys.stderr, flush=True)

    with bar if bar is not None else nullcontext():
        yield report


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
