"""Matrix products of half precision with a size that 8 does not divide, such as a vocabulary of 50,257.

cuBLAS runs them by kernels that load one element at a time, at a seventh of the speed, if a row of an operand or of the
result is no multiple of 16 bytes. Here such operands are padded with zeros, and results are views of wider rows.
"""

import math

import torch
from torch.nn import functional as F

from forge import clang, prims, torchlang
from forge.executors.executor import Decision, OperatorExecutor, decline
from forge.executors.torchex.memory import ROW_BYTES
from forge.ir import TensorProxy
from forge.ir.proxies import Dim, hint_of

_SLOW, _FAST = 1e14, 6e14  # operations a second, of half precision: without alignment and with it
_BANDWIDTH = 2e12  # bytes a second
_LAUNCH = 5e-6  # seconds


def _padded(x: torch.Tensor, rows: int, row: int) -> torch.Tensor:
    """Return matrices of (..., M, K) with zeros up to `rows` and `row`, in rows or columns as they lie in memory."""
    if x.shape[-2:] == (rows, row):
        return x
    is_transposed = x.stride(-2) == 1 and x.stride(-1) != 1
    padded = x.new_zeros((*x.shape[:-2], row, rows)).mT if is_transposed else x.new_zeros((*x.shape[:-2], rows, row))
    padded[..., : x.shape[-2], : x.shape[-1]] = x
    return padded


def _product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return a @ b of (..., M, K) and (..., K, N), and of matrices + bias, as a view of rows of a multiple of 16
    bytes."""
    multiple = ROW_BYTES // a.element_size()
    (m, k), n = a.shape[-2:], b.shape[-1]
    wide_k, wide_n = k + -k % multiple, n + -n % multiple
    a, b = _padded(a, m, wide_k), _padded(b, wide_k, wide_n)
    return (torch.matmul(a, b) if bias is None else torch.addmm(F.pad(bias, (0, wide_n - n)), a, b))[..., :n]


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    rows = input if input.ndim == 2 else input.reshape(-1, input.shape[-1])
    return _product(rows, weight.t(), bias).view(*input.shape[:-1], weight.shape[0])


def _is_profitable(batch: Dim, m: Dim, k: Dim, n: Dim, dtype: torch.dtype) -> Decision:
    """Return whether a product of (M, K) and (K, N) gains more than the copies of its operands cost."""
    if dtype not in (torch.bfloat16, torch.float16):
        return decline(f"a product of {dtype} is left to torch")
    batch, m, k, n = map(hint_of, (batch, m, k, n))
    odd = [size * dtype.itemsize % ROW_BYTES != 0 for size in (k, n)]
    if not any(odd):
        return decline("each row of the product is a multiple of 16 bytes")
    gain = 2 * batch * m * k * n * (1 / _SLOW - 1 / _FAST)
    copies = [batch * size for size, is_odd in ((m * k, odd[0]), (k * n, any(odd)), (m * n, odd[1])) if is_odd]
    cost = sum(2 * elements * dtype.itemsize / _BANDWIDTH + _LAUNCH for elements in copies)
    return gain > cost or decline("the product gains less than the copies of its operands cost")


def _checker(a: TensorProxy, b: TensorProxy) -> Decision:
    if a.device.type != "cuda":
        return decline(f"the product runs on {a.device.type}, and not on a CUDA GPU")
    batches = zip(a.shape[:-2], b.shape[:-2], strict=False)
    if a.ndim < 2 or a.ndim != b.ndim or not all(prims.statically_true(x == y) for x, y in batches):
        return decline("the operands are no matrices, or their batches differ")
    (m, k), n = a.shape[-2:], b.shape[-1]
    return _is_profitable(math.prod(a.shape[:-2]), m, k, n, a.dtype)


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
        executor.register_implementation(symbol, product, checker=_checker, low_priority=True)
    executor.register_implementation(torchlang.linear, _linear, checker=_linear_checker, low_priority=True)
