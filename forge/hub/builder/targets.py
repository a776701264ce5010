"""The variants of a source tree that this machine can build, and the reasons against the others."""

import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from forge.hub import toolchain
from forge.hub.builder.config import Component, Config

STABLE_ABI = "2.11"  # for trees that name no version, and use no other headers of torch's
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*[<"]((?:torch|ATen|c10)/[^>"]*)', re.MULTILINE)
_STABLE_HEADERS = (b"torch/csrc/stable/", b"torch/headeronly/", b"torch/csrc/inductor/aoti_torch/c/")
_SYSTEMS = {"linux": "linux", "darwin": "darwin"}
_MACHINES = {"arm64": "aarch64", "AMD64": "x86_64"}


@dataclass(frozen=True)
class Target:
    """A variant to build; without components, it has Python files only. stable_abi: the oldest torch version that runs
    it through the stable ABI, or None for a build for this torch's minor version only."""

    variant: str
    backend: str
    components: tuple[Component, ...] = ()
    stable_abi: str | None = None


def targets(config: Config) -> tuple[list[Target], dict[str, str]]:
    """Return the targets that can be built here, and the reason for each backend that cannot."""
    result, reasons = [], {}
    for backend in config.backends:
        reason = next(_problems(config, backend), None)
        if reason is None:
            result.append(_target(config, backend))
        else:
            reasons[backend] = reason
    return result, reasons


def _target(config: Config, backend: str) -> Target:
    if config.framework == "torch-noarch":
        return Target(f"torch-{backend}", backend)
    components = tuple(each for each in config.components if each.backend == backend)
    stable = config.stable_abi.get(backend) or _as_sources_allow(config, components)
    name = backend if backend != "cuda" else f"cu{str(torch.version.cuda).replace('.', '')}"
    system = f"{name}-{_machine()}-{_SYSTEMS[sys.platform]}"
    if stable is not None:
        return Target(f"torch-stable-abi{stable.replace('.', '')}-{system}", backend, components, stable)
    abi = "-cxx11" if sys.platform == "linux" else ""
    return Target(f"torch{''.join(map(str, torch_version()))}{abi}-{system}", backend, components)


def torch_version() -> tuple[int, int]:
    """Return the major and minor version of the installed torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _problems(config: Config, backend: str) -> Iterator[str]:
    if config.framework == "torch-noarch":
        return
    if config.framework == "tvm-ffi":
        yield "it is compiled against tvm-ffi, and forge builds for torch alone"
    if backend not in ("cpu", "cuda"):
        yield f"forge has no compiler for {backend}; the Hub's kernel-builder has"
    if sys.platform not in _SYSTEMS:
        yield f"native kernels are built on Linux and macOS, and this is {sys.platform}"
    components = [each for each in config.components if each.backend == backend]
    if not components:
        yield f'no [kernel.NAME] has backend = "{backend}"'
    others = sorted({name for each in components for name in each.depends if name != "torch"})
    if others:
        yield f"it depends on {', '.join(others)}, which forge does not fetch; the Hub's kernel-builder does"
    yield from _of_versions(config, backend)
    if backend == "cuda" and (problem := toolchain.cuda_problem()) is not None:
        yield problem


def _of_versions(config: Config, backend: str) -> Iterator[str]:
    here = torch_version()
    requirements = {"needs torch": config.minver, "is made for torch's stable ABI of": config.stable_abi.get(backend)}
    for what, version in requirements.items():
        if version is not None and here < _version(version):
            yield f"it {what} {version}, and {torch.__version__} is installed"
    if config.maxver is not None and here > _version(config.maxver):
        yield f"it takes torch up to {config.maxver}, and {torch.__version__} is installed"


def _version(version: str) -> tuple[int, int]:
    major, minor = version.split(".")
    return int(major), int(minor)


def _as_sources_allow(config: Config, components: tuple[Component, ...]) -> str | None:
    """Return the stable ABI version if every torch header that the sources name is part of it, else None."""
    if torch_version() < _version(STABLE_ABI):
        return None
    paths = [*config.src, *[path for each in components for path in each.src]]
    headers = [name for path in paths for name in _INCLUDE.findall((config.folder / path).read_bytes())]
    return STABLE_ABI if headers and all(name.startswith(_STABLE_HEADERS) for name in headers) else None


def _machine() -> str:
    return _MACHINES.get(platform.machine(), platform.machine())
