"""The products and norms of torch."""

import operator
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from forge import clang, prims
from forge.ir import (
    INT_TYPES,
    Dim,
    Number,
    TensorProxy,
    check,
    get_grad,
    needs_grad,
    put_grad,
    register_grad,
    short_dtype,
)
from forge.prims.core import check_dim, same, same_shape, torch_check
from forge.torch_internals.functions import torch_grouped_mm
from forge.torchlang.aliases import results
from forge.torchlang.core import check_tensor, torchsymbol


def check_rank(op: str, ndim: int, **arguments: TensorProxy) -> None:
    """Raise RuntimeError naming the first argument without `ndim` dims."""
    check_tensor(op, **arguments)
    for name, value in arguments.items():
        torch_check(
            value.ndim == ndim,
            lambda name=name, value=value: f"{op}: Expected {name} to have {ndim} dims, but it is {value}",
        )


def check_one_dtype(op: str, **arguments: TensorProxy) -> None:
    """Raise RuntimeError unless all arguments have the same dtype."""
    torch_check(
        len({value.dtype for value in arguments.values()}) == 1,
        lambda: f"{op}: {', '.join(arguments)} must have the same dtype, but they are {list(arguments.values())}",
    )


def _product(op: str, a: TensorProxy, b: TensorProxy) -> TensorProxy:
    """Return the matrix product of operands of valid ranks. Raises RuntimeError if dtypes or lengths do not match."""
    torch_check(
        a.dtype == b.dtype, lambda: f"{op}: expected both operands to have the same dtype, but they are {a} and {b}"
    )
    torch_check(
        same(a.shape[-1], b.shape[0] if b.ndim == 1 else b.shape[-2]),
        lambda: f"{op}: shapes cannot be multiplied: {a} and {b}",
    )
    return clang.matmul(a, b)


@torchsymbol(
    torch.matmul, Tensor.matmul, operator.matmul, torch.linalg.matmul, Tensor.__matmul__, inplace=operator.imatmul
)
def matmul(input: TensorProxy, other: TensorProxy) -> TensorProxy:
    """Return the matrix product; batch dims broadcast."""
    torch_check(
        input.ndim > 0 and other.ndim > 0,
        lambda: f"matmul: both arguments to matmul need to be at least 1D, but they are {input} and {other}",
    )
    return _product("matmul", input, other)


@torchsymbol(torch.mm, Tensor.mm)
def mm(input: TensorProxy, mat2: TensorProxy) -> TensorProxy:
    """Return the product of two matrices."""
    check_rank("mm", 2, input=input, mat2=mat2)
    return _product("mm", input, mat2)


@torchsymbol(torch.bmm, Tensor.bmm)
def bmm(input: TensorProxy, mat2: TensorProxy) -> TensorProxy:
    """Return the products of two batches of matrices."""
    check_rank("bmm", 3, input=input, mat2=mat2)
    torch_check(
        same(input.shape[0], mat2.shape[0]),
        lambda: f"bmm: Expected both batches to have one length, but they are {input} and {mat2}",
    )
    return _product("bmm", input, mat2)


@torchsymbol(F.grouped_mm)
def grouped_mm(
    mat_a: TensorProxy,
    mat_b: TensorProxy,
    *,
    offs: TensorProxy | None = None,
    bias: TensorProxy | None = None,
    out_dtype: torch.dtype | None = None,
) -> TensorProxy:
    """Return the products of groups of matrices; in 2-d operands, group i ends at offs[i]."""
    if offs is not None:
        check_tensor("grouped_mm", offs=offs)
    torch_check(
        bias is None,
        lambda: f"grouped_mm: bias is {bias}, but must be None, which is all that torch supports; add it to the result",
    )
    dtype = out_dtype or mat_a.dtype
    torch_check(
        dtype == mat_a.dtype,
        lambda: f"grouped_mm: out_dtype is {short_dtype(dtype)}, but must be the dtype of mat_a, which is {mat_a}",
    )
    return prims.grouped_mm(mat_a, mat_b, offs)


