"""The meanings of torch's functions and methods as symbols, in families as in forge/prims."""

from forge.torchlang.calculus import *  # noqa: F403
from forge.torchlang.combining import *  # noqa: F403
from forge.torchlang.complex_numbers import *  # noqa: F403
from forge.torchlang.conversion import *  # noqa: F403
from forge.torchlang.copies import *  # noqa: F403
from forge.torchlang.core import (
    RecordFactories,
    View,
    alias_step,
    all_symbols,
    call,
    find,
    function_name,
    has_one_overload,
    is_factory,
    language,
    overload_of,
    register_operator,
    scatter_step,
    stands_for,
    torch_function_of,
    torchsymbol,
    write,
)
from forge.torchlang.creation import *  # noqa: F403
from forge.torchlang.determinants import *  # noqa: F403
from forge.torchlang.distances import *  # noqa: F403
from forge.torchlang.distributed import *  # noqa: F403
from forge.torchlang.einsum import *  # noqa: F403
from forge.torchlang.elementwise import *  # noqa: F403
from forge.torchlang.factorizations import *  # noqa: F403
from forge.torchlang.fourier import *  # noqa: F403
from forge.torchlang.indexing import *  # noqa: F403
from forge.torchlang.joining import *  # noqa: F403
from forge.torchlang.limits import *  # noqa: F403
from forge.torchlang.linalg import *  # noqa: F403
from forge.torchlang.lowrank import *  # noqa: F403
from forge.torchlang.nn import *  # noqa: F403
from forge.torchlang.operators import *  # noqa: F403
from forge.torchlang.parameter_shards import unsharded
from forge.torchlang.places import *  # noqa: F403
from forge.torchlang.random import *  # noqa: F403
from forge.torchlang.randomized import *  # noqa: F403
from forge.torchlang.reduction import *  # noqa: F403
from forge.torchlang.shape import *  # noqa: F403
from forge.torchlang.sharding import redistributed, spreading
from forge.torchlang.solvers import *  # noqa: F403
from forge.torchlang.special import *  # noqa: F403
from forge.torchlang.spectral import *  # noqa: F403
from forge.torchlang.spectrograms import *  # noqa: F403
from forge.torchlang.statistics import *  # noqa: F403
from forge.torchlang.strided import *  # noqa: F403
from forge.torchlang.vector_norms import *  # noqa: F403
from forge.torchlang.windows import *  # noqa: F403
