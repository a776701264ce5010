"""The torch executor's collectives. They take contiguous tensors only, and a gradient may not be contiguous."""

from collections.abc import Callable, Sequence

import torch

from forge import prims, torchlang
from forge.executors.torchex.core import composites, run_prim, run_prims, run_torchlang, torchex
from forge.ir import Symbol, Tag
from forge.torchlang import parameter_shards as shards
from forge.torchlang.collective_watch import collective_error

if torch.distributed.is_available():
    functional = torch.ops._c10d_functional

    composites.update((torchlang.redistributed, torchlang.spreading, torchlang.unsharded))

    run_prims({prims.all_reduce: functional.all_reduce})
    run_prims({prims.unshard: shards.gather_alone, prims.reduce_to_shard: shards.reduce_alone})

    def all_reduce_(x: torch.Tensor, reduce_op: str, group: str) -> torch.Tensor:
        """Reduce the tensors of all ranks, in place if x is contiguous."""
        reduce = functional.all_reduce_ if x.is_contiguous() else functional.all_reduce
        return reduce(x, reduce_op, group)

    REDUCTION = torchex.register_operator("all_reduce_", like=prims.all_reduce, fn=all_reduce_, tags=[Tag.IN_PLACE])

    @run_prim(prims.wait_tensor)
    def wait_tensor(x: torch.Tensor) -> torch.Tensor:
        """Wait for a collective and return its result. Raises: CollectiveError, which names the last collective of
        each rank."""
        try:
            return functional.wait_tensor(x)
        except RuntimeError as error:
            raise collective_error(error) from error

    run_torchlang(torchlang.wait_tensor, wait_tensor)

    @run_prim(prims.all_gather_into_tensor)
    def all_gather_into_tensor(x: torch.Tensor, group_size: int, group: str) -> torch.Tensor:
        """Concatenate the tensors of all ranks along dim 0."""
        return functional.all_gather_into_tensor(x.contiguous(), group_size, group)

    @run_prim(prims.reduce_scatter_tensor)
    def reduce_scatter_tensor(x: torch.Tensor, reduce_op: str, group_size: int, group: str) -> torch.Tensor:
        """Reduce the tensors of all ranks and return this rank's part along dim 0."""
        return functional.reduce_scatter_tensor(x.contiguous(), reduce_op, group_size, group)

    @run_prim(prims.all_to_all_single)
    def all_to_all_single(
        x: torch.Tensor, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int], group: str
    ) -> torch.Tensor:
        """Send a part of x along dim 0 to each rank."""
        return functional.all_to_all_single(x.contiguous(), output_split_sizes, input_split_sizes, group)

    def _messages(function: Callable, tag: Tag) -> Symbol:
        """Return the operator of a function of lists; it decomposes into calls with known metadata."""
        tags = (tag, Tag.NO_FUSE)
        return torchex.register_operator(function.__name__, meta=lambda *args: None, fn=function, tags=tags)

    start_unshard = _messages(shards.start_unshard, Tag.SENDS)
    finish_unshard = _messages(shards.finish_unshard, Tag.AWAITS)
    start_reduce = _messages(shards.start_reduce, Tag.SENDS)
    finish_reduce = _messages(shards.finish_reduce, Tag.AWAITS)