@torchsymbol(torch_grouped_mm)
def grouped_mm_by_position(
    input: TensorProxy,
    mat2: TensorProxy,
    offs: TensorProxy | None = None,
    bias: TensorProxy | None = None,
    out_dtype: torch.dtype | None = None,
) -> TensorProxy:
    """Return grouped_mm under its older name, which takes all arguments by position."""
    return grouped_mm(input, mat2, offs=offs, bias=bias, out_dtype=out_dtype)


@torchsymbol(torch.mv, Tensor.mv)
def mv(input: TensorProxy, vec: TensorProxy) -> TensorProxy:
    """Return the product of a matrix and a vector."""
    check_rank("mv", 2, input=input)
    check_rank("mv", 1, vec=vec)
    return _product("mv", input, vec)


@torchsymbol(torch.dot, Tensor.dot)
def dot(input: TensorProxy, tensor: TensorProxy) -> TensorProxy:
    """Return the sum of the products of two vectors' elements."""
    check_rank("dot", 1, input=input, tensor=tensor)
    return _product("dot", input, tensor)


@torchsymbol(torch.vdot, Tensor.vdot)
def vdot(input: TensorProxy, other: TensorProxy) -> TensorProxy:
    """Return dot with the first vector conjugated."""
    check_rank("vdot", 1, input=input, other=other)
    return _product("vdot", clang.conj(input), other)


@torchsymbol(torch.outer, Tensor.outer, torch.ger, Tensor.ger)
def outer(input: TensorProxy, vec2: TensorProxy) -> TensorProxy:
    """Return out with out[i][j] = input[i] * vec2[j]."""
    check_rank("outer", 1, input=input, vec2=vec2)
    return clang.mul(clang.unsqueeze(input, 1), vec2)


@torchsymbol(torch.inner, Tensor.inner)
def inner(input: TensorProxy, other: TensorProxy) -> TensorProxy:
    """Return the sums of products over the last dims; a product if one operand is 0-d."""
    if input.ndim == 0 or other.ndim == 0:
        return clang.mul(input, other)
    torch_check(
        same(input.shape[-1], other.shape[-1]),
        lambda: f"inner: the last dimension must match on both input tensors, but got {input} and {other}",
    )
    a = [("a", i) for i in range(input.ndim - 1)]
    b = [("b", i) for i in range(other.ndim - 1)]
    return clang.contract("inner", (input, other), ((*a, "k"), (*b, "k")), (*a, *b))


def _add_product(op: str, input: TensorProxy, product: TensorProxy, beta: Number, alpha: Number) -> TensorProxy:
    """Return beta * input + alpha * product, in the product's shape and dtype. With beta = 0, input may be nan."""
    torch_check(
        input.dtype == product.dtype,
        lambda: f"{op}: input is {input}, but must have the dtype of the product, {short_dtype(product.dtype)}",
    )
    if product.dtype in _INTEGERS:
        torch_check(
            all(not isinstance(value, float) for value in (beta, alpha)),
            lambda: (
                f"{op}: For integral input tensors, argument beta must not be a floating point number, "
                f"but beta is {beta} and alpha is {alpha}"
            ),
        )
    shape = clang.broadcast_shapes(op, input.shape, product.shape)
    torch_check(
        same_shape(shape, product.shape),
        lambda: f"{op}: input is {input}, which does not expand to the product's shape {list(product.shape)}",
    )
    product = product if alpha == 1 else clang.mul(product, alpha)
    if beta == 0:
        return product
    return clang.add(input if beta == 1 else clang.mul(input, beta), product)


_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


@torchsymbol(torch.addmm, Tensor.addmm, inplace=Tensor.addmm_)
def addmm(
    input: TensorProxy, mat1: TensorProxy, mat2: TensorProxy, *, beta: Number = 1, alpha: Number = 1
) -> TensorProxy:
    """Return beta * input + alpha * (mat1 @ mat2)."""
    check_rank("addmm", 2, mat1=mat1, mat2=mat2)
    return _add_product("addmm", input, _product("addmm", mat1, mat2), beta, alpha)


