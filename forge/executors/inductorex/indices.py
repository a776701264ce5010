"""A bound on the indices of Inductor's C++ kernels: simplifying a long one takes sympy minutes, or does not end.

Windows of an image whose height and width are symbolic are such: padding to a multiple, `torch.roll` and views by
window each nest the index in another quotient and remainder. On a CPU with torch 2.13, indices of 160 terms take half a
second each, and those of 400 do not end. torch runs the region then.

Source: simplify_index_in_vec_range, in torch._inductor.sizevars (torch._inductor.codegen.cpp before torch 2.13), which
is called for each index and loop when Inductor decides which loop to tile.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import sympy

from forge.torch_internals.inductor.codegen import cpp, sizevars

LONGEST = 200  # terms
_PLACE = sizevars if hasattr(sizevars, "simplify_index_in_vec_range") else cpp


class LongIndex(NotImplementedError):
    """An index has more terms than sympy simplifies in reasonable time."""


@contextmanager
def bounded() -> Iterator[None]:
    """Inside, a long index raises LongIndex. To be entered under a lock of the caller's."""
    simplify = _PLACE.simplify_index_in_vec_range

    def simplify_if_short(index: sympy.Expr, *loop: Any) -> sympy.Expr:
        if next(islice(sympy.preorder_traversal(index), LONGEST, None), None) is not None:
            raise LongIndex(f"an index in a tensor has more than {LONGEST} terms")
        return simplify(index, *loop)

    _PLACE.simplify_index_in_vec_range = simplify_if_short
    try:
        yield
    finally:
        _PLACE.simplify_index_in_vec_range = simplify
