"""The executors of nvFuser for tests: with the double of the library on CPU tensors, and with the library if it
loads."""

from collections.abc import Callable

import nvfuser_double

from forge.executors import Declined, register_executor
from forge.executors.nvfuserex import NvFuserExecutor, nvfuserex
from forge.ir import BoundSymbol, Trace


class Always(NvFuserExecutor):
    """An executor that makes regions of single calls, too, and treats refusals of the library as translation errors."""

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
    """Return the executor of this name that makes regions of single calls."""
    return _OF_SINGLE_CALLS[name]
