"""The requirements of a file: versions, the processor and the device that its code was compiled for."""

import platform
import sys
from collections.abc import Mapping
from typing import Any

import torch

from forge.version import __version__

_CAPABILITIES = ("DEFAULT", "AVX2", "AVX512")  # of processors, each with the ones before


def requirements(device: str, forms: set[str]) -> dict[str, Any]:
    """Return what a file needs: entry points in forge's form need this forge and this Python, too."""
    result = {
        "torch": _release(),
        "system": f"{sys.platform} {platform.machine()}",
        "processor": torch.backends.cpu.get_cpu_capability(),
        "device": device,
    }
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        result |= {"cuda": str(torch.version.cuda), "capability": f"{major}.{minor}"}
    if "forge" in forms:
        result |= {"forge": __version__, "python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    return result


def find_unmet(needs: Mapping[str, Any], device: torch.device) -> str | None:
    """Return what this process lacks, None where it lacks nothing."""
    if device.type != needs["device"]:
        return f"is for {needs['device']}, but was asked for on {device}"
    if device.type not in _available():
        return f"is for {device.type}, but this process has {' and '.join(_available())} alone"
    here = requirements(device.type, {"forge"})
    for name, value in needs.items():
        if name == "processor":
            if not _is_as_capable(here[name], value):
                return f"is for processors with {value}, but this one has {here[name]}"
        elif here[name] != value:
            return f"was exported with {name} {value}, but this process has {here[name]}; export it again"
    return None


def _available() -> list[str]:
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def _is_as_capable(own: str, minimum: str) -> bool:
    if own in _CAPABILITIES and minimum in _CAPABILITIES:
        return _CAPABILITIES.index(own) >= _CAPABILITIES.index(minimum)
    return own == minimum


def _release() -> str:
    return torch.__version__.partition("+")[0]
