"""Persistent reductions of rows that are read beside broadcast values.

Inductor holds a row of up to 1,024 elements in registers, and reads it once, where all memory of the reduction is
contiguous. A mask or a bias that is broadcast over the batch is not, and the softmax of masked scores becomes a loop
that reads its row twice or three times. Here the row's own direction decides: each operand is contiguous along it, or
does not depend on it.

Source: torch._inductor.choices.InductorChoices, whose subclasses are handed to torch._inductor.virtualized.V.
"""

from typing import Any

import sympy
from torch._inductor.choices import InductorChoices
from torch._inductor.dependencies import MemoryDep

from forge.torch_internals.inductor.codegen import V
from forge.torch_internals.inductor.config import inductor_config

_LONGEST = 1024  # elements of a row, as Inductor has it of contiguous ones


class RowChoices(InductorChoices):
    """Inductor's choices, with persistent reductions of rows that are contiguous along themselves."""

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        """Return whether a kernel holds each row at once."""
        if InductorChoices.should_use_persistent_reduction(features, cooperative_reduction):
            return True
        if cooperative_reduction or not inductor_config.triton.persistent_reductions:
            return False
        if not V.graph.sizevars.statically_known_leq(features.reduction_numel, _LONGEST):
            return False
        return all(
            is_read_along(dep, features.reduction_numel)
            for node in features.reduction_nodes()
            for dep in node.read_writes.reads
        )


def is_read_along(dep: Any, length: Any) -> bool:
    """Return whether a read steps by one element, or by none, along the innermost loop of this length."""
    if not isinstance(dep, MemoryDep) or not dep.var_names or dep.size[-1] != length:
        return isinstance(dep, MemoryDep) and length not in dep.size
    variable = dep.var_names[-1]
    if variable not in dep.index.free_symbols:
        return True
    rest = dep.index - variable
    return variable not in sympy.expand(rest).free_symbols
