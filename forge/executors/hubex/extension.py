"""Kernels by class: an author's own checks and loading before the first call of a kernel.

A registered extension is a kernel like any other: one entry with constraints, which is tried in order and verified.
Only its function is loaded lazily, at the first call that it could take.
"""

import difflib
import importlib
import importlib.util
import inspect
import threading
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard

import torch

from forge import hub
from forge.hub import compat
from forge.hub.manifest import Build, KernelEntry, Library, Manifest, Mark
from forge.hub.manifest import kernel as entry_of
from forge.hub.manifest.builder import OPTIONS
from forge.ir import check
from forge.patterns import Pattern
from forge.torch_internals.dispatch import disable_current_modes

_CONTRACT = ("is_available", "assert_compatible", "build_aot", "build_jit", "load")
_SAID = ("op", "name", "library", "priority", "options", "module", "build", "kernel_name")
_NEAR = 0.85  # the similarity from which a name counts as a misspelling of another


class KernelExtension:
    """Base class of a kernel that is discovered, built or loaded before its first call.

    A subclass sets the attributes, overrides the methods that it needs, and is passed to forge.register_kernel.

    Attributes:
        op: The operation, as forge.kernel takes it.
        name: The name of the kernel, by default the class name.
        priority: The order among kernels; higher priorities are tried first.
        options: Options of forge.kernel: dtypes, shape, where, device, grad, ...
        module: The module to import, if the kernel is compiled ahead of time.
        build: Sources as in a manifest ({"cpp": ["csrc/norm.cpp"]}), relative to the file of the class.
        kernel_name: The function in the loaded library: "name", or "ns::name" of torch.ops.
    """

    op: Any = None
    name: str | None = None
    library: str = ""
    priority: int = 0
    options: Mapping[str, Any] = {}
    module: str | None = None
    build: Mapping[str, Any] = {}
    kernel_name: str | None = None

    def is_available(self) -> bool | str:
        """Return True if this machine supports the kernel, else False or the reason."""
        return True

    def assert_compatible(self) -> None:
        """Raise, with the reason, if this machine is incompatible: an old device, another version."""

    def build_aot(self) -> Any:
        """Return a setuptools Extension named `module` of the sources of `build`, for a setup.py."""
        from torch.utils import cpp_extension  # imports setuptools, which is needed nowhere else

        sources = _build_of(self)
        check(
            bool(self.module and sources.sources), lambda: f"{_name_of(self)}: has no module, or build has no sources"
        )
        kind = cpp_extension.CUDAExtension if sources.cuda else cpp_extension.CppExtension
        flags = {"cxx": [*sources.cflags], **({"nvcc": [*sources.cuda_cflags]} if sources.cuda else {})}
        folder = _folder(self)
        return kind(
            self.module,
            [str(folder / path) for path in sources.sources],
            include_dirs=[str(folder / path) for path in sources.include],
            extra_compile_args=flags,
            extra_link_args=[*sources.ldflags],
        )

    def build_jit(self) -> Callable | ModuleType:
        """Compile the sources of `build` now, once per cache key of the build (forge/hub/build.py). Raises
        BuildError."""
        check(bool(self.build), lambda: f"{_name_of(self)} has no build_jit, and no build with sources", hub.BuildError)
        operator = self.kernel_name or ""
        check("::" in operator, lambda: f'{_name_of(self)}: kernel_name must be "ns::name" of what build registers')
        file = str(_folder(self) / Path(inspect.getfile(type(self))).name)
        manifest = Manifest(file, "forge", Library(_name_of(self)), (), build=_build_of(self))
        built = hub.build_kernels(manifest, policy=hub.Policy(local=True), prebuilt=f"{self.module} is not installed")
        hub.load_built(built)
        return _operator(operator)

    def load(self) -> Callable | ModuleType:
        """Return the function: from `module` if it is installed, else from build_jit.

        A module that is installed but fails to import (compiled for another torch, say) is reported: there is a
        warning and it is rebuilt, or the error is the reason why the kernel is not used.
        """
        if self.module is None or not compat.is_installed(self.module):
            return self.build_jit()
        try:
            return importlib.import_module(self.module)
        except Exception as error:
            text = f"{_name_of(self)}: {self.module} is installed and cannot be imported: {_one_line(error)}"
            if not self.build and type(self).build_jit is KernelExtension.build_jit:
                raise hub.KernelImportError(text) from error
            warnings.warn(f"forge: {text}; it is built instead", hub.HubNotice, stacklevel=2)
            return self.build_jit()


