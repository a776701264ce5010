"""The torch executor's implementations of random functions that one aten operator draws as a whole."""

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
    """Keep the graph of a function of which torch has no derivative: torch's error is raised where a gradient is asked
    for."""
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
