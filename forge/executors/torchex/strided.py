"""How torch runs what reads memory as it lies: by the prims, for a value may lie otherwise than in eager."""

from forge import torchlang
from forge.executors.torchex.core import as_what_it_calls, run_torchlang

for _symbol in (torchlang.as_strided, torchlang.as_strided_copy):
    run_torchlang(_symbol, checker=as_what_it_calls)
