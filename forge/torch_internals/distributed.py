"""DistributedDataParallel, DTensors and process groups."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


def active_ddp_module() -> DistributedDataParallel | None:
    """Return the DistributedDataParallel whose forward runs now."""
    return DistributedDataParallel._get_active_ddp_module()


def local_tensor(tensor: Any) -> torch.Tensor:
    """Return this process's part of a DTensor, without `to_local`, which autograd and Dynamo see. A result of a
    collective is not waited for."""
    part: Any = tensor._local_tensor
    return part.elem if is_async(part) else part


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


def is_async(value: Any) -> bool:
    """Return whether a tensor is a collective's result, which waits for it at its first use, or a DTensor of one."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return isinstance(getattr(value, "_local_tensor", value), AsyncCollectiveTensor)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Any) -> torch.Tensor:
        tensor: torch.Tensor = result.trigger_wait()
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


def waited(value: Any) -> Any:
    """Return a collective's result as a plain tensor, which is there and has the history of the result; another value
    as it is."""
    return _Wait.apply(value) if is_async(value) else value


def without_wait(fake: Any) -> Any:
    """Return the fake tensor, or DTensor of one, inside of that of a collective's result, without a history; another
    value as it is."""
    if not is_async(fake):
        return fake
    if hasattr(fake, "_local_tensor"):
        names, context = fake.__tensor_flatten__()
        inside = {name: getattr(fake, name) for name in names}
        inside["_local_tensor"] = fake._local_tensor.elem
        return type(fake).__tensor_unflatten__(inside, context, fake.shape, fake.stride())
    tensor: torch.Tensor = fake.elem.detach()
    return tensor.requires_grad_() if fake.requires_grad else tensor


def make_fake_group(name: Any) -> "torch.distributed.ProcessGroup":
    """Return a process group of one process, whose collectives leave their tensors as they are."""
    from torch._C import _distributed_c10d as c10d  # torch may have been built without

    group = torch.distributed.ProcessGroup(torch.distributed.HashStore(), 0, 1)
    kind = torch.distributed.ProcessGroup.BackendType.CUSTOM
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), kind, c10d.FakeProcessGroup._create_internal(0, 1))
    group._set_group_name(name)
    return group


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


def is_registered_group(name: Any) -> bool:
    """Return whether torch knows a process group of this name."""
    from torch._C import _distributed_c10d as c10d

    try:
        c10d._resolve_process_group(name)
    except RuntimeError:  # torch has no other way to ask
        return False
    return True


def register_group(name: Any, group: "torch.distributed.ProcessGroup") -> None:
    """Have operators find a process group by its name."""
    from torch._C import _distributed_c10d as c10d

    c10d._register_process_group(name, group)
