"""The target of compilation: the processor and the devices, as text that another process computes, too."""

import platform
from functools import cache

import torch


@cache
def processor() -> str:
    """Return the kind of this processor: kernels are compiled for it."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = file.read(1 << 13).split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    prefixes = ("model name", "flags", "Features", "CPU part")
    return "\n".join(line for line in lines if line.startswith(prefixes))


def device_name(device: torch.device) -> str:
    """Return a GPU with its name and capability; a CPU is `processor()`."""
    if device.type != "cuda":
        return str(device)
    return f"{device} {torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
