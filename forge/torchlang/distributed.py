"""The functional collectives: the functions of torch.distributed._functional_collectives, which Dynamo also makes of
torch.distributed.all_reduce and its like. A reduction without a gradient (max, for example), collectives of several
tensors and broadcasts are opaque calls with an effect (forge/capture/effects.py)."""

from collections.abc import Sequence

import torch

from forge import prims
from forge.ir import Dim, TensorProxy
from forge.torchlang.core import torchsymbol

if torch.distributed.is_available():
    _functional = torch.ops._c10d_functional
    _autograd = torch.ops._c10d_functional_autograd  # their names before all of them had gradients

    @torchsymbol(_functional.all_reduce, id="torch.ops._c10d_functional.all_reduce")
    def all_reduce(input: TensorProxy, reduce_op: str, group_name: str) -> TensorProxy:
        """Return the reduction of the processes' tensors, in every process."""
        return prims.all_reduce(input, reduce_op, group_name)

    @torchsymbol(
        _functional.all_gather_into_tensor,
        _autograd.all_gather_into_tensor,
        id="torch.ops._c10d_functional.all_gather_into_tensor",
    )
    def all_gather_into_tensor(input: TensorProxy, group_size: int, group_name: str) -> TensorProxy:
        """Return the concatenation of the processes' tensors along dim 0."""
        return prims.all_gather_into_tensor(input, group_size, group_name)

    @torchsymbol(
        _functional.reduce_scatter_tensor,
        _autograd.reduce_scatter_tensor,
        id="torch.ops._c10d_functional.reduce_scatter_tensor",
    )
    def reduce_scatter_tensor(input: TensorProxy, reduce_op: str, group_size: int, group_name: str) -> TensorProxy:
        """Reduce the processes' tensors, and return this process's part along dim 0."""
        return prims.reduce_scatter_tensor(input, reduce_op, group_size, group_name)

    @torchsymbol(
        _functional.all_to_all_single, _autograd.all_to_all_single, id="torch.ops._c10d_functional.all_to_all_single"
    )
    def all_to_all_single(
        input: TensorProxy, output_split_sizes: Sequence[Dim], input_split_sizes: Sequence[Dim], group_name: str
    ) -> TensorProxy:
        """Send a part of input along dim 0 from each process to each process, and return the received parts."""
        return prims.all_to_all_single(input, tuple(output_split_sizes), tuple(input_split_sizes), group_name)

    @torchsymbol(_functional.wait_tensor, id="torch.ops._c10d_functional.wait_tensor")
    def wait_tensor(tensor: TensorProxy) -> TensorProxy:
        """Wait for the result of a collective and return it."""
        return prims.wait_tensor(tensor)
