"""Availability of forge's Triton kernels on a device."""

import importlib.util

from forge.executors.executor import Decision, decline
from forge.ir import TensorProxy


def runs_triton(name: str, x: TensorProxy) -> Decision:
    """Return whether Triton's kernels run on the device of the argument of that name."""
    if x.device.type != "cuda":
        return decline(f"{name} is on {x.device.type}, and Triton's kernels run on CUDA GPUs")
    return True if importlib.util.find_spec("triton") else decline("triton is not installed")
