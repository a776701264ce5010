"""A bound on the indices of Inductor's C++ kernels: simplifying a long one takes sympy minutes, or does not end.

Windows of an image whose height and width are symbolic are such: padding to a multiple, `torch.roll` and views by
window each nest the index in another quotient and remainder. On a CPU with torch 2.13, indices of 160 terms take half a
second each, and those of 400 do not end. torch runs the region then.

The bug is https://github.com/pytorch/pytorch/issues/133734.

Source: simplify_index_in_vec_range, in torch._inductor.sizevars (torch._inductor.codegen.cpp before torch 2.13), which
is called for each index and loop when Inductor decides which loop to tile.
"""

from itertools import islice
from typing import Any

import sympy

from forge.torch_internals.inductor.codegen import cpp, sizevars
from forge.torch_internals.patch import Scope, patch

LONGEST = 200  # terms


class LongIndex(NotImplementedError):
    """An index has more terms than sympy simplifies in reasonable time."""


@patch(
    sizevars if hasattr(sizevars, "simplify_index_in_vec_range") else cpp,
    "simplify_index_in_vec_range",
    scope=Scope.COMPILE,
    why="sympy takes minutes to simplify a long index, or does not end",
    issue="https://github.com/pytorch/pytorch/issues/133734",
    upstream="torch/_inductor/sizevars.py:133@2.13.0, simplify_index_in_vec_range",
    not_probed="a program would not end without it; tests/executors/inductorex/test_indices.py has one with the patch",
)
def bound_index(index: sympy.Expr, *loop: Any) -> sympy.Expr:
    """Return a simplified index. Raises LongIndex for one of more than LONGEST terms."""
    if next(islice(sympy.preorder_traversal(index), LONGEST, None), None) is not None:
        raise LongIndex(f"an index in a tensor has more than {LONGEST} terms")
    return bound_index.original(index, *loop)
