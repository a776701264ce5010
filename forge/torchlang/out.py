"""The checks of `out=`: its dtype (most functions cast their result to it, as in-place forms do), and its memory."""

from typing import Any

from forge.ir import TensorProxy, short_dtype
from forge.ir.memory import Ambiguous, Memory
from forge.ir.pytree import tensors
from forge.prims.core import torch_check

# torch requires the exact dtype of the result here, and in all functions with several results
_EXACT = frozenset(
    """
    torch._C._nn.elu torch._C._nn.log_sigmoid torch.abs torch.addbmm torch.addmm torch.addmv torch.amax torch.amin
    torch.aminmax torch.argmax torch.argmin torch.baddbmm torch.bitwise_not torch.bmm torch.bucketize torch.ceil
    torch.chain_matmul torch.clamp torch.complex torch.cross torch.cummax torch.cummin torch.diag torch.dot
    torch.floor torch.frac torch.gather torch.hardshrink torch.heaviside torch.histc torch.index_add
    torch.index_copy torch.index_select torch.inner torch.isneginf torch.isposinf torch.kthvalue torch.linalg.cross
    torch.linalg.matrix_norm torch.linalg.multi_dot torch.linalg.norm torch.linalg.vector_norm torch.log_softmax
    torch.logcumsumexp torch.matmul torch.mm torch.mode torch.msort torch.multinomial torch.mv torch.nan_to_num
    torch.neg torch.nn.functional.avg_pool2d torch.nn.functional.avg_pool3d torch.nn.functional.gelu
    torch.nn.functional.linear torch.nn.functional.softplus torch.nn.functional.softshrink torch.norm torch.polar
    torch.round torch.scatter torch.scatter_add torch.scatter_reduce torch.searchsorted torch.sgn torch.sign
    torch.signbit torch.slice_scatter torch.softmax torch.sort torch.take torch.take_along_dim torch.tensordot
    torch.topk torch.tril torch.triu torch.trunc torch.vdot torch.where
    """.split()
)

# these sums and products are computed in out's dtype
_COMPUTED_IN = frozenset(("torch.cumprod", "torch.cumsum", "torch.prod", "torch.sum"))

# torch refuses an out= that overlaps an argument, if it can detect it
_APART = frozenset(
    """
    torch.cat torch.column_stack torch.dstack torch.hstack torch.index_select torch.stack torch.take torch.vstack
    """.split()
)


def with_dtype(id: str, target: Any, kwargs: dict) -> dict:
    """Return the arguments of a call with `out=target`, adding its dtype if the function computes in it."""
    if id in _COMPUTED_IN and kwargs.get("dtype") is None:
        return {**kwargs, "dtype": target.dtype}
    return kwargs


def check_dtypes(id: str, target: Any, results: Any) -> None:
    """Raise RuntimeError if torch refuses the dtype of an out= for the result."""
    if id not in _EXACT and isinstance(results, TensorProxy):
        return
    for handle, value in zip(tensors(target), tensors(results), strict=True):
        torch_check(
            handle.dtype == value.dtype,
            lambda handle=handle, value=value: (
                f"{id}: Expected out tensor to have dtype {short_dtype(value.dtype)}, but got out={handle}"
            ),
        )


def check_apart(id: str, target: Any, arguments: Any, memory: Memory) -> None:
    """Raise Ambiguous if torch may refuse an out= because it shares memory with an argument."""
    if id not in _APART:
        return
    storages = [memory.ref(handle).storage for handle in tensors(target)]
    for argument in tensors(arguments):
        if any(memory.ref(argument).storage is each for each in storages):
            raise Ambiguous(f"{id} with an out= that shares memory with its argument {argument}: use clone()")
