"""The C++ kernels of several regions in one shared object.

Each run of g++ takes most of a second for the header that all kernels include and for linking, and less than half a
second for a region's kernel. Inductor runs it for each; here, the kernels requested during a run are one translation
unit of the next run, each in a separate namespace. A kernel that cannot share a unit, or was in a unit that failed to
build, is built alone by Inductor. A note for each kernel lets another process find its unit; one whose hash differs
from the note is deleted and rebuilt.

Six regions on two cores take 6 seconds so, and 13 seconds if Inductor builds each alone (torch 2.13).

Source: torch._inductor.codecache.CppPythonBindingsCodeCache, by whose flags and in whose folder a unit is built.
"""

import contextlib
import contextvars
import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import Enum
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from forge.ir.locks import new_lock
from forge.torch_internals.inductor.async_compile import AsyncCompile, get_compile_threads
from forge.torch_internals.inductor.cache_dir import cache_dir
from forge.torch_internals.inductor.codecache import CppPythonBindingsCodeCache, LambdaFuture, load_library
from forge.torch_internals.inductor.config import inductor_config
from forge.torch_internals.inductor.cpu import cpu_vec_isa

PREFIX = "kernel_"  # of the names of a unit's functions; Inductor calls its only one `kernel`

_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(\w+).*$", re.MULTILINE)
_INCLUDE = "include"
_MOVABLE = frozenset({_INCLUDE, "pragma"})

# How a unit's functions read Python's arguments. A torch function returns a tensor's data pointer; Inductor stores
# that function's address in an environment variable.
_READING = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cstdlib>
#include <stdexcept>
#include <type_traits>

static void* (*data_of)(PyObject*);

template <typename T> static inline T read(PyObject* given) {
    if constexpr (std::is_pointer_v<T>) {
        return static_cast<T>(data_of(given));
    } else if constexpr (std::is_floating_point_v<T>) {
        const double value = PyFloat_AsDouble(given);
        if (value == -1.0 && PyErr_Occurred()) [[unlikely]] throw std::invalid_argument("expected a float");
        return static_cast<T>(value);
    } else {
        const long long value = PyLong_AsLongLong(given);
        if (value == -1 && PyErr_Occurred()) [[unlikely]] throw std::invalid_argument("expected an int");
        return static_cast<T>(value);
    }
}
"""

_FUNCTION = """
#define kernel %(name)s
namespace of_%(name)s {
%(body)s
static PyObject* call(PyObject*, PyObject* const* given, Py_ssize_t count) {
    try {
        if (count != %(count)d) [[unlikely]] throw std::invalid_argument("expected %(count)d arguments");
        kernel(%(arguments)s);
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }
    Py_RETURN_NONE;
}
}
#undef kernel
"""

_ENTRY = (
    '{"%(name)s", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(of_%(name)s::call)), METH_FASTCALL, ""},'
)

_MODULE = """
static PyMethodDef functions[] = {
%(entries)s
{nullptr, nullptr, 0, nullptr}};