@torchsymbol(torch.addmv, Tensor.addmv, inplace=(torch.addmv_, Tensor.addmv_))
def addmv(
    input: TensorProxy, mat: TensorProxy, vec: TensorProxy, *, beta: Number = 1, alpha: Number = 1
) -> TensorProxy:
    """Return beta * input + alpha * (mat @ vec)."""
    check_rank("addmv", 2, mat=mat)
    check_rank("addmv", 1, vec=vec)
    return _add_product("addmv", input, _product("addmv", mat, vec), beta, alpha)


@torchsymbol(torch.addr, Tensor.addr, inplace=Tensor.addr_)
def addr(
    input: TensorProxy, vec1: TensorProxy, vec2: TensorProxy, *, beta: Number = 1, alpha: Number = 1
) -> TensorProxy:
    """Return beta * input + alpha * outer(vec1, vec2)."""
    check_rank("addr", 1, vec1=vec1, vec2=vec2)
    return _add_product("addr", input, clang.mul(clang.unsqueeze(vec1, 1), vec2), beta, alpha)


@torchsymbol(torch.baddbmm, Tensor.baddbmm, inplace=Tensor.baddbmm_)
def baddbmm(
    input: TensorProxy, batch1: TensorProxy, batch2: TensorProxy, *, beta: Number = 1, alpha: Number = 1
) -> TensorProxy:
    """Return beta * input + alpha * bmm(batch1, batch2)."""
    check_rank("baddbmm", 3, batch1=batch1, batch2=batch2)
    return _add_product("baddbmm", input, _product("baddbmm", batch1, batch2), beta, alpha)


@torchsymbol(torch.addbmm, Tensor.addbmm, inplace=Tensor.addbmm_)
def addbmm(
    input: TensorProxy, batch1: TensorProxy, batch2: TensorProxy, *, beta: Number = 1, alpha: Number = 1
) -> TensorProxy:
    """Return beta * input + alpha * the sum over the batch of bmm(batch1, batch2)."""
    check_rank("addbmm", 3, batch1=batch1, batch2=batch2)
    total = clang.sum(_product("addbmm", batch1, batch2), 0)
    return _add_product("addbmm", input, total, beta, alpha)


@torchsymbol(F.linear)
def linear(input: TensorProxy, weight: TensorProxy, bias: TensorProxy | None = None) -> TensorProxy:
    """Return input @ weight.T + bias.

    Shapes: input (..., in), weight (out, in) or (in,), bias (out,) or (); out is (..., out).
    """
    torch_check(
        weight.ndim in (1, 2) and input.ndim > 0 and same(input.shape[-1], weight.shape[-1]),
        lambda: f"linear: mat1 and mat2 shapes cannot be multiplied: input is {input}, weight is {weight}",
    )
    torch_check(
        input.dtype == weight.dtype and (bias is None or bias.dtype == input.dtype),
        lambda: f"linear: input is {input}, weight is {weight} and bias is {bias}, but all must have the same dtype",
    )
    product = clang.matmul(input, clang.transpose(weight, 0, 1) if weight.ndim == 2 else weight)
    return product if bias is None else clang.add(product, bias)


@register_grad(linear)
def _linear_grad(input: TensorProxy, weight: TensorProxy, bias: TensorProxy | None = None) -> TensorProxy:
    out = linear(input, weight, bias)
    g = get_grad(out)
    put_grad(bias, g)  # summed to the bias's shape
    if weight.ndim == 1:
        put_grad(input, clang.unsqueeze(g, -1) * clang.conj(weight))
        put_grad(weight, clang.unsqueeze(g, -1) * clang.conj(input))
        return out
    if needs_grad(input):
        put_grad(input, clang.matmul(g, clang.conj(weight)))
    if needs_grad(weight):
        inputs = clang.conj(clang.as_rows(input))
        put_grad(weight, clang.matmul(clang.as_rows(g).transpose(0, 1), inputs))
    return out


