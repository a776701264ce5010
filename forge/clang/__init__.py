"""The core language, clang: the meaning of torch's operations, independent of names and signatures.

Its symbols broadcast, promote and count dims from the front, and call prims.
"""

from forge.clang.contraction import *  # noqa: F403
from forge.clang.core import *  # noqa: F403
from forge.clang.creation import *  # noqa: F403
from forge.clang.elementwise import *  # noqa: F403
from forge.clang.indexing import *  # noqa: F403
from forge.clang.linalg import *  # noqa: F403
from forge.clang.promotion import *  # noqa: F403
from forge.clang.reduction import *  # noqa: F403
from forge.clang.shape import *  # noqa: F403
from forge.clang.sinks import *  # noqa: F403
