"""A process group of one process: what collectives return in it needs no other process, no thread and no network."""

from functools import cache

import torch

_NAME = "forge_group_of_one"


@cache
def _made() -> "torch.distributed.ProcessGroup":
    """The group, which torch refers to weakly."""
    from torch._C import _distributed_c10d as c10d  # torch may have been built without

    group = torch.distributed.ProcessGroup(torch.distributed.HashStore(), 0, 1)
    kind = torch.distributed.ProcessGroup.BackendType.CUSTOM
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), kind, c10d.FakeProcessGroup._create_internal(0, 1))
    group._set_group_name(_NAME)
    c10d._register_process_group(_NAME, group)
    return group


def group_of_one() -> str:
    """The name under which torch knows the group; made on first use, beside any that the program has."""
    _made()
    return _NAME