@torchsymbol(F.bilinear)
def bilinear(
    input1: TensorProxy, input2: TensorProxy, weight: TensorProxy, bias: TensorProxy | None = None
) -> TensorProxy:
    """Return out with out[..., o] = the sum over i and j of input1[..., i] * weight[o, i, j] * input2[..., j], plus
    bias[o]."""
    check_rank("bilinear", 3, weight=weight)
    bias_given = {} if bias is None else {"bias": bias}
    check_one_dtype("bilinear", input1=input1, input2=input2, weight=weight, **bias_given)
    torch_check(
        input1.ndim == input2.ndim and input1.ndim > 0 and all(map(same, input1.shape[:-1], input2.shape[:-1])),
        lambda: f"bilinear: input batch dimensions do not match: {input1} and {input2}",
    )
    for name, value, size in (("input1", input1, weight.shape[1]), ("input2", input2, weight.shape[2])):
        torch_check(
            same(value.shape[-1], size),
            lambda name=name, value=value: f"bilinear: {name} is {value}, whose last length does not fit {weight}",
        )
    batch = tuple(range(input1.ndim - 1))
    half = clang.contract("bilinear", (input1, weight), ((*batch, "i"), ("o", "i", "j")), (*batch, "o", "j"))
    out = clang.contract("bilinear", (half, input2), ((*batch, "o", "j"), (*batch, "j")), (*batch, "o"))
    return out if bias is None else clang.add(out, bias)


@torchsymbol(torch.tensordot)
def tensordot(a: TensorProxy, b: TensorProxy, dims: int | Sequence = 2) -> TensorProxy:
    """Return the sum of products over the last `dims` dims of a and the first of b, or over two given lists of dims."""
    check(
        not isinstance(dims, TensorProxy),
        lambda: "tensordot: dims in a tensor are not known while tracing; give a list",
        NotImplementedError,
    )
    if isinstance(dims, INT_TYPES):
        dims = int(dims)  # the program depends on the dims
        torch_check(dims >= 0, lambda: f"tensordot expects dims >= 0, but got dims={dims}")
        torch_check(
            dims <= min(a.ndim, b.ndim),
            lambda: f"tensordot expects dims <= the number of dims of both operands, but got dims={dims}, {a} and {b}",
        )
        dims = (range(a.ndim - dims, a.ndim), range(dims))
    of_a, of_b = [[each] if isinstance(each, INT_TYPES) else list(each) for each in dims]
    torch_check(
        len(of_a) == len(of_b),
        lambda: f"tensordot: both dimension lists should have same length, but they are {of_a} and {of_b}",
    )
    of_a = [check_dim("tensordot", int(dim), a.ndim) for dim in of_a]
    of_b = [check_dim("tensordot", int(dim), b.ndim) for dim in of_b]
    a_labels = tuple(("sum", of_a.index(i)) if i in of_a else ("a", i) for i in range(a.ndim))
    b_labels = tuple(("sum", of_b.index(i)) if i in of_b else ("b", i) for i in range(b.ndim))
    output = tuple(label for label in (*a_labels, *b_labels) if label[0] != "sum")
    return clang.contract("tensordot", (a, b), (a_labels, b_labels), output)


@torchsymbol(torch.chain_matmul)
def chain_matmul(*matrices: TensorProxy) -> TensorProxy:
    """Return the product of matrices, in the cheapest order."""
    return _chain("chain_matmul", matrices)


@torchsymbol(torch.linalg.multi_dot)
def multi_dot(tensors: Sequence[TensorProxy]) -> TensorProxy:
    """Return the product of matrices in the cheapest order; the first and the last may be vectors."""
    return _chain("linalg.multi_dot", tensors)


