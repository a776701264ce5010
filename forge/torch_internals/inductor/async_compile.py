"""Inductor's compile processes, and patches of how it waits for kernels and builds them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch._inductor.async_compile import AsyncCompile as AsyncCompile
from torch._inductor.async_compile import get_compile_threads as get_compile_threads

from forge.torch_internals.patch import Hook, Scope, patch

wait_for_kernels: Hook[[Callable[[], None], dict[str, Any]], None] = Hook("wait for the kernels of a module")
build_kernel: Hook[[Callable, AsyncCompile, Sequence[str], str], Any] = Hook("build a kernel in C++")


@patch(
    AsyncCompile,
    "wait",
    scope=Scope.COMPILE,
    why="each region would wait for its kernels before the next region is lowered",
    issue="not reported: it is no bug; forge compiles many regions at once",
    upstream="torch/_inductor/async_compile.py:809@2.13.0, AsyncCompile.wait",
    not_probed="it saves time, and changes no result; tests/executors/inductorex/test_failures.py has its waits",
)
def defer_wait(compiling: AsyncCompile, scope: dict[str, Any]) -> None:
    """Wait for the kernels of a module that Inductor generated, whose globals are `scope`, or later."""
    wait_for_kernels(partial(defer_wait.original, compiling, scope), scope)


@patch(
    AsyncCompile,
    "cpp_pybinding",
    scope=Scope.COMPILE,
    why="g++ would run for each kernel, most of its time for the header that all have in common",
    issue="not reported: it is no bug; forge compiles many regions at once",
    upstream="torch/_inductor/async_compile.py:567@2.13.0, AsyncCompile.cpp_pybinding",
    not_probed="it saves time, and changes no result; tests/executors/inductorex/test_units.py counts the calls of g++",
)
def join_kernels(compiling: AsyncCompile, argtypes: Sequence[str], source: str) -> Any:
    """Return a kernel that is built together with others."""
    return build_kernel(join_kernels.original, compiling, argtypes, source)