def _name_of(extension: KernelExtension) -> str:
    return extension.name or type(extension).__name__


def _folder(extension: KernelExtension) -> Path:
    return Path(inspect.getfile(type(extension))).resolve().parent


def _build_of(extension: KernelExtension) -> Build:
    fields = tuple(Build.__dataclass_fields__)
    for key in extension.build:
        check(
            key in fields, lambda key=key: f"{_name_of(extension)}: build has no {key!r}; there are {', '.join(fields)}"
        )
    return Build(**{key: (each,) if isinstance(each, str) else tuple(each) for key, each in extension.build.items()})


def _operator(name: str) -> Callable:
    namespace, _, operator = name.partition("::")
    function = getattr(torch.ops, namespace)
    for part in operator.split("."):
        function = getattr(function, part)
    return function


def _one_line(error: BaseException) -> str:
    """Return an error as 'RuntimeError: its text', on one line."""
    text = "; ".join(line.strip() for line in str(error).splitlines() if line.strip()).replace(":; ", ": ")
    return f"{type(error).__name__}{': ' if text else ''}{text}"


class ExtensionLoader:
    """A registered extension and its state. Each method of the extension is called once per process.

    function: the loaded function. failed: why loading failed. check: returns the problems of a loaded function.
    """

    def __init__(self, extension: KernelExtension) -> None:
        self.extension = extension
        self.function: Callable | None = None
        self.check: Callable[[Callable], list[str]] = lambda function: []
        self._unusable = cache(self._check_usable)
        self.failed: str | None = None
        self._loading = False
        self._lock = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the kernel itself. Raises KernelImportError if it cannot be loaded."""
        reason = self.load()
        if self.function is None:
            raise hub.KernelImportError(f"{_name_of(self.extension)}: {reason}")
        return self.function(*args, **kwargs)

    def unusable(self) -> str | None:
        """Return the extension's reason why this machine cannot use the kernel; None if it can."""
        with self._lock:
            return self._unusable()

    def load(self) -> str | None:
        """Load the kernel, usable or not. Return the reason of a failure, else None."""
        with self._lock:
            if self._loading:
                return "it is being loaded"
            if self.function is None and self.failed is None:
                self._loading = True
                try:
                    self.function = self._load_function()
                except (Exception, SystemExit) as error:  # setuptools exits after a failed build
                    self.failed = f"load() raised {_one_line(error)}"
                    text = f"forge: kernel {_name_of(self.extension)} is not used: {self.failed}"
                    warnings.warn(text, hub.HubNotice, stacklevel=2)
                finally:
                    self._loading = False
            return self.failed

    def _check_usable(self) -> str | None:
        step = "is_available()"
        try:
            available = self.extension.is_available()
            if isinstance(available, str):
                return f"not available: {available}"
            if not isinstance(available, bool):
                return f"is_available() gave {available!r}, but must give True, False or the reason why not"
            if not available:
                return "not available: is_available() is False"
            step = "assert_compatible()"
            self.extension.assert_compatible()
        except (Exception, SystemExit) as error:
            what = "not compatible" if step == "assert_compatible()" else "not available"
            return f"{what}: {step} raised {_one_line(error)}"
        return None

    def _load_function(self) -> Callable:
        with disable_current_modes():
            result = self.extension.load()
        name = self.extension.kernel_name
        if isinstance(result, ModuleType):
            if name is None:
                raise ValueError(f"load() gave the module {result.__name__}, and kernel_name says no function")
            result = _operator(name) if "::" in name else getattr(result, name)
        check(callable(result), lambda: f"load() gave {result!r}, which is no function", TypeError)
        problems = self.check(result)
        check(not problems, lambda: "; ".join(problems), TypeError)
        return result


