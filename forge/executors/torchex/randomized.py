"""The torch executor's implementations of random functions that are a single aten operator."""

from functools import partial
from typing import Any

from forge import prims, torchlang
from forge.executors.torchex.core import run_prims, run_torchlang
from forge.ir import Symbol, TensorProxy, current_trace
from forge.prims.randomized import cauchy_like, geometric_like, log_normal_like
from forge.torch_internals.functions import torch_standard_gamma_grad
from forge.torchlang import torch_function_of
from forge.torchlang.opaque import keep_graph


def _without_derivative(symbol: Symbol, *args: Any, **kwargs: Any) -> TensorProxy:
    """Keep the autograd graph of a function without a derivative, so that torch raises its error if a gradient is
    computed."""
    with current_trace().collecting():
        output = symbol(*args, **kwargs)
    keep_graph(torch_function_of(symbol), args, kwargs, output)
    return output


run_torchlang(torchlang.fill_cauchy, cauchy_like)
run_torchlang(torchlang.fill_geometric, geometric_like)
run_torchlang(torchlang.fill_log_normal, log_normal_like)
for _symbol in (torchlang.binomial, torchlang.dirichlet_grad, torchlang.sample_dirichlet):
    run_torchlang(_symbol, grad_transform=partial(_without_derivative, _symbol))
run_prims({prims.standard_gamma_grad: torch_standard_gamma_grad})
