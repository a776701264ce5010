"""nvFuser's executor for tests: over the double of the library, on CPU tensors, and over the library where it loads."""

from collections.abc import Callable

import nvfuser_double

from forge.executors import Declined, register_executor
from forge.executors.nvfuserex import NvFuserExecutor, nvfuserex
from forge.ir import BoundSymbol, Trace


class Always(NvFuserExecutor):
    """Makes regions of single calls, too, and takes what the library refuses for an error of the translation."""

    def is_profitable(self, calls: list[BoundSymbol]) -> bool:
        return True

    def fuse(self, region: Trace) -> Callable | Declined:
        made = super().fuse(region)
        refused = isinstance(made, Declined) and made.reason.startswith("nvFuser failed")
        assert not refused, f"{made.reason}: {region}"
        return made


double = register_executor(NvFuserExecutor("nvfuser-double", lambda: nvfuser_double, "cpu"))
_OF_SINGLE_CALLS = {
    "nvfuser-double": Always("nvfuser-double", lambda: nvfuser_double, "cpu"),
    "nvfuser": Always("nvfuser"),
}
AVAILABLE = {"nvfuser-double": "cpu"} | ({"nvfuser": "cuda"} if nvfuserex.is_available() else {})  # name: device


def executor_of(name: str) -> NvFuserExecutor:
    """The executor of this name that makes regions of single calls."""
    return _OF_SINGLE_CALLS[name]
