"""Work in the background, beside the program that runs."""

import os

import torch


def is_background_enabled() -> bool:
    """Return whether a program may be compiled a second time, to take its place while it is in use
    (forge/runtime/tiering.py): which of the two computes a result, and so how it is rounded, depends on time. Off under
    torch.use_deterministic_algorithms, and by FORGE_BACKGROUND=0."""
    return os.environ.get("FORGE_BACKGROUND", "1") != "0" and not torch.are_deterministic_algorithms_enabled()
