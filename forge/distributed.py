"""forge.distributed: parameters sharded over processes, gathered and freed by the program that reads them."""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import nn
from torch.nn.parameter import is_lazy

from forge.debug.simulation import Hardware, Simulation, simulate
from forge.ir import check
from forge.ir.checks import check_integer, check_number
from forge.prims.distributed import ShardGroup, chunk_rows
from forge.torch_internals.autograd import in_backward
from forge.torch_internals.distributed import (
    init_fake_processes,
    is_dtensor,
    join_meshes,
    local_tensor,
    make_dtensor,
    outer_placements,
)
from forge.torch_internals.functorch import maybe_current_level, outside_of_transforms
from forge.torch_internals.modules import parameters_of
from forge.torch_internals.pytree import torch_pytree
from forge.torchlang.collective_watch import CollectiveError, last_collectives
from forge.torchlang.parameter_shards import unshard

if torch.distributed.is_available():
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

__all__ = [
    "CollectiveError",
    "Hardware",
    "ShardPolicy",
    "Simulation",
    "fake_processes",
    "last_collectives",
    "register_forward_method",
    "shard",
    "simulate",
]

MEBIBYTE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ShardPolicy:
    """How the parameters of a model are gathered, and their gradients reduced.

    Attributes:
        param_dtype: The dtype in which parameters are gathered and read; inputs of the model are converted to it. None:
            that of each parameter.
        reduce_dtype: The dtype in which gradients are reduced. None: that of the gradients.
        reshard_after_forward: Whether the backward gathers parameters again, rather than keep them since the forward.
            None: as `memory` of forge.jit says; "speed" keeps them.
        bucket_mb: The mebibytes that are gathered, or reduced, by one message. A larger parameter has one of its own.
            None: 8 for each process, since a message to more of them takes longer, but at least 64, and at most 1024 or
            a sixteenth of all parameters.
        prefetch_mb: The mebibytes that are gathered ahead of their use, at most; one message is in any case. None:
            twice those of a bucket.
        cpu_offload: Whether parameters, gradients and so the optimizer's states are in host memory, pinned for a GPU.
            They are copied to the mesh's device to be gathered, and back once reduced, beside the computation.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reshard_after_forward: bool | None = None
    bucket_mb: float | None = None
    prefetch_mb: float | None = None
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            check(
                dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point),
                lambda name=name, dtype=dtype: f"ShardPolicy: {name} is {dtype!r}, but must be a floating point dtype",
                TypeError,
            )
        check(
            isinstance(self.reshard_after_forward, (bool, NoneType)),
            lambda: f"ShardPolicy: reshard_after_forward is {self.reshard_after_forward!r}, but must be a bool or None",
            TypeError,
        )
        check(
            isinstance(self.cpu_offload, bool),
            lambda: f"ShardPolicy: cpu_offload is {self.cpu_offload!r}, but must be a bool",
            TypeError,
        )
        for name in ("bucket_mb", "prefetch_mb"):
            if getattr(self, name) is not None:
                check_number(getattr(self, name), f"ShardPolicy: {name}", "a positive number or None")

    def limits(self, gathered: int, processes: int) -> tuple[int, int]:
        """Return the bytes of a bucket, and those that are gathered ahead, for parameters of so many bytes.

        Source: the least time of Llama 70B, simulated on 64 and 512 processes (docs/how-to/distributed.md).
        """
        size = self.bucket_mb
        if size is None:
            size = max(64.0, min(8.0 * processes, 1024.0, gathered / 16 / MEBIBYTE))
        ahead = 2 * size if self.prefetch_mb is None else self.prefetch_mb
        return int(size * MEBIBYTE), int(ahead * MEBIBYTE)


class _Sharding:
    """The mesh and policy that the parameters of a sharded model share. runs: whether the model's forward runs."""

    def __init__(self, mesh: "DeviceMesh", policy: ShardPolicy, model: nn.Module) -> None:
        *replicates, cuts = range(mesh.ndim)
        self.mesh = mesh
        self.rank = mesh.get_local_rank(cuts)
        self.size = mesh.size(cuts)
        replicas = [mesh.get_group(dim).group_name for dim in replicates if mesh.size(dim) > 1]
        self.group: ShardGroup = self.size, mesh.get_group(cuts).group_name, replicas[0] if replicas else None
        self.param_dtype = policy.param_dtype
        self.reduce_dtype = policy.reduce_dtype
        self.reshard = policy.reshard_after_forward
        self.is_offloaded = policy.cpu_offload
        gathered = sum(each.numel() * (policy.param_dtype or each.dtype).itemsize for each in model.parameters())
        self.bucket, self.prefetch = policy.limits(gathered, self.size)
        self.runs = False

    @functools.cached_property
    def device(self) -> torch.device:
        """The device of this process on the mesh, on which parameters are gathered."""
        if self.mesh.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.mesh.device_type, torch.accelerator.current_device_index())

    def call(self, function: Callable, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Call a function of a module of the model. It reads whole parameters, and so does what it calls; inputs of
        the outermost call are converted."""
        if self.runs:
            return function(module, *args, **kwargs)
        args, kwargs = torch_pytree.tree_map(self.convert, (args, kwargs))
        self.runs = True
        try:
            return function(module, *args, **kwargs)
        finally:
            self.runs = False

    def read(self, parameter: Any, inner: "_InnerPart | None") -> Any:
        """Return the whole of a parameter in a forward, the parameter elsewhere. inner: that whole as a part of a
        tensor that other processes have parts of, too."""
        if not (torch.compiler.is_compiling() or self.runs or in_backward()):
            return parameter
        if torch.compiler.is_compiling() or maybe_current_level() is None:
            return self.gather(parameter, inner)
        with outside_of_transforms():  # which take no DTensor: to them, the whole is a constant
            return self.gather(parameter, inner)

    def gather(self, parameter: Any, inner: "_InnerPart | None") -> Any:
        """Return the whole of a parameter."""
        length = parameter.shape[0] if parameter.ndim else None
        length = length if inner is None else inner.length
        dtype = self.param_dtype if self.param_dtype and parameter.is_floating_point() else parameter.dtype
        part = parameter.to_local()
        device = self.device if self.is_offloaded else part.device
        how = length, dtype, device, self.reduce_dtype, self.group, self.reshard
        whole = unshard(part, *how, self.bucket, self.prefetch)
        if inner is None:
            return whole
        shape, stride = parameter.shape, parameter.stride()
        return DTensor.from_local(whole, inner.mesh, inner.placements, run_check=False, shape=shape, stride=stride)

    def convert(self, value: Any) -> Any:
        if self.param_dtype is None or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        return value.to(self.param_dtype)

    def shard(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter as a DTensor, of which this process has its part alone."""
        whole = (local_tensor(parameter) if isinstance(parameter, DTensor) else parameter).detach()
        rows = chunk_rows(whole.shape[0], self.size) if whole.ndim else 0
        part = self.copy_to_storage(whole[rows * self.rank :][:rows] if whole.ndim else whole)
        mesh = self.mesh
        placements: tuple[Any, ...] = (Shard(0) if whole.ndim else Replicate(),)
        shape, stride = whole.shape, whole.stride()
        if isinstance(parameter, DTensor):
            mesh = join_meshes(self.mesh, parameter.device_mesh)
            placements = outer_placements(parameter)
            shape, stride = parameter.shape, parameter.stride()
        placements = (*[Replicate()] * (self.mesh.ndim - 1), *placements)
        tensor = make_dtensor(part, mesh, placements, shape, stride)
        return nn.Parameter(tensor, requires_grad=parameter.requires_grad)

    def copy_to_storage(self, part: torch.Tensor) -> torch.Tensor:
        """Return a copy of a part where it stays: in host memory, or on the mesh's device."""
        device = part.device if part.is_meta else torch.device("cpu") if self.is_offloaded else self.device
        pinned = self.is_offloaded and self.device.type == "cuda" and not part.is_meta
        return torch.empty(part.shape, dtype=part.dtype, device=device, pin_memory=pinned).copy_(part)


class _InnerPart(NamedTuple):
    """The part of a DTensor that this process has, which `shard` cuts again along dim 0. length: its rows, None of a
    number."""

    mesh: "DeviceMesh"
    placements: tuple[Any, ...]
    length: int | None

    @classmethod
    def of(cls, parameter: nn.Parameter) -> "_InnerPart | None":
        """Return the part of a DTensor, None for another tensor."""
        if not isinstance(parameter, DTensor):
            return None
        local = local_tensor(parameter)
        return cls(parameter.device_mesh, tuple(parameter.placements), local.shape[0] if local.ndim else None)


def shard(model: nn.Module, mesh: "DeviceMesh | None" = None, policy: ShardPolicy | None = None) -> nn.Module:
    """Shard the parameters of a model over the processes of a mesh, in place, and return it.

    Each parameter becomes a DTensor cut along dim 0. Where the model's forward reads one, the whole is gathered, and
    its gradient is averaged over the processes and scattered. `forge.jit(forge.distributed.shard(model))` compiles all
    of that into one program: parameters are gathered in buckets, ahead of their use, freed, and gathered again in the
    backward. Elsewhere, as in an optimizer or a checkpoint, parameters are the DTensors. Buffers move to the mesh's
    device.

    Parameters may be DTensors of another dim of the same mesh (`parallelize_module`): they are cut along dim 0 once
    more, and the forward reads them as it did.

    Args:
        model: The model; each process has the same weights.
        mesh: A mesh of one dim, or of two: the processes of the first one have the same parts (HSDP). By default, of
            all processes, on the device of the parameters.
        policy: How parameters are gathered.

    Returns:
        The model. The classes of its modules with parameters are subclasses of the former ones.

    Raises:
        TypeError: If the model is no module, or its parameters are no plain tensors.
        ValueError: If the mesh has more dims or lacks this process, the model is sharded or jitted, or a parameter
            is a DTensor that is not of another dim of the same mesh.
        RuntimeError: If there is no process group.
    """
    policy = ShardPolicy() if policy is None else policy
    _check_model(model)
    check(
        isinstance(policy, ShardPolicy),
        lambda: f"shard: policy is {policy!r}, but must be a forge.distributed.ShardPolicy",
        TypeError,
    )
    check(
        torch.distributed.is_available() and torch.distributed.is_initialized(),
        lambda: "shard: there is no process group; call torch.distributed.init_process_group first",
        RuntimeError,
    )
    torch.compiler.allow_in_graph(unshard)  # here, because it imports Dynamo
    mesh = _check_mesh(mesh, model)
    _check_inner_meshes(mesh, model)
    sharding = _Sharding(mesh, policy, model)
    shards: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # a tied parameter stays one
    classes: dict[tuple, type] = {}
    for module, parameters in _holders(model):
        parts = {name: _InnerPart.of(parameter) for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            if id(parameter) not in shards:
                shards[id(parameter)] = parameter, sharding.shard(parameter)  # the former one stays, as does its id
            parameters_of(module)[name] = shards[id(parameter)][1]
        key = type(module), *parts.items()
        if key not in classes:
            classes[key] = _reading_class(type(module), parts)
        module.__class__ = classes[key]
        vars(module)["_forge_sharding"] = sharding  # of the instance, so that a copy of the model has its own
    for module, name, buffer in _buffers(model):
        if buffer.device.type not in ("meta", mesh.device_type):
            setattr(module, name, buffer.to(sharding.device))
    return model


def register_forward_method(module: nn.Module, name: str) -> None:
    """Have a method of a sharded model read whole parameters, as its forward does.

    Without it, the forwards that a method calls read whole parameters, the method itself DTensors.

    Args:
        module: The sharded model, jitted or not, or a module of it. Others of its class in the model have the method,
            too, and so do copies.
        name: The name of a method.

    Raises:
        TypeError: If `module` is no part of a sharded model.
        ValueError: If its class has no such method.
    """
    check(
        hasattr(module, "_forge_sharding"),
        lambda: f"register_forward_method: module is a {type(module).__name__}, but must be a sharded torch.nn.Module",
        TypeError,
    )
    kind = type(getattr(module, "_forge_module", module))  # of a jitted one, what it was made of
    function: Any = getattr(kind, name, None) if isinstance(name, str) else None
    check(
        inspect.isfunction(function),
        lambda: f"register_forward_method: name is {name!r}, but must be a method of {kind.__name__}",
    )
    setattr(kind, name, _reading(function))


@contextmanager
def fake_processes(size: int, rank: int = 0) -> Iterator[None]:
    """Be one process of many, none of which is there, inside: what `simulate` needs is sharded, and nothing is sent.

    Args:
        size: The number of processes.
        rank: The rank of this one.

    Raises:
        TypeError: If a number is no integer.
        ValueError: If `size` is not positive, or `rank` is none of the processes.
        RuntimeError: If there is a process group.
    """
    check_integer(size, "fake_processes: size", 1)
    check_integer(rank, "fake_processes: rank", 0, size - 1)
    check(
        not torch.distributed.is_initialized(),
        lambda: "fake_processes: there is a process group; call torch.distributed.destroy_process_group first",
        RuntimeError,
    )
    init_fake_processes(size, rank)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def _holders(model: nn.Module) -> Iterator[tuple[nn.Module, dict[str, nn.Parameter]]]:
    """Yield the modules that have parameters, or whose modules do, and their own parameters by name."""
    for module in model.modules():
        parameters = {name: parameter for name, parameter in parameters_of(module).items() if parameter is not None}
        if parameters or any(True for _ in module.parameters()):
            yield module, parameters


def _buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Yield the buffers of the model's modules, with these and their names there."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            yield module, name, buffer


def _reading_class(original: Any, parts: Mapping[str, _InnerPart | None]) -> type:
    """Return a subclass whose instances read parameters of these names through their sharding."""

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        """Return a module of the original class: a module constructs its own class for a slice, say."""
        return original(*args, **kwargs)

    def register_parameter(self: Any, name: str, param: Any) -> None:
        if name in parts:
            _check_assigned(self, name, param)
        original.register_parameter(self, name, param)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        raise TypeError(
            f"{original.__name__}: a sharded model cannot be pickled, since this process has a part of it alone; save "
            "its state, by torch.distributed.checkpoint.state_dict.get_model_state_dict"
        )

    members: dict[str, Any] = {name: property(_reader(name, part)) for name, part in parts.items()}
    members |= {
        "__new__": __new__,
        "__copy__": _copier(original, copy.copy),
        "__deepcopy__": _copier(original, copy.deepcopy),
        "__reduce_ex__": __reduce_ex__,
        "register_parameter": register_parameter,
        "__module__": original.__module__,
        "__doc__": original.__doc__,
    }
    if original.forward is not nn.Module.forward:
        members["forward"] = _reading(original.forward)
    return type(original.__name__, (original,), members)


def _reader(name: str, part: _InnerPart | None) -> Callable[[Any], Any]:
    def read(module: Any) -> Any:
        parameters = parameters_of(module)
        if name not in parameters:  # deleted: a module may have something else of this name, which it finds itself
            raise AttributeError(name)
        parameter = parameters[name]
        return None if parameter is None else module._forge_sharding.read(parameter, part)

    return read


def _reading(function: Callable) -> Callable:
    """Return a method that reads whole parameters of its sharded module, and has what it calls read them."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._forge_sharding.call(function, self, args, kwargs)

    return call


def _copier(original: type, copy: Callable) -> Callable:
    """Return a method that copies a sharded module as one of its original class."""

    def copied(self: Any, *memo: dict) -> Any:
        sharded, self.__class__ = type(self), original
        try:
            twin = copy(self, *memo)
        finally:
            self.__class__ = sharded
        twin.__class__ = sharded
        return twin

    return copied


def _check_assigned(module: nn.Module, name: str, parameter: Any) -> None:
    """Check that what a sharded parameter is replaced by is sharded as it is."""
    former: Any = parameters_of(module).get(name)
    if former is None or parameter is None:
        return
    check(
        isinstance(parameter, DTensor)
        and (parameter.device_mesh, parameter.placements) == (former.device_mesh, former.placements),
        lambda: (
            f"{type(module).__name__}: {name} is sharded, but was assigned a {type(parameter).__name__} that is not; "
            "write to it in place, or load whole tensors by "
            "torch.distributed.checkpoint.state_dict.set_model_state_dict"
        ),
        TypeError,
    )


def _check_model(model: Any) -> None:
    check(isinstance(model, nn.Module), lambda: f"shard: model is {model!r}, but must be a torch.nn.Module", TypeError)
    check(
        not any(hasattr(module, "_forge_compiled") for module in model.modules()),
        lambda: "shard: the model is jitted; shard it first: forge.jit(forge.distributed.shard(model))",
    )
    check(
        not any(hasattr(module, "_forge_sharding") for module in model.modules()),
        lambda: "shard: the model is sharded already",
    )
    for name, parameter in model.named_parameters():
        plain = type(parameter) is nn.Parameter and type(parameter.data) is torch.Tensor
        check(
            not is_lazy(parameter) and (plain or is_dtensor(parameter)),
            lambda name=name, parameter=parameter: (
                f"shard: the parameter {name} is a {type(parameter).__name__}, but must be a plain tensor whose "
                "shape is known"
            ),
            TypeError,
        )


def _check_mesh(mesh: Any, model: nn.Module) -> "DeviceMesh":
    if mesh is None:
        device = next((each.device.type for each in model.parameters() if each.device.type != "meta"), None)
        return init_device_mesh(device or _device_of_group(), (torch.distributed.get_world_size(),))
    check(isinstance(mesh, DeviceMesh), lambda: f"shard: mesh is {mesh!r}, but must be a DeviceMesh or None", TypeError)
    check(
        mesh.ndim <= 2,
        lambda: f"shard: mesh has {mesh.ndim} dims, but must have one or two; give a submesh, such as mesh['shard']",
    )
    check(mesh.get_coordinate() is not None, lambda: "shard: this process is no part of the mesh")
    return mesh


def _check_inner_meshes(mesh: "DeviceMesh", model: nn.Module) -> None:
    """Check that parameters that are DTensors are not of the processes over which they are cut."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            inner = parameter.device_mesh
            try:
                join_meshes(mesh, inner)
            except (RuntimeError, TypeError) as error:  # no mesh has both dims, or a mesh's dims have no names
                raise ValueError(
                    f"shard: the parameter {name} is a DTensor of {inner}, but must be one of another dim of the mesh "
                    f"that {mesh} is a dim of, or a plain tensor"
                ) from error


def _device_of_group() -> str:
    """Return the device of parameters that are on none yet; that of processes that are fake is a CPU."""
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None or torch.distributed.get_backend() == "fake" else accelerator.type
