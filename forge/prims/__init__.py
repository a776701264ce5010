"""Prims: the operations that everything else is written in, by family, each with its meta and its gradient rule."""

from forge.prims.conv import *  # noqa: F403
from forge.prims.core import all_prims, check_dim, check_dims, known, make_prim, same
from forge.prims.creation import *  # noqa: F403
from forge.prims.distributed import *  # noqa: F403
from forge.prims.elementwise import *  # noqa: F403
from forge.prims.indexing import *  # noqa: F403
from forge.prims.linalg import *  # noqa: F403
from forge.prims.memory import *  # noqa: F403
from forge.prims.modes import *  # noqa: F403
from forge.prims.pooling import *  # noqa: F403
from forge.prims.random import *  # noqa: F403
from forge.prims.reduction import *  # noqa: F403
from forge.prims.resample import *  # noqa: F403
from forge.prims.shape import *  # noqa: F403
