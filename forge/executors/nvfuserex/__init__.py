"""The fusion executor of nvFuser, NVIDIA's fuser of pointwise calls, reductions and views: opt-in by name, if
`nvfuser_direct` loads.

It takes the prims that its table (elementwise.py, reduction.py, shape.py, creation.py) translates to nvFuser's
operators; matrix products, indexing and random numbers are left to torch. The library is imported on first use.
"""

import functools
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from forge.executors.can_fuse_cache import CanFuseCache
from forge.executors.executor import Decision, Declined, FusionExecutor
from forge.executors.nvfuserex import creation, elementwise, reduction, shape  # their rules
from forge.executors.nvfuserex.compile import Compiler
from forge.executors.nvfuserex.library import nvfuser_direct
from forge.executors.nvfuserex.translate import takes
from forge.executors.registry import register_executor
from forge.ir import BoundSymbol, Trace

_SETTINGS = ("NVFUSER_DISABLE", "NVFUSER_ENABLE")


class NvFuserExecutor(FusionExecutor):
    """An executor of regions of pointwise calls, reductions and views, each one definition of nvFuser.

    `library` returns the module `nvfuser_direct`, or Declined with the reason; `device` is the type of its devices.
    """

    strided = True
    boxed = True
    fuses_decompositions = True

    def __init__(self, name: str, library: Callable[[], Any] = nvfuser_direct, device: str = "cuda") -> None:
        super().__init__(name)
        self.device = device
        self._library = library
        self._answers = CanFuseCache(partial(takes, device=device))

    def is_available(self) -> Decision:
        library = self._library()
        return library if isinstance(library, Declined) else True

    def can_fuse(self, bound: BoundSymbol) -> Decision:
        return self._answers.get(bound)

    def fuse(self, region: Trace) -> Callable | Declined:
        return self._compiler.compile(region)

    def identity(self) -> str | Declined:
        """Return a key of everything on which nvFuser's code depends: its version and its settings."""
        return repr((self._library().version(), [os.environ.get(name) for name in _SETTINGS]))

    def dump(self, function: Callable) -> bytes | Declined:
        return self._compiler.dump(function)

    def load(self, data: bytes) -> Callable:
        return self._compiler.load(data)

    @functools.cached_property
    def _compiler(self) -> Compiler:
        return Compiler(self._library(), self.device)


nvfuserex = register_executor(NvFuserExecutor("nvfuser"))
