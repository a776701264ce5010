"""Every OpInfo, by family. Importing this registers them."""

from forge.testing.opinfos import (
    activation,
    attention,
    conv,
    conversion,
    creation,
    elementwise,
    embedding,
    indexing,
    joining,
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
