"""The compilers of this machine: their versions, their targets, and the parsing of their errors."""

import contextlib
import os
import re
import shutil
import subprocess
from functools import cache

import torch

from forge.hub.compat import library
from forge.hub.errors import HubError
from forge.support import child_processes

HEADERS = (".h", ".hh", ".hpp", ".hxx", ".cuh", ".inc", ".inl", ".ipp", ".tpp")
ERROR = re.compile(r"error:|undefined (reference|symbol)")


class NoCompilerError(HubError):
    """The error when no compiler for the sources is installed."""


def compiler() -> str:
    """Return the C++ compiler that torch calls. Raises NoCompilerError."""
    name = os.environ.get("CXX", "cl" if os.name == "nt" else "c++")
    path = shutil.which(name, path=programs())
    if path is None:
        raise NoCompilerError(f"there is no C++ compiler {name!r}: install one, or name a program in CXX")
    return path


def programs() -> str:
    """Return PATH without relative entries, which would name folders in the current one."""
    return child_processes.environment().get("PATH", os.defpath)


@cache
def version(program: str) -> str:
    """Return a compiler's path and the version that it reports."""
    process = subprocess.run([program, "--version"], capture_output=True, text=True, errors="replace")
    return f"{program}: {process.stdout}"


@cache
def cpu_features() -> str:
    """Return the instruction sets that code for this machine's CPU (-march=native) may use."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return torch.backends.cpu.get_cpu_capability()


def nvcc() -> str | None:
    """Return the CUDA compiler, or None."""
    home = library("torch.utils.cpp_extension").CUDA_HOME
    return None if home is None else shutil.which("nvcc", path=os.path.join(home, "bin"))


def architectures() -> list[str]:
    """Return the capabilities that torch compiles for: the requested ones, else those of this machine's devices."""
    setting = os.environ.get("TORCH_CUDA_ARCH_LIST", "native")
    if setting not in ("", "native"):
        return [setting]
    return sorted({".".join(map(str, torch.cuda.get_device_capability(n))) for n in range(torch.cuda.device_count())})


def cuda_problem() -> str | None:
    """Return the reason why CUDA sources cannot be compiled here, or None."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if nvcc() is None:
        return "there is no nvcc: install the CUDA toolkit, or name its folder in CUDA_HOME"
    if not architectures():
        return "there is no GPU to compile for: name capabilities in TORCH_CUDA_ARCH_LIST, such as 8.0;9.0"
    return None


def first_errors(output: str, count: int) -> list[str]:
    """Return the lines from a compiler's first error on, or the last lines if none is marked as an error."""
    lines = [line for line in output.strip().splitlines() if not line.startswith("ninja: build stopped")]
    first = next((index for index, line in enumerate(lines) if ERROR.search(line)), max(0, len(lines) - 4))
    return lines[first : first + count]