def loader_of(declaration: Any, resolver: Any) -> tuple[ExtensionLoader, KernelEntry, dict[str, Any]]:
    """Return (loader, entry, options of the entry) of a class or an instance, without a call of its methods.

    Raises TypeError for objects that are no extension, ManifestError with every problem of its attributes.
    """
    extension = declaration() if isinstance(declaration, type) else declaration
    _check_complete(extension)
    loader = ExtensionLoader(extension)
    options = {**extension.options, "name": _name_of(extension), "library": extension.library}
    options["priority"] = extension.priority
    implemented = operation_of(extension)
    op = f"pattern:{implemented.name}" if isinstance(implemented, Pattern) else implemented
    entry = entry_of(op, loader, resolver=resolver, mark=_location_of(type(extension)), **options)
    return loader, entry, options


def operation_of(extension: KernelExtension | type[KernelExtension]) -> Any:
    """Return the operation that an extension implements, read from the class, since an instance would bind a Python
    function such as F.silu as a method."""
    return getattr(extension.op, "__func__", extension.op)


def is_extension(value: Any) -> TypeGuard[KernelExtension | type[KernelExtension]]:
    """Return whether an object is an extension class or an instance of one."""
    return isinstance(value, KernelExtension) or (isinstance(value, type) and issubclass(value, KernelExtension))


def _check_complete(extension: KernelExtension) -> None:
    """Raise TypeError for attributes that are missing, misspelt or of the wrong type, before anything is registered."""
    cls = type(extension)
    check(extension.op is not None, lambda: f"{cls.__name__} does not say in op what it implements", TypeError)
    for method in _CONTRACT:
        check(callable(getattr(extension, method)), lambda m=method: f"{cls.__name__}.{m} must be a method", TypeError)
    integer = isinstance(extension.priority, int) and not isinstance(extension.priority, bool)
    check(integer, lambda: f"{cls.__name__}.priority is {extension.priority!r}, but must be an integer", TypeError)
    members = (*_CONTRACT, *_SAID)
    own = [name for each in cls.__mro__ if each not in KernelExtension.__mro__ for name in vars(each)]
    for name in (each for each in own if not each.startswith("_") and each not in members):
        near = difflib.get_close_matches(name, members, 1, _NEAR)
        check(not near, lambda n=name, m=near: f"{cls.__name__}.{n} means nothing; did you mean {m[0]!r}?", TypeError)
    check(
        isinstance(extension.options, Mapping) and isinstance(extension.build, Mapping),
        lambda: f"{cls.__name__}: options is {extension.options!r} and build {extension.build!r}, but must be mappings",
        TypeError,
    )
    class_options = ("name", "library", "priority")
    for name in extension.options:
        near = difflib.get_close_matches(name, OPTIONS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(OPTIONS)}"
        says = "says so itself" if name in class_options else f"has no such option{hint}"
        is_option = name in OPTIONS and name not in class_options
        check(is_option, lambda n=name, s=says: f"{cls.__name__}.options: {n!r}: the class {s}", TypeError)
    loads = cls.load is not KernelExtension.load or cls.build_jit is not KernelExtension.build_jit
    check(
        loads or extension.module is not None or bool(extension.build),
        lambda: f"{cls.__name__} has neither load nor build_jit, and says neither module nor build",
        TypeError,
    )
    if extension.build:
        _build_of(extension)


def _location_of(cls: type) -> Mark:
    """Return the source location of a class."""
    try:
        return Mark(inspect.getsourcefile(cls) or "", inspect.getsourcelines(cls)[1], 1)
    except (OSError, TypeError):  # defined interactively
        return Mark(f"<{cls.__module__}>", 1, 1)
