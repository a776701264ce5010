"""A process group of one process: what collectives return in it needs no other process, no thread and no network."""

from functools import cache
from typing import Any

import torch

_NAME: Any = "forge_group_of_one"  # a str, for which newer stubs of torch have a type of their own


@cache
def _group() -> "torch.distributed.ProcessGroup":
    """Return the group, which torch refers to weakly."""
    from forge.torch_internals.tensors import distributed_c10d as c10d  # torch may have been built without

    group = torch.distributed.ProcessGroup(torch.distributed.HashStore(), 0, 1)
    kind = torch.distributed.ProcessGroup.BackendType.CUSTOM
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), kind, c10d.FakeProcessGroup._create_internal(0, 1))
    group._set_group_name(_NAME)
    return group


def group_of_one() -> str:
    """Return the name under which torch knows the group, beside any that the program has.

    It is made on first use, and registered again where it has to be: ``torch.distributed.destroy_process_group``
    forgets every group, also those that it did not make.
    """
    from forge.torch_internals.tensors import distributed_c10d as c10d

    try:
        c10d._resolve_process_group(_NAME)
    except RuntimeError:  # torch has no other way to ask
        c10d._register_process_group(_NAME, _group())
    return _NAME
