"""clang, the core language: what torch's operations mean once names and signatures are out of the way.

Its symbols broadcast, promote and count dims from the front, and call prims.
"""

from forge.clang.contraction import contract
from forge.clang.core import (
    all_symbols,
    as_gradient,
    broadcast,
    broadcast_shapes,
    canonical_dims,
    clangop,
    convert,
    expand_to,
    language,
    prepare,
)
from forge.clang.creation import *  # noqa: F403
from forge.clang.elementwise import *  # noqa: F403
from forge.clang.indexing import *  # noqa: F403
from forge.clang.linalg import *  # noqa: F403
from forge.clang.promotion import Promotion, category, compute_dtype
from forge.clang.reduction import *  # noqa: F403
from forge.clang.shape import *  # noqa: F403