static PyModuleDef unit = {PyModuleDef_HEAD_INIT, "kernel", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit_kernel() {
    const char* address = std::getenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR");
    if (address == nullptr) {
        PyErr_SetString(PyExc_RuntimeError, "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR is not set");
        return nullptr;
    }
    data_of = reinterpret_cast<void* (*)(PyObject*)>(std::strtoull(address, nullptr, 10));
    return PyModule_Create(&unit);
}
"""


class _Kernel:
    """A kernel of a generated module. alone: returns it, built by itself."""

    def __init__(self, argtypes: Sequence[str], source: str, alone: Callable[[], Callable]) -> None:
        key = json.dumps([list(argtypes), source, _settings()])
        self.name = PREFIX + hashlib.sha256(key.encode()).hexdigest()[:32]
        self.argtypes = argtypes
        self.source = source
        self.unit: _Unit | _CachedUnit | None = None
        self._alone = alone

    def result(self) -> Callable:
        """Return the function; wait until it is built."""
        if self.unit is None:
            start_rest()
        try:
            assert self.unit is not None
            return getattr(self.unit.module(), self.name)
        except Exception:  # it cannot be built, or another kernel of its unit
            return self._alone()

    @property
    def includes(self) -> list[str]:
        """The headers, as lines."""
        return [match[0].strip() for match in _DIRECTIVE.finditer(self.source) if match[1] == _INCLUDE]

    @property
    def code(self) -> str:
        """The kernel's part of a unit."""
        body = _DIRECTIVE.sub(lambda match: "" if match[1] == _INCLUDE else match[0], self.source)
        types = [each.removeprefix("const ") for each in self.argtypes]
        arguments = ", ".join(f"read<{each}>(given[{index}])" for index, each in enumerate(types))
        return _FUNCTION % {"name": self.name, "body": body, "count": len(types), "arguments": arguments}


class _Unit:
    """Kernels that one run of g++ builds, concurrently with the program: it may have to compile the header first."""

    def __init__(self, kernels: Sequence[_Kernel]) -> None:
        self._kernels = {kernel.name: kernel for kernel in kernels}  # no function twice
        self._future = _submit(partial(contextvars.copy_context().run, self._build))
        for kernel in kernels:
            kernel.unit = self

    @property
    def is_running(self) -> bool:
        """True while g++ is running."""
        return not self._future.done()

    def module(self) -> ModuleType:
        """Return the module with the functions; wait until it is built. Raises the error of the build."""
        return self._future.result()

    def _build(self) -> ModuleType:
        module = CppPythonBindingsCodeCache.load(self._text())
        digest = hash_of(module.__file__)
        for name in self._kernels:
            _note(name, f"{digest} {module.__file__}")
        self._kernels = {}
        return module

    def _text(self) -> str:
        kernels = self._kernels.values()
        includes = dict.fromkeys(line for kernel in kernels for line in kernel.includes)
        entries = "\n".join(_ENTRY % {"name": kernel.name} for kernel in kernels)
        return "\n".join([*includes, _READING, *[kernel.code for kernel in kernels], _MODULE % {"entries": entries}])


class _CachedUnit:
    """A unit from the disk cache, maybe of another process."""

    def __init__(self, path: str) -> None:
        self._path = path

    def module(self) -> Any:
        """Return the module with the functions. Raises OSError or ImportError if it cannot be loaded."""
        return load_library(self._path, Path(self._path).stem)


class _Process:
    """The kernels of a process: those without a unit, the units that g++ is compiling, and all other units."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._queue: list[_Kernel] = []
        self._running: list[_Unit] = []
        self._units: dict[str, _Unit] = {}
        self._checked: set[str] = set()

    def ask(self, kernel: _Kernel) -> None:
        """Request a kernel's build, now or with the next requests. One core is left to the caller."""
        with self._lock:
            kernel.unit = self._units.get(kernel.name) or self._find_cached(kernel.name)
            if kernel.unit is None:
                self._queue.append(kernel)
                if self._free(get_compile_threads() - 1):
                    self._start(1)

    def start_rest(self) -> None:
        """Build everything that was requested; the caller has nothing else to do."""
        with self._lock:
            self._start(self._free(get_compile_threads()))

    def _find_cached(self, name: str) -> _CachedUnit | None:
        """Return the unit that a note names, if it is intact. A unit is read once."""
        try:
            note = (_folder() / name).read_text()
            digest, path = note.split(" ", 1)
        except (OSError, ValueError):
            return None
        if note not in self._checked or not Path(path).exists():
            if state_of(path, digest) is not State.WHOLE:
                return None
            self._checked.add(note)
        return _CachedUnit(path)

    def _free(self, cores: int) -> int:
        self._running = [unit for unit in self._running if unit.is_running]
        return max(cores, 1) - len(self._running)

    def _start(self, count: int) -> None:
        parts: list[list[_Kernel]] = [[] for _ in range(min(max(count, 1), len(self._queue)))]
        for kernel in sorted(self._queue, key=lambda kernel: -len(kernel.source)):
            min(parts, key=lambda part: sum(len(each.source) for each in part)).append(kernel)
        self._queue = []
        for part in parts:
            unit = _Unit(part)
            self._running.append(unit)
            self._units.update((kernel.name, unit) for kernel in part)


_process = _Process()


def ask(compiling: AsyncCompile, argtypes: Sequence[str], source: str, inductors: Callable) -> Any:
    """Return a future of a kernel for a generated module. `inductors` is Inductor's own function of the other
    arguments, which builds the kernel by itself."""
    own = partial(inductors, compiling, argtypes, source)
    if get_compile_threads() <= 1 or not _MOVABLE.issuperset(match[1] for match in _DIRECTIVE.finditer(source)):
        return own()
    kernel = _Kernel(argtypes, source, lambda: own().result())
    _process.ask(kernel)
    return LambdaFuture(kernel.result)


def start_rest() -> None:
    """Build everything that was requested."""
    _process.start_rest()


def forget() -> None:
    """Drop unfinished builds in a forked child: its parent waits for them."""
    global _process
    _process = _Process()


def _submit(task: Callable[[], ModuleType]) -> Future:
    """Run the task in Inductor's thread pool, and return its future; run it in this thread if there is no pool."""
    future: Future = Future()
    try:
        result = AsyncCompile.submit(task)
        if isinstance(result, Future):
            return result
        future.set_result(result)
    except Exception as error:  # no thread can be started, as at the end of the process
        future.set_exception(error)
    return future


def _settings() -> list[str]:
    """Return the settings of g++ that can change."""
    options = {name: value for name, value in inductor_config.save_config_portable().items() if name.startswith("cpp.")}
    return [
        torch.__version__,
        os.environ.get("CXX", ""),
        str(cpu_vec_isa.pick_vec_isa()),
        repr(sorted(options.items())),
    ]


def _folder() -> Path:
    """Return the folder of notes: a kernel's has the hash and the path of the unit that holds it."""
    return Path(cache_dir()) / "forge-units"


def _note(name: str, text: str) -> None:
    note = _folder() / name
    unfinished = note.with_name(f"{name}.{os.getpid()}")
    with contextlib.suppress(OSError):  # it is rebuilt when it is needed again
        note.parent.mkdir(exist_ok=True)
        unfinished.write_text(text)
        unfinished.replace(note)


class State(Enum):
    """State of a shared object."""

    WHOLE = 0
    MISSING = 1
    DELETED = 2  # its contents had changed


def state_of(path: str, digest: str) -> State:
    """Return the state of a shared object that had this hash. One with another hash is deleted: it would otherwise be
    loaded, whatever it does."""
    current = hash_of(path)
    if current == digest:
        return State.WHOLE
    if current is None:
        return State.MISSING
    with contextlib.suppress(OSError):
        Path(path).unlink()
    return State.DELETED


def hash_of(path: str) -> str | None:
    """Return a file's hash; None if it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None
