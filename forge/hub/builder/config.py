"""The reader of build.toml, the description of a source tree of the Kernel Hub.

The format is edition 5 of that of the Hub's kernel-builder. Earlier editions are read where their meaning is
unambiguous.

Source: https://huggingface.co/docs/kernels/builder/writing-kernels
"""

import os
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from forge.hub.errors import MalformedError, Place
from forge.hub.files import MAX_METADATA_BYTES, read_small
from forge.hub.metadata_form import LICENSES
from forge.hub.variants import BACKENDS

FILE = "build.toml"
EDITION = 5
NAME = re.compile(r"(?=..)[a-z][a-z0-9]*(-[a-z0-9]+)*")  # as strict as metadata.json's rule for the name
NAME_FORM = "lower-case words between dashes, of two letters or more"
VERSION = re.compile(r"\d+\.\d+")
PYTHON_FILES = ("py", "pyi")

_FRAMEWORKS = ("torch", "torch-noarch", "tvm-ffi")
_FLAGS = {"cpu": "cxx-flags", "cuda": "cuda-flags", "rocm": "hip-flags", "xpu": "sycl-flags"}
_ARCHS = {"cuda": "cuda-capabilities", "rocm": "rocm-archs"}


@dataclass(frozen=True)
class Component:
    """A part of a native kernel, [kernel.NAME]: sources of one backend, by their paths in the tree.

    flags: of the backend's own compiler; cxx_flags: of the C++ compiler; archs: the devices that it targets; empty for
    all.
    """

    name: str
    backend: str
    src: tuple[str, ...]
    include: tuple[str, ...] = ()
    depends: tuple[str, ...] = ()
    cxx_flags: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Config:
    """The configuration of a source tree. framework: torch (compiled), torch-noarch (Python alone) or tvm-ffi.

    python_depends: by backend, "" for all of them. stable_abi: the torch version whose stable ABI a backend is built
    for. minver, maxver: of torch. pyext: the extensions of the Python package's files that are shipped.
    """

    folder: Path
    name: str
    version: int
    backends: tuple[str, ...]
    framework: str
    license: str
    upstream: str | None = None
    source: str | None = None
    repository: str | None = None
    python_depends: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    src: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    cxx_flags: tuple[str, ...] = ()
    pyext: tuple[str, ...] = PYTHON_FILES
    minver: str | None = None
    maxver: str | None = None
    stable_abi: Mapping[str, str] = field(default_factory=dict)
    archs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    components: tuple[Component, ...] = ()

    @property
    def module(self) -> str:
        """The name as a Python identifier."""
        return self.name.replace("-", "_")

    @property
    def package(self) -> Path:
        """The folder of the Python package."""
        return self.folder / "torch-ext" / self.module


def read_config(folder: Path) -> Config:
    """Read the build.toml of a folder. Raises MalformedError, which names the file, the line and the key."""
    place = Place(str(folder), file=FILE)
    content = read_small(folder / FILE, place, MAX_METADATA_BYTES)
    if content is None:
        raise MalformedError(f"{folder}: there is no {FILE}")
    try:
        text = content.decode()
        values = tomllib.loads(text)
    except ValueError as error:  # of UTF-8 and of TOML
        raise MalformedError(f"{place}: {error}") from error
    return _Reader(folder, text).config(values)