def _chain(op: str, matrices: Sequence[TensorProxy]) -> TensorProxy:
    torch_check(len(matrices) > 1, lambda: f"{op}: expected at least 2 tensors but got {len(matrices)}")
    labels = []
    for i, matrix in enumerate(matrices):
        end = matrix.ndim == 1 and i in (0, len(matrices) - 1)
        check_rank(op, 1 if end else 2, **{f"tensors[{i}]": matrix})
        labels.append(((i + 1,) if i == 0 else (i,)) if end else (i, i + 1))
    outer_labels = [label for label in (0, len(matrices)) if any(label in each for each in labels)]
    return clang.contract(op, matrices, labels, tuple(outer_labels))


@torchsymbol(torch.linalg.cross)
def linalg_cross(input: TensorProxy, other: TensorProxy, *, dim: int = -1) -> TensorProxy:
    """Return the cross product of vectors of length 3 along `dim`; other dims broadcast."""
    return _cross("linalg.cross", input, other, dim)


@torchsymbol(torch.cross, Tensor.cross)
def cross(input: TensorProxy, other: TensorProxy, dim: int | None = None) -> TensorProxy:
    """Return the cross product of vectors of length 3 along `dim`, by default the first dim of length 3."""
    if dim is None:
        dims = [i for i, size in enumerate(input.shape) if prims.statically_true(size == 3)]
        torch_check(bool(dims), lambda: f"cross: no dimension of size 3 in input {input}")
        dim = dims[0]
    return _cross("cross", input, other, dim)


def _cross(op: str, a: TensorProxy, b: TensorProxy, dim: int) -> TensorProxy:
    torch_check(
        a.ndim == b.ndim, lambda: f"{op}: inputs must have the same number of dimensions, but they are {a} and {b}"
    )
    check_one_dtype(op, input=a, other=b)
    dim = check_dim(op, dim, a.ndim)
    torch_check(
        same(a.shape[dim], 3) and same(b.shape[dim], 3),
        lambda: f"{op}: inputs dimension {dim} must have length 3. Got {a} and {b}",
    )
    a, b = clang.broadcast(op, a, b)
    return _roll(a, dim, 1) * _roll(b, dim, 2) - _roll(a, dim, 2) * _roll(b, dim, 1)


def _roll(x: TensorProxy, dim: int, by: int) -> TensorProxy:
    return prims.cat([clang.slice_in_dim(x, dim, by, None), clang.slice_in_dim(x, dim, 0, by)], dim)


@torchsymbol(torch.trace, Tensor.trace)
def trace(input: TensorProxy) -> TensorProxy:
    """Return the sum of a matrix's diagonal."""
    check_rank("trace", 2, input=input)
    rows, columns = input.shape
    size: Dim = torch.sym_min(rows, columns)
    square = clang.slice_in_dim(clang.slice_in_dim(input, 0, 0, size), 1, 0, size)
    flat = clang.reshape(square, (size * size,))
    return clang.sum(clang.slice_in_dim(flat, 0, 0, None, size + 1))


@torchsymbol(torch.kron, Tensor.kron)
def kron(input: TensorProxy, other: TensorProxy) -> TensorProxy:
    """Return the Kronecker product: every element of input times the whole of other."""
    rank = max(input.ndim, other.ndim)
    a_shape = (1,) * (rank - input.ndim) + tuple(input.shape)
    b_shape = (1,) * (rank - other.ndim) + tuple(other.shape)
    a = clang.reshape(input, [size for pair in a_shape for size in (pair, 1)])
    b = clang.reshape(other, [size for pair in b_shape for size in (1, pair)])
    return clang.reshape(clang.mul(a, b), [x * y for x, y in zip(a_shape, b_shape, strict=True)])


# factorizations


@torchsymbol(torch.linalg.ldl_factor_ex)
def ldl_factor_ex(
    input: TensorProxy, *, hermitian: bool = False, check_errors: bool = False
) -> tuple[TensorProxy, TensorProxy, TensorProxy]:
    """Return (L and D in one matrix with input = L @ D @ L^H, pivots as in LAPACK, the error code of each matrix)."""
    factors = prims.linalg_ldl_factor_ex(input, hermitian=hermitian, check_errors=check_errors)
    return results.linalg_ldl_factor_ex(factors)
