"""Inductor's choices of how a Triton kernel reduces rows.

**Persistent reductions of rows that are read beside broadcast values.**
Inductor holds a row of up to 1,024 elements in registers, and reads it once, where all memory of the reduction is
contiguous. A mask or a bias that is broadcast over the batch is not, and the softmax of masked scores becomes a loop
that reads its row twice or three times. Here the row's own direction decides: each operand is contiguous along it, or
does not depend on it.

**Blocks of products of a matrix and a vector**, which read memory once: Inductor's blocks have 16 warps for two rows,
and more bytes are under way at once with 8 (an H100 took 23 us for 67 MB, and 27 to 32 us).

Source: torch._inductor.choices.InductorChoices, whose subclasses are handed to torch._inductor.virtualized.V.
"""

from typing import Any

import sympy
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.triton import FixedTritonConfig
from torch._inductor.dependencies import MemoryDep

from forge.torch_internals.inductor.codegen import V
from forge.torch_internals.inductor.config import inductor_config

_LONGEST = 1024  # elements of a row, as Inductor has it of contiguous ones
_FEWEST_ROWS = 256  # of a matrix whose product with a vector has blocks of its own
_LONGEST_PRODUCT = 4096  # elements of a row; of longer ones, Inductor's own blocks are as fast
_PRODUCT = {"XBLOCK": 2, "R0_BLOCK": 2048, "num_warps": 8, "num_stages": 1}
_LOOPS = {"x", "r0_"}  # rows, and their elements


class RowChoices(InductorChoices):
    """Inductor's choices, with persistent reductions of rows that are contiguous along themselves, and blocks for
    products of a matrix and a vector."""

    def triton_kernel_kwargs(
        self, kernel_cls: Any, features: Any, groups: Any, kernel_kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments of a kernel's generator."""
        kernel_kwargs = super().triton_kernel_kwargs(kernel_cls, features, groups, kernel_kwargs)
        is_plain = not inductor_config.triton.cooperative_reductions and [set(each) for each in groups] == [_LOOPS]
        if is_plain and is_matrix_vector_product(features):
            kernel_kwargs = {**kernel_kwargs, "fixed_config": FixedTritonConfig(dict(_PRODUCT))}
        return kernel_kwargs

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


def is_matrix_vector_product(features: Any) -> bool:
    """Return whether each reduction of a kernel sums long rows of a matrix times a vector."""
    if not features.is_reduction():
        return False
    rows, length = features.numel, features.reduction_numel
    if not isinstance(rows, (int, sympy.Integer)) or not isinstance(length, (int, sympy.Integer)):
        return False
    if rows < _FEWEST_ROWS or not _LONGEST < length <= _LONGEST_PRODUCT:
        return False
    return all(
        _sums_products(node, rows * length, length)
        and all(is_read_along(dep, length) for dep in node.read_writes.reads)
        for node in features.reduction_nodes()
    )


def _sums_products(node: Any, elements: Any, length: Any) -> bool:
    """Return whether a reduction is a sum that reads a matrix along its rows, and a vector for each of them."""
    reads = node.read_writes.reads
    if node.node.get_reduction_type() != "sum" or not all(is_read_along(dep, length) for dep in reads):
        return False
    read = [sympy.prod(_lengths_of(dep)) for dep in reads]
    return elements in read and length in read


def _lengths_of(dep: Any) -> list[Any]:
    """Return the lengths of the loops that a read depends on."""
    pairs = zip(dep.var_names, dep.size, strict=True)
    return [size for variable, size in pairs if variable in dep.index.free_symbols]
