"""The torch executor's as_strided, which runs the prims because a value's strides may differ from eager's."""

from forge import torchlang
from forge.executors.torchex.core import composites

composites.update((torchlang.as_strided, torchlang.as_strided_copy))