class _Reader:
    """A reader of a file's values, with a method for each kind."""

    def __init__(self, folder: Path, text: str) -> None:
        self._folder = folder
        self._lines = text.splitlines()

    def config(self, values: dict[str, Any]) -> Config:
        top = self.section("", values, {"general", "kernel", *_FRAMEWORKS})
        framework = self.framework(top)
        general = self.general(top.get("general"))
        options = self.options(framework, top.get(framework, {}))
        kernels = self.table("kernel", top.get("kernel", {}))
        if framework == "torch-noarch" and any(kernels.values()):
            self.no("kernel", None, "parts to compile stand beside [torch], but the tree is one of Python alone")
        components = [self.component(name, each, general["backends"]) for name, each in kernels.items() if each]
        config = Config(self._folder, framework=framework, **general, **options, components=tuple(components))
        if framework != "tvm-ffi" and not config.package.is_dir():
            self.no("general", "name", f"its Python files are in torch-ext/{config.module}/, which is not there")
        return config

    def framework(self, top: Mapping[str, Any]) -> str:
        names = [name for name in _FRAMEWORKS if name in top]
        if len(names) != 1:
            which = " and ".join(f"[{name}]" for name in names) or "none"
            self.no("", None, f"one of [torch], [torch-noarch] and [tvm-ffi] must be there, but there is {which}")
        earlier = [self.table(name, top.get(name, {})).get("universal") for name in ("torch", "general")]
        return "torch-noarch" if True in earlier else names[0]

    def general(self, value: Any) -> dict[str, Any]:
        keys = {"name", "version", "edition", "license", "upstream", "source", "backends", "hub", "python-depends"}
        earlier = {"universal", "kernel-depends", "cuda-minver", "cuda-maxver"}
        values = self.section("general", value, {*keys, *earlier, "cuda", "xpu", "tpu", "neuron"})
        edition = self.of("general", values, "edition", int, EDITION)
        if edition > EDITION:
            self.no("general", "edition", f"is {edition}, but this version of forge reads editions up to {EDITION}")
        name = self.of("general", values, "name", str)
        if not NAME.fullmatch(name):
            self.no("general", "name", f"is {name!r}, but must be {NAME_FORM}")
        backends = self.strings("general", values, "backends") or ("cuda",)
        for each in backends:
            self.one_of("general", "backends", each, BACKENDS)
        hub = self.section("general.hub", values.get("hub", {}), {"repo-id", "branch"})
        if values.get("kernel-depends"):
            self.no("general", "kernel-depends", "kernels that need other kernels are not built here")
        depends = {"": self.strings("general", values, "python-depends")}
        for backend in ("cuda", "xpu", "tpu", "neuron"):
            table = self.table(f"general.{backend}", values.get(backend, {}))
            depends[backend] = self.strings(f"general.{backend}", table, "python-depends")
        return {
            "name": name,
            "version": self.of("general", values, "version", int, 1),
            "backends": backends,
            "license": self.license(values),
            "upstream": self.of("general", values, "upstream", str, None),
            "source": self.of("general", values, "source", str, None),
            "repository": self.of("general.hub", hub, "repo-id", str, None),
            "python_depends": {backend: names for backend, names in depends.items() if names},
        }

    def license(self, values: Mapping[str, Any]) -> str:
        """Return the license. It is mandatory: the Hub's requirements ask for one."""
        value = self.of("general", values, "license", str, None)
        if value is None:
            self.no("general", "license", 'must be there: a license of the Hub, such as "Apache-2.0", or "other"')
        if value.lower() not in LICENSES:
            self.no("general", "license", f'is {value!r}, which is not a license identifier of the Hub; "other" is one')
        return value

    def options(self, framework: str, value: Any) -> dict[str, Any]:
        keys = {"src", "include", "pyext", "minver", "maxver", "stable-abi", "cxx-flags", "universal"}
        values = self.section(framework, value, {*keys, *_ARCHS.values(), "cuda_capabilities", "rocm_archs"})
        archs = {backend: self.strings(framework, values, key) for backend, key in _ARCHS.items()}
        return {
            "src": self.paths(framework, values, "src"),
            "include": self.paths(framework, values, "include"),
            "cxx_flags": self.strings(framework, values, "cxx-flags"),
            "pyext": tuple(each.removeprefix(".") for each in self.strings(framework, values, "pyext")) or PYTHON_FILES,
            "minver": self.version(framework, values, "minver"),
            "maxver": self.version(framework, values, "maxver"),
            "stable_abi": self.stable_abi(framework, values),
            "archs": {backend: each for backend, each in archs.items() if each},
        }

    def stable_abi(self, section: str, values: Mapping[str, Any]) -> dict[str, str]:
        value = values.get("stable-abi", {})
        if isinstance(value, dict):
            return {name: str(self.version(f"{section}.stable-abi", value, name)) for name in value}
        return dict.fromkeys(BACKENDS, str(self.version(section, values, "stable-abi")))

    def component(self, name: str, value: Any, backends: Sequence[str]) -> Component:
        section = f"kernel.{name}"
        kinds = {"cuda-minver", *_FLAGS.values(), *_ARCHS.values()}
        values = self.section(section, value, {"backend", "src", "include", "depends", *kinds})
        backend = self.of(section, values, "backend", str, backends[0] if len(backends) == 1 else ...)
        self.one_of(section, "backend", backend, BACKENDS)
        own = {_FLAGS.get(backend), _ARCHS.get(backend), "cxx-flags", None}
        for key in sorted({*_FLAGS.values(), *_ARCHS.values()} & values.keys() - own):
            self.no(section, key, f"is not for the backend {backend}")
        return Component(
            name,
            backend,
            src=self.paths(section, values, "src", required=True),
            include=self.paths(section, values, "include"),
            depends=self.strings(section, values, "depends"),
            cxx_flags=self.strings(section, values, "cxx-flags"),
            flags=self.strings(section, values, _FLAGS[backend]) if backend in ("cuda", "rocm", "xpu") else (),
            archs=self.strings(section, values, _ARCHS[backend]) if backend in _ARCHS else (),
        )

    # values of one kind

    def section(self, name: str, value: Any, keys: Collection[str]) -> dict[str, Any]:
        values = self.table(name, {} if value is None else value)
        for key in values.keys() - keys:
            self.no(
                name,
                key,
                f"is not a key of {f'[{name}]' if name else 'the file'}; those are {', '.join(sorted(keys))}",
            )
        return values

    def table(self, name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.no(name, None, f"is {value!r}, but must be a table")
        return value

    def of(self, section: str, values: Mapping[str, Any], key: str, kind: type, default: Any = ...) -> Any:
        if key not in values and default is not ...:
            return default
        value = values.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            what = {str: "a string", int: "an integer"}[kind]
            self.no(section, key, f"is {value!r}, but must be {what}" if key in values else f"must be there: {what}")
        return value

    def strings(self, section: str, values: Mapping[str, Any], key: str) -> tuple[str, ...]:
        value = values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            self.no(section, key, f"is {value!r}, but must be a list of strings")
        return tuple(value)

    def paths(self, section: str, values: Mapping[str, Any], key: str, *, required: bool = False) -> tuple[str, ...]:
        paths = self.strings(section, values, key)
        if required and not paths:
            self.no(section, key, "must name at least one file")
        for each in paths:
            path = PurePosixPath(each)
            if path.is_absolute() or ".." in path.parts:
                self.no(section, key, f"has {each!r}, but paths are below the folder of {FILE}")
            if not os.path.exists(self._folder / path):  # a path that is not valid does not exist either
                self.no(section, key, f"has {each!r}, which is not there")
            if key == "src" and not os.path.isfile(self._folder / path):
                self.no(section, key, f"has {each!r}, which is not a file")
        return paths

    def version(self, section: str, values: Mapping[str, Any], key: str) -> str | None:
        value = self.of(section, values, key, str, None)
        if value is not None and not VERSION.fullmatch(value):
            self.no(section, key, f'is {value!r}, but must be a version of torch such as "2.11"')
        return value

    def one_of(self, section: str, key: str, value: str, choices: Collection[str]) -> None:
        if value not in choices:
            self.no(section, key, f"has {value!r}, but known are {', '.join(choices)}")

    def no(self, section: str, key: str | None, problem: str) -> None:
        """Raise the error, with the line of the key, or of its section."""
        where = f"[{section}]" if section else ""
        subject = " ".join(filter(None, [where, key]))
        place = Place(str(self._folder), file=FILE)
        line = self._line(section, key)
        raise MalformedError(f"{place}{f':{line}' if line else ''}: {subject + ': ' if subject else ''}{problem}")

    def _line(self, section: str, key: str | None) -> int | None:
        here, line_number = "", None
        for number, line in enumerate(self._lines, 1):
            heading = re.match(r"\s*\[\s*([^\]]+?)\s*\]", line)
            if heading:
                here = heading[1].replace('"', "").replace("'", "")
                line_number = number if here == (section or key) else line_number
            elif key and here == section and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line):
                return number
        return line_number
