"""Tensors, their storages and memory formats."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch._decomp import core_aten_decompositions as core_aten_decompositions
from torch._decomp import get_decompositions as get_decompositions
from torch._prims_common import suggest_memory_format as suggest_memory_format
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
from torch.nn.modules.module import _has_any_global_hook as has_any_global_hook
from torch.testing._comparison import get_tolerances as get_tolerances
from torch.utils._device import DeviceContext as DeviceContext
from torch.utils._triton import has_triton as has_triton

base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")
is_view = torch.Tensor._is_view
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
distributed_c10d = torch._C._distributed_c10d
data_descriptor: Any = torch.Tensor.data  # a getset of torch._C.TensorBase
reinterpret_tensor: Callable = vars(torch._C._dynamo.guards)["_reinterpret_tensor"]  # its stub lacks it
log_api_usage_once = torch._C._log_api_usage_once
storage_use_count = torch._C._storage_Use_Count


def storage_address(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage in C++, which tells it from every other one that is alive."""
    return storage._cdata


def storage_at(address: int, device: torch.device, size: int) -> torch.UntypedStorage:
    """Return a storage of memory that it does not own. torch.as_tensor of __cuda_array_interface__ would need NumPy."""
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, size)  # the stub's class is another
    return storage


def storage_ids(tensors: list[torch.Tensor]) -> list[int]:
    """Return `storage_id` of each."""
    return [storage._cdata for storage in map(torch.Tensor.untyped_storage, tensors)]


def storage_id(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage: equal for tensors that share it."""
    return tensor.untyped_storage()._cdata
