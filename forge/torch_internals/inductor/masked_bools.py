"""Padding of booleans in Inductor's C++ kernels.

A vectorized kernel writes the padding of booleans as the mask of float32's vectors. Booleans that come of comparing
other dtypes are masks of these, and where one condition holds for the whole vector, C++ has no type for both: as of the
first of one token types, before which a column is padded.

Source: torch._inductor.codegen.cpp.CppVecOverrides.masked.
"""

from collections.abc import Callable
from typing import Any

import torch

from forge.torch_internals.inductor.codegen import CppVecOverrides, V
from forge.torch_internals.patch import Scope, patch


@patch(
    CppVecOverrides,
    "masked",
    scope=Scope.COMPILE,
    why="the padding of booleans that compare other dtypes than float32 is C++ that does not compile",
    issue="not reported: no issue names the type of the mask",
    upstream="torch/_inductor/codegen/cpp.py:1722@2.13.0, CppVecOverrides.masked",
)
def pad_masks(mask: Any, body: Callable[[], Any], other: Any) -> Any:
    """Return a value where a condition holds, and another one elsewhere. body: Generates the value."""

    def as_float_mask() -> Any:
        value = body()
        if value.dtype is not torch.bool or not value.is_vec:
            return value
        cast = V.kernel.cse.generate(V.kernel.compute, V.kernel._get_mask_cast(value, torch.float), dtype=torch.bool)
        cast.update_on_args("to_dtype", (value,), {})
        return cast

    return pad_masks.original(mask, as_float_mask, other)
