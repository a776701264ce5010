"""Patches of Dynamo: random functions of DTensors. Its import imports DTensors."""

from typing import Any

from torch._guards import detect_fake_mode
from torch.distributed.tensor import DTensor

from forge.torch_internals.patch import Patch

RANDOM_OPERATORS: frozenset[Any] = frozenset(DTensor._op_dispatcher._random_ops)


class _OfRealTensors(frozenset[Any]):
    """The operators for which DTensors draw by part, where tensors have values."""

    def __contains__(self, operator: object) -> bool:
        return super().__contains__(operator) and detect_fake_mode() is None


Patch(
    DTensor._op_dispatcher,
    "_random_ops",
    _OfRealTensors(RANDOM_OPERATORS),
    why="a random function of a DTensor on a GPU breaks the graph: the state of the generator is no fake tensor",
    issue="not reported: torch.compile has the graph break, too",
    upstream="torch/distributed/tensor/_dispatch.py:175@2.13.0, OpDispatcher.__init__",
    not_probed="it needs a process group: tests/distributed/test_dtensors.py",
)
