"""DistributedDataParallel, DTensors and process groups."""

import functools
import math
import pickle
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


def active_ddp_module() -> DistributedDataParallel | None:
    """Return the DistributedDataParallel whose forward runs now."""
    return DistributedDataParallel._get_active_ddp_module()


def is_dtensor(value: Any) -> bool:
    """Return whether a value is a DTensor, without importing them: the import takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_tensor(tensor: Any) -> torch.Tensor:
    """Return this process's part of a DTensor, without `to_local`, which autograd and Dynamo see. A result of a
    collective is not waited for."""
    part: Any = tensor._local_tensor
    return part if type(part) is torch.Tensor or not is_async(part) else part.elem


def placement_spec(tensor: Any) -> Any:
    """Return the DTensorSpec of a DTensor: its mesh and placements."""
    return tensor._spec


def make_dtensor(
    part: torch.Tensor, mesh: Any, placements: Sequence[Any], shape: Sequence[int], stride: Sequence[int]
) -> Any:
    """Return the DTensor of which this process has a part, on whatever device: `from_local` moves it to the mesh's."""
    from torch.distributed.tensor import DTensor  # torch may have been built without
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(torch.Size(shape), tuple(stride), part.dtype)
    return DTensor(part, DTensorSpec(mesh, tuple(placements), meta), requires_grad=False)


def join_meshes(outer: Any, inner: Any) -> Any:
    """Return the mesh of the dims of two that are parts of one, the outer one's first."""
    from torch.distributed.device_mesh import DeviceMesh  # torch may have been built without

    return DeviceMesh._concatenate([outer, inner])


def outer_placements(tensor: Any) -> tuple[Any, ...]:
    """Return the placements of a DTensor whose parts are cut along dim 0 once more, by the processes of a dim that goes
    before those of its mesh.

    If its own parts are of dim 0, too, rows that follow each other are of several processes (`_StridedShard`).
    """
    from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

    if tensor.ndim == 0:
        return (Replicate(), *tensor.placements)
    cuts = math.prod(tensor.device_mesh.size(i) for i, each in enumerate(tensor.placements) if each.is_shard(0))
    return (_StridedShard(0, split_factor=cuts) if cuts > 1 else Shard(0), *tensor.placements)


def is_masked(placement: Any) -> bool:
    """Return whether a placement is a sum of which each process masks its part first: that of cut rows."""
    return hasattr(placement, "mask_buffer")


def draws_by_part(device: str) -> bool:
    """Return whether DTensors on this kind of device draw random numbers from where a process's part is in the whole:
    the generators of CPUs have no such place."""
    from torch.distributed.tensor import _random as random  # torch may have been built without

    tracker = random._rng_tracker
    return device != "cpu" and (tracker is None or tracker.distribute_region_enabled)


def random_operators() -> frozenset[Any]:
    """Return the operators for which DTensors draw by part."""
    from forge.torch_internals.dynamo_dtensors import RANDOM_OPERATORS  # torch may have been built without

    return RANDOM_OPERATORS


def load_dtensor_patches() -> None:
    """Have the table of patches contain those for DTensors, where these are imported: the import takes a second."""
    if "torch.distributed.tensor" in sys.modules:
        import forge.torch_internals.dynamo_dtensors


def sync_generators(device_type: str) -> None:
    """Have all processes' generators be as the first one's, once, as DTensors do before they draw."""
    from torch.distributed.tensor import _random as random  # torch may have been built without

    if random._rng_tracker is None:
        mesh: Any = SimpleNamespace(device_type=device_type)  # it reads no more of one
        random._rng_tracker = random.OffsetBasedRNGTracker(mesh)


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


def init_fake_processes(size: int, rank: int) -> None:
    """Initialize a process group of `size` processes of which this one alone is there: nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # its module registers the backend

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


def start_all_gather(parts: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor], group: Any) -> Any:
    """Start to gather each part from all processes into its whole, by one message. group: its name. Return torch's
    Work, whose `wait` has the current stream, or the process, wait once; functional collectives wait for each part."""
    from torch._C import _distributed_c10d as c10d

    pg = c10d._resolve_process_group(group)
    options = c10d.AllgatherOptions()
    options.asyncOp = True
    if _is_gloo(pg, parts):
        return _FlatGather(pg, options, parts, wholes)
    return pg.allgather_into_tensor_coalesced([*wholes], [*parts], options)


def _is_gloo(group: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether gloo sends these tensors: each kind of device has a backend."""
    return bool(group._get_backend(tensors[0].device).name() == "gloo")


def start_reduce_scatter(
    wholes: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], group: Any, replicas: Any = None
) -> Any:
    """Start to average each whole over all processes, of which each gets its part, by one message; and then the parts
    over a group of replicas, where it is given. Return torch's Work, or what has its `wait`."""
    work = _start_reduce_scatter(wholes, parts, group)
    return work if replicas is None else _ReplicaAverage(work, parts, replicas)


