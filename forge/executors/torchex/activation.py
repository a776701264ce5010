"""The torch executor's activation family: the built-in functions that torch.nn.functional wraps in Python."""

from forge import torchlang
from forge.executors.torchex.core import composites, run_torchlang
from forge.torch_internals.functions import torch_nn_module

for _name in "silu mish hardswish hardsigmoid hardtanh leaky_relu relu6 elu".split():
    run_torchlang(getattr(torchlang, _name), getattr(torch_nn_module, _name))


composites.update(
    (
        torchlang.functional_softmax,
        torchlang.functional_log_softmax,
        torchlang.softmin,
        torchlang.softsign,
        torchlang.tanhshrink,
    )
)
