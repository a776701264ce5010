"""Enabled attention kernels, and the one that torch would choose."""

from collections.abc import Callable

import torch

get_cudnn_sdp_enabled = torch._C._get_cudnn_sdp_enabled
get_flash_sdp_enabled = torch._C._get_flash_sdp_enabled
get_math_sdp_enabled = torch._C._get_math_sdp_enabled
get_mem_efficient_sdp_enabled = torch._C._get_mem_efficient_sdp_enabled
get_sdp_priority_order = torch._C._get_sdp_priority_order

_SETTERS = {
    "flash_sdp": "_set_sdp_use_flash",
    "mem_efficient_sdp": "_set_sdp_use_mem_efficient",
    "math_sdp": "_set_sdp_use_math",
    "cudnn_sdp": "_set_sdp_use_cudnn",
    "mkldnn": "_set_mkldnn_enabled",
    "cudnn": "_set_cudnn_enabled",
}


def library_switches() -> dict[str, tuple[Callable, Callable]]:
    """Return the getter and the setter of what enables a library or a kernel of attention, of those that are there."""
    return {
        kind: (getattr(torch._C, f"_get_{kind}_enabled"), getattr(torch._C, setter))
        for kind, setter in _SETTERS.items()
        if hasattr(torch._C, f"_get_{kind}_enabled") and hasattr(torch._C, setter)
    }
