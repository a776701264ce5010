"""The torch executor's embedding_bag; its autograd graph is kept for the backward."""

from typing import Any

import torch.nn.functional as F

from forge import torchlang
from forge.executors.torchex.core import run_torchlang
from forge.ir import TensorProxy, current_trace
from forge.torchlang.opaque import keep_graph


def _embedding_bag_grad(*args: Any, **kwargs: Any) -> TensorProxy:
    with current_trace().collecting():
        output = torchlang.embedding_bag(*args, **kwargs)
    keep_graph(F.embedding_bag, args, kwargs, output)
    return output


run_torchlang(torchlang.embedding_bag, grad_transform=_embedding_bag_grad)
