"""Local buffers of Inductor's C++ kernels, where the loop around them is not tiled.

Inductor fuses the outer loops of a reduction and of the functions that follow it, and keeps a value that both need in a
buffer of one row. Where the outer loop is tiled, as of a transposed tensor, each step has several rows, and the buffer
keeps the last one: results are wrong. Seen on a CPU with torch 2.13: the gradient of a layer norm whose output
is transposed. Without the buffer the value is in memory whole, and the loops are fused as before.

Source: torch._inductor.codegen.cpp.OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr, which says whether
kernels may share their outer loops. Inductor asks it with the local buffers, and without them where it says no.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from forge.torch_internals.inductor.codegen import LocalBufferContext, OuterLoopFusedSchedulerNode, V


@contextmanager
def untiled() -> Iterator[None]:
    """Inside, kernels that share tiled loops have no local buffers. To be entered under a lock of the caller's."""
    check = OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr

    def check_with_buffers(self: OuterLoopFusedSchedulerNode, kernels: list[Any], depth: int) -> bool:
        context = V.local_buffer_context
        if isinstance(context, LocalBufferContext) and context.local_buffers and _are_tiled(kernels, depth):
            return False
        return check(self, kernels, depth)

    OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr = check_with_buffers
    try:
        yield
    finally:
        OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr = check


def _are_tiled(kernels: list[Any], depth: int) -> bool:
    return any(loop.steps != 1 for kernel in kernels for loop in kernel.loop_nest.loops[:depth])
