"""How torch runs the activation family: by its built-in functions, where torch.nn.functional wraps them in Python."""

from typing import Any

import torch

from forge import torchlang
from forge.executors.executor import Decision, decline
from forge.executors.torchex.core import run_torchlang

for _name in "silu mish hardswish hardsigmoid hardtanh leaky_relu relu6 elu".split():
    run_torchlang(getattr(torchlang, _name), getattr(torch._C._nn, _name))


def _runs_as_what_it_calls(*args: Any, **kwargs: Any) -> Decision:
    return decline("torch runs the functions that this one calls")


for _symbol in (
    torchlang.functional_softmax,
    torchlang.functional_log_softmax,
    torchlang.softmin,
    torchlang.softsign,
    torchlang.tanhshrink,
):
    run_torchlang(_symbol, checker=_runs_as_what_it_calls)
