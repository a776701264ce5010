"""A check of this machine: versions, devices, compilers, caches, executors and kernels, each with a reason.

`forge doctor` prints it; `forge doctor --json` is the form for a bug report.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from forge import hub
from forge.executors import hubex
from forge.executors.executor import Declined
from forge.executors.registry import known_executors, resolve_executors
from forge.hub import cache, toolchain
from forge.hub.compat import cache_root
from forge.ir.checks import in_one_line
from forge.ir.printing import quantity
from forge.support import owner_only_store
from forge.support.owner_only_store import user_cache
from forge.version import __version__

State = Literal["ok", "absent", "problem"]
PACKAGES = ("forge-jit", "triton", "nvfuser_direct", "kernels", "huggingface_hub", "transformers", "ninja")
VARIABLES = ("FORGE_", "TORCH_LOGS", "TORCHINDUCTOR_", "HF_", "KERNELS_CACHE", "CXX", "CUDA_HOME", "OMP_NUM_THREADS")
MARKS = {"ok": " ", "absent": "-", "problem": "!"}
WIDTH = 16  # the column width of the items
SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD")


@dataclass(frozen=True)
class Finding:
    """One item of the check. state: "absent" is no fault; "problem" costs the user something."""

    section: str
    item: str
    state: State
    detail: str


def examine() -> list[Finding]:
    """Return all findings, in display order. A check that fails is a finding, not an error."""
    findings = []
    for section, look in SECTIONS.items():
        try:
            findings += [Finding(section, *each) for each in look()]
        except Exception as error:
            reason = f"cannot be told: {in_one_line(error)}"
            findings.append(Finding(section, "-", "problem", reason))
    return findings


def show(findings: list[Finding]) -> str:
    """Return the findings as text, by section, with problems marked."""
    lines = []
    for section in dict.fromkeys(each.section for each in findings):
        lines.append(section)
        for each in (each for each in findings if each.section == section):
            lines.append(f"  {MARKS[each.state]} {each.item:{WIDTH}} {each.detail}".rstrip())
    return "\n".join(lines)


def as_json(findings: list[Finding]) -> list[dict[str, Any]]:
    """Return the findings as plain data."""
    return [asdict(each) for each in findings]


Row = tuple[str, State, str]


def _versions() -> Iterator[Row]:
    yield "forge", "ok", f"{__version__}, {Path(__file__).parents[1]}"
    yield "torch", "ok", torch.__version__
    yield "Python", "ok", f"{platform.python_version()}, {sys.executable}"
    yield "system", "ok", f"{platform.platform()}, {quantity(os.cpu_count() or 1, 'core')}"
    for name in PACKAGES:
        try:
            yield name, "ok", importlib.metadata.version(name.replace("_", "-"))
        except importlib.metadata.PackageNotFoundError:
            present = importlib.util.find_spec(name.replace("-", "_")) is not None
            yield name, "ok" if present else "absent", "" if present else "is not installed"


def _devices() -> Iterator[Row]:
    yield "cpu", "ok", f"{torch.backends.cpu.get_cpu_capability()}, {quantity(torch.get_num_threads(), 'thread')}"
    if not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        yield "cuda", "absent", f"torch sees no GPU; it is built with {built}"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"capability {properties.major}.{properties.minor}"
        yield f"cuda:{index}", "ok", f"{properties.name}, {capability}, {_size(properties.total_memory)}"


def _compilers() -> Iterator[Row]:
    try:
        path = toolchain.compiler()
        yield "C++", "ok", toolchain.version(path).splitlines()[0]
    except hub.HubError as error:
        yield "C++", "problem", f"{error}; without one, torch runs what would be fused on a CPU"
    problem = toolchain.cuda_problem()
    yield "CUDA", "ok" if problem is None else "absent", problem or toolchain.version(toolchain.nvcc()).splitlines()[-1]


def _caches() -> Iterator[Row]:
    inductor = importlib.import_module("forge.torch_internals.inductor.cache_dir").cache_dir
    places: dict[str, Callable[[], str | Path]] = {
        "programs": lambda: user_cache() / "programs",
        "verdicts": lambda: user_cache() / "verdicts",
        "builds": lambda: user_cache() / "builds",
        "objects": lambda: user_cache() / "objects",
        "Inductor": inductor,
        "Hub": cache_root,
    }
    for name, place in places.items():
        try:
            yield name, *_of_folder(Path(place()))
        except hub.MissingExtraError as error:
            yield name, "absent", str(error)
        except OSError as error:
            yield name, "problem", f"cannot be used: {error}"


def _of_folder(folder: Path) -> tuple[State, str]:
    if not folder.exists():
        parent = next(each for each in folder.parents if each.exists())
        if os.access(parent, os.W_OK):
            return "absent", f"{folder}: nothing is kept yet"
        return "problem", f"{folder}: {parent} cannot be written to, so nothing is kept"
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    text = f"{folder}: {quantity(len(files), 'file')}, {_size(sum(path.stat().st_size for path in files))}"
    try:
        owner_only_store.check_folder(folder if folder.is_relative_to(user_cache()) else folder.resolve())
    except owner_only_store.UntrustedFile as reason:  # the store would reject its files for the same reason
        return "problem", f"{text}, but {reason}"
    return ("ok", text) if os.access(folder, os.W_OK) else ("problem", f"{text}, but it cannot be written to")


def _executors() -> Iterator[Row]:
    default = [executor.name for executor in resolve_executors(None)]
    yield "default order", "ok", ", ".join(default)
    for name, executor in known_executors().items():
        available = executor.is_available()
        reason = available.reason if isinstance(available, Declined) else ""
        yield name, "ok" if available else "absent", reason or ("" if name in default else "is asked by name")


def _kernels() -> Iterator[Row]:
    kernels = [*hubex.hubex.kernels]
    for kernel in kernels:
        reason = kernel.unusable()
        yield kernel.name, *(("ok", kernel.operation) if reason is None else ("absent", reason))
    if not kernels:
        yield "with forge", "absent", "Triton and a GPU are needed for the kernels that come with forge"
    try:
        cached = list(cache.cached_repositories())
        yield "from the Hub", "ok" if cached else "absent", ", ".join(cached) or "the cache has none"
    except hub.MissingExtraError as error:
        yield "from the Hub", "absent", str(error)


def _policy() -> Iterator[Row]:
    for name, value in vars(hub.Policy()).items():
        yield name, "ok", repr(value)


def _environment() -> Iterator[Row]:
    for name, value in sorted(os.environ.items()):
        if name.startswith(VARIABLES):
            hidden = any(word in name for word in SECRETS)
            yield name, "ok", "is set; its value is not shown" if hidden else value


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


SECTIONS: dict[str, Callable[[], Iterator[Row]]] = {
    "versions": _versions,
    "devices": _devices,
    "compilers": _compilers,
    "caches": _caches,
    "executors": _executors,
    "kernels": _kernels,
    "policy": _policy,
    "environment": _environment,
}
