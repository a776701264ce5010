"""Matrix products of half precision with a size that 8 does not divide, such as a vocabulary of 50,257.

cuBLAS runs them by kernels that load one element at a time, at a seventh of the speed, if a row of an operand or of the
result does not begin at a multiple of 16 bytes. Here such operands are copied to rows that do, and results have them.
"""

import math

import torch

from forge import clang, prims, torchlang
from forge.executors.executor import Decision, OperatorExecutor, decline
from forge.executors.torchex.memory import ROW_BYTES, aligned_empty
from forge.ir import TensorProxy
from forge.ir.proxies import Dim, hint_of

_SLOW, _FAST = 1e14, 6e14  # operations a second, of half precision: without alignment and with it
_BANDWIDTH = 2e12  # bytes a second
_LAUNCH = 5e-6  # seconds


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return a matrix, or a batch of them, in memory that the fast kernels take: itself where it is such already."""
    unit = -2 if x.stride(-2) == 1 and x.stride(-1) != 1 else -1  # as a transposed matrix has it
    others = [stride for dim, stride in enumerate(x.stride(), -x.ndim) if dim != unit]
    if x.stride(unit) == 1 and all(stride * x.element_size() % ROW_BYTES == 0 for stride in others):
        return x
    if unit == -2:
        return _aligned(x.mT).mT
    return aligned_empty(tuple(x.shape), x.dtype, x.device).copy_(x)


def _product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return a @ b + bias of (..., M, K) and (..., K, N), in rows that begin at multiples of 16 bytes."""
    a, b = _aligned(a), _aligned(b)
    out = aligned_empty((*a.shape[:-1], b.shape[-1]), a.dtype, a.device)
    if a.ndim == 2:
        return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)
    batches = (a.flatten(0, -3), b.flatten(0, -3), out.flatten(0, -3))
    torch.bmm(*batches[:2], out=batches[2])
    return out


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    rows = input if input.ndim == 2 else input.reshape(-1, input.shape[-1])
    return _product(rows, weight.t(), bias).view(*input.shape[:-1], weight.shape[0])


def _is_profitable(batch: Dim, m: Dim, k: Dim, n: Dim, dtype: torch.dtype) -> Decision:
    """Return whether a product of (M, K) and (K, N) gains more than the copies of its operands cost."""
    if dtype not in (torch.bfloat16, torch.float16):
        return decline(f"a product of {dtype} is left to torch")
    batch, m, k, n = map(hint_of, (batch, m, k, n))
    is_odd = {size: size * dtype.itemsize % ROW_BYTES != 0 for size in (m, k, n)}
    if not any(is_odd.values()):
        return decline("each row of the product begins at a multiple of 16 bytes")
    gain = 2 * batch * m * k * n * (1 / _SLOW - 1 / _FAST)
    copied = [batch * rows * row for rows, row in ((m, k), (k, n), (m, n)) if is_odd[rows] or is_odd[row]]
    cost = sum(2 * elements * dtype.itemsize / _BANDWIDTH + _LAUNCH for elements in copied)
    return gain > cost or decline("the product gains less than the copies of its operands cost")


def _checker(a: TensorProxy, b: TensorProxy) -> Decision:
    if a.device.type != "cuda":
        return decline(f"the product runs on {a.device.type}, and not on a CUDA GPU")
    batches = zip(a.shape[:-2], b.shape[:-2], strict=False)
    if a.ndim < 2 or a.ndim != b.ndim or not all(prims.statically_true(x == y) for x, y in batches):
        return decline("the operands are no matrices, or their batches differ")
    return _is_profitable(math.prod(a.shape[:-2]), *a.shape[-2:], b.shape[-1], a.dtype)


def _linear_checker(input: TensorProxy, weight: TensorProxy, bias: TensorProxy | None = None) -> Decision:
    if input.device.type != "cuda":
        return decline(f"the product runs on {input.device.type}, and not on a CUDA GPU")
    if input.ndim < 2 or weight.ndim != 2 or (bias is not None and bias.ndim != 1):
        return decline("the operands are no matrices")
    return _is_profitable(1, math.prod(input.shape[:-1]), input.shape[-1], weight.shape[0], input.dtype)


def register(executor: OperatorExecutor) -> None:
    """Register products with an executor."""
    product = executor.register_operator("product", like=prims.matmul, fn=_product)
    for symbol in (prims.matmul, clang.matmul, torchlang.matmul, torchlang.mm, torchlang.bmm):
        executor.register_implementation(symbol, product, checker=_checker)
    executor.register_implementation(torchlang.linear, _linear, checker=_linear_checker)
