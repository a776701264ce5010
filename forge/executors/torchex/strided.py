"""The torch executor's as_strided, which runs the prims because a value's strides may differ from eager's."""

from forge import torchlang
from forge.executors.torchex.core import as_what_it_calls, run_torchlang

for _symbol in (torchlang.as_strided, torchlang.as_strided_copy):
    run_torchlang(_symbol, checker=as_what_it_calls)
