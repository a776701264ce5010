"""The torch executor's implementations of random functions that one aten operator draws as a whole."""

from forge import torchlang
from forge.executors.torchex.core import run_torchlang
from forge.prims.randomized import cauchy_like, geometric_like, log_normal_like

run_torchlang(torchlang.fill_cauchy, cauchy_like)
run_torchlang(torchlang.fill_geometric, geometric_like)
run_torchlang(torchlang.fill_log_normal, log_normal_like)
