"""The Python module of nvFuser: its availability, and its import."""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator
from types import ModuleType

import torch

from forge.executors.executor import Declined, decline
from forge.ir.checks import in_one_line
from forge.torch_internals.versions import TORCH

MODULE = "nvfuser_direct"
BUILT_FOR = (2, 10)  # the torch of the newest wheels
REFUSED_FROM = (2, 13)


def nvfuser_direct() -> ModuleType | Declined:
    """Return nvFuser's module, imported on the first call; Declined with the reason if it cannot run."""
    if not torch.cuda.is_available():  # importing it without one is an error
        return decline("there is no CUDA device")
    if TORCH >= REFUSED_FROM:
        return decline(
            f"nvFuser's wheels are built for torch {'.'.join(map(str, BUILT_FOR))}, and from torch "
            f"{'.'.join(map(str, REFUSED_FROM))} on torch's structures differ from those that they were built with"
        )
    if importlib.util.find_spec(MODULE) is None:
        return decline(f"{MODULE} is not installed: pip install 'forge-jit[nvfuser]'")
    return _import_library()


@functools.cache
def _import_library() -> ModuleType | Declined:
    try:
        with _bound_lazily():
            return importlib.import_module(MODULE)
    except (ImportError, OSError) as error:
        return decline(f"{MODULE} cannot be imported: {in_one_line(error)}")


@contextlib.contextmanager
def _bound_lazily() -> Iterator[None]:
    """Look up the torch symbols that nvFuser names when they are called: a constructor that a single GPU never reaches
    was removed in torch 2.11."""
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_LAZY)
    try:
        yield
    finally:
        sys.setdlopenflags(flags)
