"""One compilation of each Triton kernel of a process, whichever regions it is in.

Inductor numbers the kernels of a module, and the number is part of a kernel's text: the same kernel in another place of
another region is compiled again. A training step of a U-Net has 208 kernels, and 149 texts but for their names. Here
kernels are named by their text, and those that a module asks for are the ones that another module has.

Source: torch._inductor.async_compile.CompiledTritonKernels, which does so within one graph.
"""

import hashlib
import threading
import weakref
from typing import Any

from forge.torch_internals.inductor.async_compile import AsyncCompile
from forge.torch_internals.inductor.cache_dir import cache_dir
from forge.torch_internals.inductor.codecache import CodeCacheFuture
from forge.torch_internals.inductor.codegen import TritonScheduling, V
from forge.torch_internals.patch import Scope, patch

_DIGITS = 12  # of a hash in a kernel's name
_OF_A_PROGRAM = "'store_cubin': True"  # in a kernel's text: C++ finds what was stored when the kernel ran for it


class SharedKernel(CodeCacheFuture):
    """A kernel that Inductor's processes compile: a future of which many modules wait for the one result."""

    def __init__(self, key: tuple[str, ...], future: Any) -> None:
        self._key = key
        self._future = future
        self._lock = threading.Lock()
        self._kernel: Any = None

    def result(self, *args: Any, **kwargs: Any) -> Any:
        """Return the kernel; waits until it is compiled. Raises the error of its compilation."""
        with self._lock:
            if self._kernel is None:
                self._kernel = _shared[self._key] = self._future.result(*args, **kwargs)
                self._future = None
            return self._kernel


_shared: "weakref.WeakValueDictionary[tuple[str, ...], Any]" = weakref.WeakValueDictionary()


def forget() -> None:
    """In a forked child: the processes that compile are its parent's."""
    _shared.clear()


@patch(
    TritonScheduling,
    "define_kernel",
    scope=Scope.COMPILE,
    why="the same kernel in two regions has two names, and is compiled twice",
    issue="not reported: it is no bug; forge compiles many regions at once",
    upstream="torch/_inductor/codegen/triton.py:7264@2.13.0, TritonScheduling.define_kernel",
    not_probed="it saves time, and changes no result; tests/executors/inductorex/test_shared_kernels.py has the names",
)
def name_by_text(scheduling: TritonScheduling, text: str, *args: Any) -> str:
    """Return the name of a kernel, which the module defines from now on: it ends with a hash of its text."""
    wrapper: Any = V.graph.wrapper_code
    suffix = hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
    wrapper.next_kernel_suffix = lambda: suffix
    try:
        name: str = name_by_text.original(scheduling, text, *args)
    finally:
        del wrapper.next_kernel_suffix
    return name


@patch(
    AsyncCompile,
    "triton",
    scope=Scope.COMPILE,
    why="a kernel that a module of another region has is compiled again",
    issue="not reported: it is no bug; forge compiles many regions at once",
    upstream="torch/_inductor/async_compile.py:393@2.13.0, AsyncCompile.triton",
    not_probed="it saves time, and changes no result; tests/executors/inductorex/test_shared_kernels.py counts kernels",
)
def share_kernels(compiling: AsyncCompile, name: str, text: str, device_str: str = "cuda") -> Any:
    """Return a kernel, or a future of it, which modules with the same text have in common while one of them lives."""
    if _OF_A_PROGRAM in text:
        return share_kernels.original(compiling, name, text, device_str)
    key = (cache_dir(), device_str, text)
    kernel = _shared.get(key)
    if kernel is None:
        result = share_kernels.original(compiling, name, text, device_str)
        kernel = _shared[key] = SharedKernel(key, result) if isinstance(result, CodeCacheFuture) else result
    return kernel