def _start_reduce_scatter(wholes: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], group: Any) -> Any:
    from torch._C import _distributed_c10d as c10d

    pg = c10d._resolve_process_group(group)
    options: Any = c10d.ReduceScatterOptions()
    options.reduceOp, options.asyncOp = torch.distributed.ReduceOp.AVG, True
    if len(parts) > 1 and _is_gloo(pg, parts) and len({each.dtype for each in parts}) == 1:
        return _FlatReduction(pg, options, wholes, parts)
    return pg.reduce_scatter_tensor_coalesced([*parts], [*wholes], options)


class _ReplicaAverage:
    """An average over replicas of what a reduction gives. On a GPU it starts when that is there, on a stream of its
    own: neither the host nor the computation waits before `wait`."""

    def __init__(self, reduction: Any, parts: Sequence[torch.Tensor], group: Any) -> None:
        self._reduction, self._parts, self._group = reduction, parts, group
        self._works: list[Any] = []
        if parts[0].is_cuda:
            stream = _average_stream(parts[0].device)
            stream.wait_stream(torch.cuda.current_stream())  # its memory may have been used there
            with torch.cuda.stream(stream):
                self._start()

    def _start(self) -> None:
        from torch._C import _distributed_c10d as c10d

        self._reduction.wait()
        group = c10d._resolve_process_group(self._group)
        options: Any = c10d.AllreduceCoalescedOptions()
        options.reduceOp, options.asyncOp = torch.distributed.ReduceOp.AVG, True
        for dtype in {each.dtype: None for each in self._parts}:
            parts = [each for each in self._parts if each.dtype is dtype]
            if _is_gloo(group, parts):
                self._works += [group.allreduce([each], options.reduceOp) for each in parts]
            else:
                self._works.append(group.allreduce_coalesced(parts, options))

    def wait(self) -> None:
        if not self._works:
            self._start()
        for work in self._works:
            work.wait()


@functools.cache
def _average_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


# gloo and several tensors at once (ProcessGroupGloo.cpp): gathered, they are copied to the first one's dtype, and
# reduced, each is a message of its own. Its two threads write the names of what they complete to one string, without a
# lock (`runLoop`): the name of a coalesced collective is longer than what a string holds in place, so that two that
# complete at once may free the same memory.


class _FlatGather:
    """A gather of several tensors as one, of bytes."""

    def __init__(self, group: Any, options: Any, parts: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor]) -> None:
        pieces = [part.view(-1).view(torch.uint8) for part in parts]
        self._wholes, self._sizes = wholes, [piece.numel() for piece in pieces]
        buffer = torch.cat(pieces)
        self._received = buffer.new_empty((group.size(), buffer.numel()))
        self._work = group._allgather_base(self._received.view(-1), buffer, options)

    def wait(self) -> None:
        self._work.wait()
        for whole, piece in zip(self._wholes, self._received.split(self._sizes, 1), strict=True):
            whole.view(-1).view(torch.uint8).view(piece.shape).copy_(piece)


class _FlatReduction:
    """A reduction of several tensors of one dtype as one."""

    def __init__(self, group: Any, options: Any, wholes: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
        buffer = torch.cat([whole.view(group.size(), -1) for whole in wholes], 1).view(-1)
        self._parts, self._received = parts, buffer.new_empty(buffer.numel() // group.size())
        self._work = group.reduce_scatter_tensor_coalesced([self._received], [buffer], options)

    def wait(self) -> None:
        self._work.wait()
        pieces = self._received.split([part.numel() for part in self._parts])
        for part, piece in zip(self._parts, pieces, strict=True):
            part.copy_(piece.view_as(part))


def process_group(name: Any) -> "torch.distributed.ProcessGroup | None":
    """Return the process group that torch knows by this name, None if there is none."""
    if not torch.distributed.is_available():
        return None
    from torch._C import _distributed_c10d as c10d

    try:
        return c10d._resolve_process_group(name)
    except RuntimeError:  # torch has no other way to ask
        return None


def group_size(name: str) -> int:
    """Return the number of processes of the group that torch knows by this name."""
    group = process_group(name)
    assert group is not None
    return group.size()


def clone_store() -> Any:
    """Return a client of its own of the default process group's store: one that a thread waits with is locked."""
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    return store.clone()


def recorded_collectives(*, frames: bool) -> list[dict[str, Any]]:
    """Return the last collectives that torch's flight recorder has of this process, in order, with the frames that
    called them where these are wanted: to name them takes milliseconds."""
    entries = [each for dump in _recorders() for each in pickle.loads(dump(True, frames, False)).get("entries", ())]
    return sorted(entries, key=lambda entry: entry["time_created_ns"])


def _recorders() -> list[Any]:
    """Return the functions that dump torch's flight recorders as pickles: of NCCL, and of other backends.

    They take (with collectives, with frames, without those that are done).
    """
    from torch._C import _distributed_c10d as c10d

    functions = [getattr(c10d, name, None) for name in ("_dump_nccl_trace", "_dump_fr_trace")]
    return [each for each in functions if each is not None]


def register_group(name: Any, group: "torch.distributed.ProcessGroup") -> None:
    """Have operators find a process group by its name."""
    from torch._C import _distributed_c10d as c10d

    c10d._register_process_group(name, group)
