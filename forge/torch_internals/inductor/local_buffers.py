"""Local buffers of Inductor's C++ kernels, where the loop around them is not tiled.

Inductor fuses the outer loops of a reduction and of the functions that follow it, and keeps a value that both need in a
buffer of one row. Where the outer loop is tiled, as of a transposed tensor, each step has several rows, and the buffer
keeps the last one: results are wrong. Seen on a CPU with torch 2.13: the gradient of a layer norm whose output
is transposed. Without the buffer the value is in memory whole, and the loops are fused as before.

The bug is https://github.com/pytorch/pytorch/issues/185702, which torch 2.14 has not.

Source: torch._inductor.codegen.cpp.OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr, which says whether
kernels may share their outer loops. Inductor asks it with the local buffers, and without them where it says no.
"""

from typing import Any

from forge.torch_internals.inductor.codegen import LocalBufferContext, OuterLoopFusedSchedulerNode, V
from forge.torch_internals.patch import Scope, patch


@patch(
    OuterLoopFusedSchedulerNode,
    "check_outer_fusion_loop_level_attr",
    scope=Scope.COMPILE,
    why="kernels that share tiled loops keep one row of several in a local buffer: wrong values",
    issue="https://github.com/pytorch/pytorch/issues/185702",
    upstream="torch/_inductor/codegen/cpp.py:459@2.13.0, check_outer_fusion_loop_level_attr",
    before=(2, 14),
)
def share_outer_loops(self: OuterLoopFusedSchedulerNode, kernels: list[Any], depth: int) -> bool:
    """Return whether kernels may share their outer loops: with local buffers, only where these are not tiled."""
    context = V.local_buffer_context
    if isinstance(context, LocalBufferContext) and context.local_buffers and _are_tiled(kernels, depth):
        return False
    return share_outer_loops.original(self, kernels, depth)


def _are_tiled(kernels: list[Any], depth: int) -> bool:
    return any(loop.steps != 1 for kernel in kernels for loop in kernel.loop_nest.loops[:depth])
