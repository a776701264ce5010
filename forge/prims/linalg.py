"""The prims of linear algebra."""

import torch

from forge.ir import TensorProxy, check, short_dtype
from forge.prims.core import check_same_device, like, primitive, register_vjp, same, torch_check
from forge.prims.elementwise import conjugate
from forge.prims.shape import permute


@primitive()
def matmul(a: TensorProxy, b: TensorProxy) -> TensorProxy:
    """Return out with out[..., i, j] = sum over k of a[..., i, k] * b[..., k, j].

    Shapes: (..., n, k) and (..., k, m) with equal batch dims; out is (..., n, m).
    Dtypes: the same for both, not bool. Source: torch.matmul, without its broadcasting.
    """
    check(
        a.ndim == b.ndim and a.ndim >= 2,
        lambda: f"prims.matmul: a is {a} and b is {b}, but both must have one rank of at least 2; use torch.matmul",
    )
    torch_check(
        same(a.shape[-1], b.shape[-2]) and all(map(same, a.shape[:-2], b.shape[:-2])),
        lambda: f"prims.matmul: mat1 and mat2 shapes cannot be multiplied: {a} and {b}",
    )
    torch_check(
        a.dtype == b.dtype and a.dtype != torch.bool,
        lambda: f"prims.matmul: expected one dtype (not bool) for both, but a is {a} and b is {b}",
    )
    check_same_device("prims.matmul", a, b)
    return like(a, shape=(*a.shape[:-1], b.shape[-1]))


def _swap_last(x: TensorProxy) -> TensorProxy:
    return permute(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


register_vjp(
    matmul, a=lambda g, b: matmul(g, _swap_last(conjugate(b))), b=lambda g, a: matmul(_swap_last(conjugate(a)), g)
)


GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@primitive()
def grouped_mm(a: TensorProxy, b: TensorProxy, offs: TensorProxy | None = None) -> TensorProxy:
    """Multiply groups of matrices: a dim of the 2-d operands is divided into groups, where group i ends at offs[i].

    Shapes: (R, K) @ (G, K, N), rows in groups: (R, N). (G, M, K) @ (K, C), columns in groups: (M, C).
        (M, K) @ (K, N), the contraction in groups: (G, M, N). (G, M, K) @ (G, K, N), no offs: (G, M, N).
        Rows and columns after the last group are not written.
    Dtypes: one of float32, bfloat16 and float16 for both; offs is int32.
    Raises: RuntimeError, as torch does. Source: torch.nn.functional.grouped_mm.
    """
    op = "prims.grouped_mm"
    for name, x in (("a", a), ("b", b)):
        torch_check(x.ndim in (2, 3), lambda name=name, x=x: f"{op}: {name} is {x}, but must have 2 or 3 dims")
    torch_check(
        a.dtype == b.dtype and a.dtype in GROUPED_DTYPES,
        lambda: (
            f"{op}: a is {a} and b is {b}, but both must have one dtype of "
            f"{', '.join(map(short_dtype, GROUPED_DTYPES))}"
        ),
    )
    torch_check(
        same(a.shape[-1], b.shape[-2]),
        lambda: f"{op}: a is {a} and b is {b}, but the last dim of a and the last but one of b must have one size",
    )
    check_same_device(op, a, b)
    if offs is None:
        torch_check(
            a.ndim == b.ndim == 3 and same(a.shape[0], b.shape[0]),
            lambda: f"{op}: a is {a} and b is {b}, but without offs both must be batches of one size",
        )
        return like(a, shape=(*a.shape[:-1], b.shape[-1]))
    _check_offsets(op, a, b, offs)
    rows, columns = a.shape[-2], b.shape[-1]
    return like(a, shape=(offs.shape[0], rows, columns) if a.ndim == b.ndim == 2 else (rows, columns))


def _check_offsets(op: str, a: TensorProxy, b: TensorProxy, offs: TensorProxy) -> None:
    torch_check(
        a.ndim == 2 or b.ndim == 2,
        lambda: f"{op}: offs is {offs}, but must be None for the batches a, {a}, and b, {b}",
    )
    torch_check(
        offs.ndim == 1 and offs.dtype == torch.int32,
        lambda: f"{op}: offs is {offs}, but must have 1 dim and the dtype i32",
    )
    groups = [x.shape[0] for x in (a, b) if x.ndim == 3]
    torch_check(
        all(same(offs.shape[0], size) for size in groups),
        lambda: f"{op}: offs is {offs}, but must have an element for each group of a, {a}, and b, {b}",
    )
    check_same_device(op, a, offs)


# each case's gradients are cases of grouped_mm: those of grouped rows contract groups, and vice versa
register_vjp(
    grouped_mm,
    a=lambda g, b, offs: grouped_mm(g, _swap_last(b), offs),
    b=lambda g, a, offs: grouped_mm(_swap_last(a), g, offs),
)
