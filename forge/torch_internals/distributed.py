"""DistributedDataParallel, DTensors and process groups."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


def active_ddp_module() -> DistributedDataParallel | None:
    """Return the DistributedDataParallel whose forward runs now."""
    return DistributedDataParallel._get_active_ddp_module()


def local_tensor(tensor: Any) -> torch.Tensor:
    """Return this process's part of a DTensor, without `to_local`, which autograd and Dynamo see."""
    return tensor._local_tensor


def placement_spec(tensor: Any) -> Any:
    """Return the DTensorSpec of a DTensor: its mesh and placements."""
    return tensor._spec


def is_masked(placement: Any) -> bool:
    """Return whether a placement is a sum of which each process masks its part first: that of cut rows."""
    return hasattr(placement, "mask_buffer")


def draws_by_part(device: str) -> bool:
    """Return whether DTensors on this kind of device draw random numbers from where a process's part is in the whole:
    the generators of CPUs have no such place."""
    from torch.distributed.tensor import _random as random  # torch may have been built without

    tracker = random._rng_tracker
    return device != "cpu" and (tracker is None or tracker.distribute_region_enabled)


def make_fake_group(name: Any) -> "torch.distributed.ProcessGroup":
    """Return a process group of one process, whose collectives leave their tensors as they are."""
    from torch._C import _distributed_c10d as c10d  # torch may have been built without

    group = torch.distributed.ProcessGroup(torch.distributed.HashStore(), 0, 1)
    kind = torch.distributed.ProcessGroup.BackendType.CUSTOM
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), kind, c10d.FakeProcessGroup._create_internal(0, 1))
    group._set_group_name(name)
    return group


def init_fake_processes(size: int, rank: int) -> None:
    """Initialize a process group of `size` processes of which this one alone is there: nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # its module registers the backend

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


def start_all_gather(parts: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor], group: Any) -> Any:
    """Start to gather each part from all processes into its whole, by one message. group: its name. Return torch's
    Work, whose `wait` has the current stream, or the process, wait once; functional collectives wait for each part."""
    from torch._C import _distributed_c10d as c10d

    options = c10d.AllgatherOptions()
    options.asyncOp = True
    return c10d._resolve_process_group(group).allgather_into_tensor_coalesced([*wholes], [*parts], options)


def start_reduce_scatter(wholes: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], group: Any) -> Any:
    """Start to average each whole over all processes, of which each gets its part, by one message. Return torch's
    Work."""
    from torch._C import _distributed_c10d as c10d

    options: Any = c10d.ReduceScatterOptions()
    options.reduceOp, options.asyncOp = torch.distributed.ReduceOp.AVG, True
    return c10d._resolve_process_group(group).reduce_scatter_tensor_coalesced([*parts], [*wholes], options)


def process_group(name: Any) -> "torch.distributed.ProcessGroup | None":
    """Return the process group that torch knows by this name, None if there is none."""
    if not torch.distributed.is_available():
        return None
    from torch._C import _distributed_c10d as c10d

    try:
        return c10d._resolve_process_group(name)
    except RuntimeError:  # torch has no other way to ask
        return None


def register_group(name: Any, group: "torch.distributed.ProcessGroup") -> None:
    """Have operators find a process group by its name."""
    from torch._C import _distributed_c10d as c10d

    c10d._register_process_group(name, group)
