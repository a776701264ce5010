"""The prims: the operations to which everything else decomposes, by family, each with its meta and its gradient
rule."""

from forge.prims.arithmetic import *  # noqa: F403
from forge.prims.checks import *  # noqa: F403
from forge.prims.complex_numbers import *  # noqa: F403
from forge.prims.conv import *  # noqa: F403
from forge.prims.core import *  # noqa: F403
from forge.prims.creation import *  # noqa: F403
from forge.prims.ctc import *  # noqa: F403
from forge.prims.determinants import *  # noqa: F403
from forge.prims.distributed import *  # noqa: F403
from forge.prims.elements import *  # noqa: F403
from forge.prims.elementwise import *  # noqa: F403
from forge.prims.factorizations import *  # noqa: F403
from forge.prims.fourier import *  # noqa: F403
from forge.prims.indexing import *  # noqa: F403
from forge.prims.library import *  # noqa: F403
from forge.prims.linalg import *  # noqa: F403
from forge.prims.memory import *  # noqa: F403
from forge.prims.modes import *  # noqa: F403
from forge.prims.pooling import *  # noqa: F403
from forge.prims.random import *  # noqa: F403
from forge.prims.randomized import *  # noqa: F403
from forge.prims.recurrent import *  # noqa: F403
from forge.prims.reduction import *  # noqa: F403
from forge.prims.resample import *  # noqa: F403
from forge.prims.shape import *  # noqa: F403
from forge.prims.solvers import *  # noqa: F403
from forge.prims.special_functions import *  # noqa: F403
from forge.prims.spectral import *  # noqa: F403
from forge.prims.statistics import *  # noqa: F403
