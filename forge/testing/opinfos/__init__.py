"""Every OpInfo, by family. Importing this registers them."""

import torch

from forge.testing.opinfo import add_dtype
from forge.testing.opinfos import (
    activation,
    attention,
    conv,
    conversion,
    creation,
    distributed,
    elementwise,
    embedding,
    indexing,
    joining,
    limits,
    linalg,
    loss,
    norm,
    pooling,
    random,
    reduction,
    resample,
    shape,
    softmax,
    special,
)
from forge.testing.opinfos.complex import DIFFERENTIATED

add_dtype(DIFFERENTIATED, torch.complex64)
