"""Barriers in Inductor's Triton kernels that read what they have written.

A reduction that does not fit a block is a loop, and a value that two loops need is written by one and read by the next.
Triton may give the two accesses other layouts, so that one thread reads what another one wrote; without a barrier
between the loops it reads what the memory held before. Seen on an H100 with torch 2.11: gradients of a norm in bfloat16
and of the rotary embedding before it were wrong by a factor of 10,000 (Gemma3).

The bug is https://github.com/pytorch/pytorch/issues/190517.

Source: torch._inductor.codegen.triton.TritonKernel.codegen_kernel, which returns the text of a kernel.
"""

import re
from typing import Any

from forge.torch_internals.inductor.codegen import TritonKernel
from forge.torch_internals.patch import Scope, patch

_LOOP = re.compile(r" *for r\d_offset in ")
_STORE = re.compile(r"tl\.(?:store|atomic_\w+)\((\w+_ptr\d+)")
_LOAD = re.compile(r"tl\.load\((\w+_ptr\d+)")


def with_barriers(kernel: str) -> str:
    """Return a kernel's text with a barrier before each loop, and before what follows it, that reads memory which was
    written before it."""
    lines: list[str] = []
    writes: set[str] = set()  # since the last barrier
    loop: int | None = None  # the line of the loop that is open
    for line in kernel.split("\n"):
        indent = _indent(line)
        if loop is not None and line.strip() and indent <= _indent(lines[loop]):
            loop = None
        if _LOOP.match(line):
            loop = len(lines)
        if writes.intersection(_LOAD.findall(line)):
            if loop is None or loop == len(lines):
                lines.append(f"{' ' * indent}tl.debug_barrier()")
            else:
                lines.insert(loop, f"{' ' * _indent(lines[loop])}tl.debug_barrier()")
                loop += 1
            writes.clear()
        lines.append(line)
        writes.update(_STORE.findall(line))
    return "\n".join(lines)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


@patch(
    TritonKernel,
    "codegen_kernel",
    scope=Scope.COMPILE,
    why="a kernel's loop may read memory that other threads have not written yet",
    issue="https://github.com/pytorch/pytorch/issues/190517",
    upstream="torch/_inductor/codegen/triton.py:6336@2.13.0, TritonKernel.codegen_kernel",
    not_probed="the race showed on one GPU and version; tests/executors/inductorex/test_barriers.py has the text",
)
def insert_barriers(self: TritonKernel, *args: Any, **options: Any) -> str:
    """Return the text of a kernel with barriers."""
    return with_barriers(insert_barriers.original(self, *args, **options))
