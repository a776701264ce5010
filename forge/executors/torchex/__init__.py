"""The torch executor: eager's kernels, one module per family as in forge/prims."""

from forge import torchlang
from forge.executors.torchex import (
    activation,
    attention,
    checks,
    conv,
    creation,
    ctc,
    distances,
    distributed,
    elementwise,
    embedding,
    embedding_bag,
    factorizations,
    fourier,
    indexing,
    library,
    linalg,
    linear_cross_entropy,
    loss,
    margins,
    memory,
    modes,
    native_norms,
    norm,
    pooling,
    quantized,
    random,
    randomized,
    recurrent,
    reduction,
    row_product,
    shape,
    solvers,
    spectral,
    strided,
    windows,
)
from forge.executors.torchex.core import composites, torch_prims, torchex

for _id, _symbol in torchlang.all_symbols().items():
    if _id not in torchex.implementations and _symbol not in composites:
        torchex.register_implementation(_symbol, torchlang.torch_function_of(_symbol))

__all__ = ["torch_prims", "torchex"]
