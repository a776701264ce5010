"""OpInfos of the linalg family: products, contractions, norms and distances."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge.testing.opinfo import FLOATS, Directive, ErrorSample
from forge.testing.table import DTYPE, Where, ints, op, sample, t, tolerance, values, wrong

WITH_INTEGERS = (*FLOATS, torch.int64)


# products

_MATMUL = (
    sample(t(3), t(3)),
    sample(t(2, 3), t(3)),
    sample(t(3), t(3, 4)),
    sample(t(2, 3), t(3, 4)),
    sample(t(3, 2).t(), t(4, 3).t()),
    sample(t(5, 2, 3), t(3, 4)),
    sample(t(5, 2, 3), t(3)),
    sample(t(1, 2, 3), t(5, 3, 4)),
    sample(t(2, 1, 2, 3), t(5, 3, 4)),
    sample(t(3), t(5, 3, 4)),
    sample(t(0, 3), t(3, 4)),
    sample(t(2, 0), t(0, 4)),
    sample(t(5, 2, 0), t(0, 4)),
    sample(t(5, 2, 0), t(0)),
    sample(t(5, 2, 3), t(3, 0)),
    sample(t(0), t(0)),
)
_MATMUL_ERRORS = (
    wrong(t(2, 3), t(2, 3), match="cannot be multiplied"),
    wrong(t(), t(3), match="at least 1D"),
    wrong(t(2, 3), t(3, dtype=torch.float64), match="same dtype"),
)
op("matmul", _MATMUL, _MATMUL_ERRORS, dtypes=WITH_INTEGERS)
op("linalg.matmul operator.matmul", _MATMUL[:4], _MATMUL_ERRORS[:1])
op(
    "mm",
    [sample(t(2, 3), t(3, 4)), sample(t(3, 2).t(), t(3, 4)), sample(t(0, 3), t(3, 4))],
    [wrong(t(2, 3), t(2, 3), match="cannot be multiplied"), wrong(t(2, 3), t(3), match="to have 2 dims")],
    dtypes=WITH_INTEGERS,
)
op(
    "bmm",
    [sample(t(5, 2, 3), t(5, 3, 4)), sample(t(3, 4, 2).transpose(0, -1), t(2, 3, 1)), sample(t(0, 2, 3), t(0, 3, 4))],
    [wrong(t(2, 3, 3), t(1, 3, 2), match="batches"), wrong(t(2, 3), t(3, 2), match="to have 3 dims")],
)
_ROWS, _WEIGHTS = t(8, 16), t(3, 16, 24)
_OFFSETS = values([2, 2, 8], torch.int32)
# a GPU's kernel of bfloat16 stops the device where groups that lie side by side in rows do not begin at multiples of 16
# bytes, or where one that is summed over is empty and `a` is in rows
_WITH_AN_EMPTY, _UNEVEN = values([8, 8, 32], torch.int32), values([8, 24, 32], torch.int32)
op(
    "nn.functional.grouped_mm _grouped_mm aten._grouped_mm",
    sample(_ROWS, _WEIGHTS, offs=_OFFSETS),
    sample(_ROWS, t(3, 24, 16).transpose(1, 2), offs=_OFFSETS, out_dtype=DTYPE),
    Where(
        lambda dtype: dtype != torch.bfloat16,  # whose kernel on a GPU is not tested with no rows at all
        [sample(t(0, 16), _WEIGHTS, offs=values([0, 0, 0], torch.int32))],
    ),
    sample(t(32, 16).t(), t(32, 24), offs=_WITH_AN_EMPTY),
    sample(t(16, 32), t(32, 24), offs=_UNEVEN),
    sample(t(3, 24, 16), t(16, 32), offs=_UNEVEN),
    sample(t(3, 8, 16), _WEIGHTS),
    wrong(t(8), _WEIGHTS, offs=_OFFSETS, match=r"a is .*f32\[8\] \S+, but must have 2 or 3 dims"),
    wrong(_ROWS, t(3, 16, 24, dtype=torch.bfloat16), offs=_OFFSETS, match="one dtype of f32, bf16, f16"),
    wrong(_ROWS, t(3, 8, 24), offs=_OFFSETS, match="must have one size"),
    wrong(_ROWS, _WEIGHTS, match="without offs both must be batches"),
    wrong(t(2, 8, 16), _WEIGHTS, match="without offs both must be batches of one size"),
    wrong(t(3, 8, 16), _WEIGHTS, offs=_OFFSETS, match=r"offs is .*i32\[3\] [\w:]+, but must be None"),
    wrong(_ROWS, _WEIGHTS, offs=ints(2, 2, 8), match=r"offs is .*i64\[3\] .*the dtype i32"),
    wrong(_ROWS, _WEIGHTS, offs=values([2, 8], torch.int32), match="an element for each group"),
    wrong(_ROWS, _WEIGHTS, offs=_OFFSETS, bias=t(24), match=r"bias is .*f32\[24\] \S+, but must be None"),
    wrong(_ROWS, _WEIGHTS, offs=_OFFSETS, out_dtype=torch.bfloat16, match="out_dtype is bf16, but must be the dtype"),
    wrong(_ROWS, _WEIGHTS, offs=[2, 2, 8], error=(TypeError, RuntimeError), match="argument 'offs' must be Tensor"),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    precise=torch.float32,
    directives=(
        Directive("skip", "torch's fake tensors, which Dynamo needs, take bfloat16 alone", test="test_jit"),
        Directive(
            "skip", "rows after the last group, of equal offsets, are not written", test="test_strided[expanded]"
        ),
    ),
)
op("mv", sample(t(2, 3), t(3)), wrong(t(2, 3), t(2), match="cannot be multiplied"))
op("dot", sample(t(3), t(3)), sample(t(0), t(0)), wrong(t(2), t(3), match="multiplied"))
op("vdot", sample(t(3), t(3)), wrong(t(2, 2), t(3), match="to have 1 dims"))
op("outer", sample(t(3), t(4)), sample(t(0), t(4)), wrong(t(2, 2), t(2), match="to have 1 dims"), dtypes=WITH_INTEGERS)
op("ger", sample(t(3), t(4)), wrong(t(3), t(2, 2), match="to have 1 dims"))
op(
    "inner",
    [sample(t(3), t(3)), sample(t(2, 3), t(4, 5, 3)), sample(t(), t(3))],
    wrong(t(2, 3), t(2), match="last dimension must match"),
)
op(
    "kron",
    [sample(t(2, 3), t(4)), sample(t(2), t(3, 1, 2)), sample(t(), t(2, 2))],
    wrong([1.0], t(2), error=TypeError, match="must be"),
    dtypes=WITH_INTEGERS,
)
op("trace", sample(t(3, 5)), sample(t(3, 3)), wrong(t(2), match="to have 2 dims"))
op(
    "chain_matmul",
    [sample(t(2, 3), t(3, 5), t(5, 2)), sample(t(2, 3), t(3, 5))],
    wrong(t(2, 3), t(2, 3), match="broadcast"),
)
op(
    "linalg.multi_dot",
    [sample([t(2, 3), t(3, 5), t(5, 2)]), sample([t(3), t(3, 5), t(5)]), sample([t(2, 3), t(3, 50), t(50, 4), t(4)])],
    [wrong([t(2, 3)], match="at least 2 tensors"), wrong([t(2, 3), t(2, 3)], match="broadcast")],
)

_ROUNDED = tolerance(
    "the decomposition rounds the product to half precision before it adds, torch's kernels round once", 2e-2, 1e-1
)
_SCALED: tuple[dict[str, float], ...] = ({}, {"beta": 0.5, "alpha": 2.0})


def _add_product(name: str, *shapes: Any, mistakes: tuple) -> None:
    """Register a product that is added to inputs of two shapes, one of them broadcast; with and without factors."""
    small, full, *operands = shapes
    rows = [sample(each, *operands, **factors) for each in (small, full) for factors in _SCALED]
    op(name, rows, mistakes, directives=(_ROUNDED,))


def _add_product_in_place(name: str, *shapes: Any, mistake: ErrorSample) -> None:
    """Register one whose first dim has length 1: into an expanded tensor, which torch refuses, some of them write."""
    rows = [sample(*shapes, **factors) for factors in _SCALED]
    op(f"Tensor.{name}", rows, mistake, symbols=(), directives=(_ROUNDED,))


_add_product(
    "addmm",
    t(4),
    t(2, 4),
    t(2, 3),
    t(3, 4),
    mistakes=(
        wrong(t(3, 3), t(2, 3), t(3, 2), match="do not broadcast"),
        wrong(t(2, 2, 2), t(2, 3), t(3, 2), match="does not expand"),
        wrong(t(2, 2), t(2, 3), t(2, 3), match="cannot be multiplied"),
    ),
)
_add_product("addmv", t(), t(2), t(2, 3), t(3), mistakes=(wrong(t(3), t(2, 3), t(3), match="broadcast"),))
_add_product("addr", t(1), t(2, 3), t(2), t(3), mistakes=(wrong(t(2, 3), t(2, 2), t(3), match="to have 1 dims"),))
_BATCHES = wrong(t(2, 4), t(5, 2, 3), t(5, 4, 4), match="cannot be multiplied")
_add_product("baddbmm", t(2, 4), t(5, 2, 4), t(5, 2, 3), t(5, 3, 4), mistakes=(_BATCHES,))
_add_product("addbmm", t(2, 1), t(2, 4), t(5, 2, 3), t(5, 3, 4), mistakes=(_BATCHES,))

_add_product_in_place("addmm_", t(1, 4), t(1, 3), t(3, 4), mistake=wrong(t(4), t(1, 3), t(3, 4), match="output with"))
_add_product_in_place("addmv_", t(1), t(1, 3), t(3), mistake=wrong(t(1), t(1, 3), t(2), match="multiplied"))
_add_product_in_place("addr_", t(1, 3), t(1), t(3), mistake=wrong(t(1, 3), t(1, 2), t(3), match="to have 1 dims"))
_add_product_in_place("baddbmm_", t(1, 2, 4), t(1, 2, 3), t(1, 3, 4), mistake=_BATCHES)
_add_product_in_place("addbmm_", t(1, 4), t(5, 1, 3), t(5, 3, 4), mistake=_BATCHES)

op(
    "nn.functional.linear",
    sample(t(2, 3), t(4, 3)),
    sample(t(2, 5, 3), t(4, 3), t(4)),
    sample(t(3), t(4, 3), t(4)),
    sample(t(2, 5, 3), t(3)),
    sample(t(3, 2).t(), t(3, 4).t(), bias=t(4)),
    sample(t(0, 3), t(4, 3), t(4)),
    wrong(t(2, 3), t(2, 2), match="cannot be multiplied"),
    wrong(t(2, 3), t(2, 3, dtype=torch.float64), match="same dtype"),
    directives=(_ROUNDED,),
)
op(
    "nn.functional.bilinear",
    sample(t(2, 4), t(2, 5), t(6, 4, 5), t(6)),
    sample(t(2, 3, 4), t(2, 3, 5), t(6, 4, 5)),
    sample(t(4), t(5), t(2, 4, 5)),
    wrong(t(2, 4), t(3, 5), t(6, 4, 5), match="batch dimensions"),
    wrong(t(2, 3), t(2, 3), t(2, 2, 2), match="does not fit"),
)


# contractions

op(
    "tensordot",
    sample(t(2, 3, 4), t(3, 4, 5)),
    sample(t(2, 3), t(4), dims=0),
    sample(t(2, 3, 4), t(4, 5, 2), dims=([0, -1], [2, 0])),
    sample(t(2, 3), t(3, 2), 1),
    wrong(t(2, 3), t(2, 4), match="broadcast"),
    wrong(t(2, 3), t(2, 3), dims=([0], [0, 1]), match="same length"),
    wrong(t(2, 3), t(2, 3), dims=3, match="dims <=", stricter="torch raises an IndexError of its own slicing"),
)
_EQUATIONS = {
    "ij,jk->ik": ((2, 3), (3, 4)),
    "ij,jk": ((2, 3), (3, 4)),
    "bij,bjk->bik": ((5, 2, 3), (5, 3, 4)),
    "ii->i": ((3, 3),),
    "ii": ((3, 3),),
    "iii->i": ((3, 3, 3),),
    "...ij,...jk->...ik": ((5, 2, 3), (3, 4)),
    "i,j->ij": ((2,), (3,)),
    "bhqd,bhkd->bhqk": ((2, 3, 4, 5), (2, 3, 6, 5)),
    "ij,jk,kl->il": ((2, 3), (3, 4), (4, 5)),
    "abc,cd,de,ef->abf": ((2, 3, 4), (4, 5), (5, 6), (6, 2)),
    "ij->ji": ((2, 3),),
    "ij->": ((2, 3),),
    "i...->...": ((2, 3, 4),),
    "ij,kj->i": ((2, 3), (1, 3)),
    "ij,ij->ij": ((2, 1), (2, 3)),
    "iij,jk->ik": ((2, 2, 3), (3, 4)),
    "b...,b...->b...": ((2, 3), (2, 3)),
    "ij,ij->": ((2, 3), (2, 3)),
    "ij,jk->ki": ((0, 3), (3, 4)),
    "ab -> ab": ((1, 3),),
}
op(
    "einsum",
    *[sample(equation, *[t(*shape) for shape in shapes]) for equation, shapes in _EQUATIONS.items()],
    sample("ij,jk", [t(2, 3), t(3, 4)]),
    sample(t(2, 3), [0, 1], t(3, 4), [1, 2], [0, 2]),
    sample(t(5, 2, 3), [..., 1], t(3, 4), [1, 2]),
    wrong("ij,jk", t(2, 3), t(2, 3), match="do not broadcast"),
    wrong("ij", t(2), match="number of subscripts"),
    wrong("i->j", t(2), match="output subscript j"),
    wrong("i,j", t(2), match="operands were provided"),
    wrong("i1", t(2, 2), match="invalid subscript"),
    directives=(
        Directive(
            "tolerance",
            "a GPU adds up the products in another order where the operands are laid out otherwise",
            executors=("torch-prims",),
            devices=("cuda",),
            dtypes=(torch.float32,),
            tolerance=(5e-6, 1e-5),
        ),
    ),
)


# norms

_ORDERS = (2, 1, 3, 0.5, 1.5, math.inf, -math.inf, -1)
_NOT_FLOAT = wrong(t(3, dtype=torch.int64), match="floating point or complex")
op(
    "linalg.vector_norm",
    sample(t(5)),
    sample(t()),
    sample(t(0)),
    sample(t(4, 3).t(), dim=1),
    sample(t(2, 3, 4), 2, (0, 2), True),
    sample(t(3), dtype=torch.float64),
    *[sample(t(3, 4), order, -1) for order in _ORDERS],
    *[sample(t(2, 3, low=0, high=1e-9), order, keepdim=True) for order in (2, 3, 1.5)],
    _NOT_FLOAT,
    wrong(t(3), 2, 3, error=IndexError, match="out of range"),
    wrong(t(0), math.inf, match="no identity"),
    wrong(t(3), dtype=torch.float16, match="without narrowing"),
)
op("linalg.vector_norm.count", sample(t(5), 0), sample(t(), 0), sample(t(3, 4), 0, 1), _NOT_FLOAT)
_MATRIX_ORDERS = ("fro", 1, -1, math.inf, -math.inf, "nuc", 2, -2)
op(
    "linalg.matrix_norm",
    *[sample(t(2, 3, 4), order, keepdim=keepdim) for order in _MATRIX_ORDERS for keepdim in (False, True)],
    *[sample(t(0, 3), order) for order in (1, math.inf, 2, "nuc")],
    [wrong(t(3), match="at least 2 dimensions"), wrong(t(3, 3), 7, match="not supported")],
    dtypes=(torch.float32, torch.float64),
)
op(
    "linalg.norm",
    [sample(t(2, 3)), sample(t(2, 3), 1), sample(t(2, 3), dim=1), sample(t(5), 3)],
    *[sample(t(2, 3, 4), order, (2, 0), True) for order in _MATRIX_ORDERS],
    wrong(t(2, 3, 4), 2, match="1D or 2D"),
    wrong(t(5), "fro", match="at least 2 dimensions"),
    wrong(t(2, 3), "fro", dim=0, match="must be a 2-tuple"),
    _NOT_FLOAT,
    dtypes=(torch.float32, torch.float64),
)
_P_NORMS = (
    sample(t(3, 4)),
    sample(t()),
    sample(t(3, 4), 1),
    sample(t(3, 4), 2, -1, True),
    sample(t(3, 4), math.inf, (0, 1)),
    sample(t(3, 4), "fro", (0, 1)),
)
_NUCLEAR = (sample(t(3, 4), "nuc"), sample(t(2, 3, 4), "nuc", (2, 0), True))
op("norm", _P_NORMS, wrong(t(3), 2, 3, error=IndexError, match="out of range"))
op("Tensor.norm", _P_NORMS, wrong(t(3), 2, 3, error=IndexError, match="out of range"), op=Tensor.norm)
_TWO_DIMS = wrong(t(3), "nuc", match="two dims|dim")
op("norm.nuc", _NUCLEAR, _TWO_DIMS, dtypes=(torch.float32, torch.float64))
op("Tensor.norm.nuc", _NUCLEAR, _TWO_DIMS, dtypes=(torch.float32, torch.float64), op=Tensor.norm)


# distances

op(
    "cross",
    [sample(t(2, 3, 4), t(2, 3, 4)), sample(t(3, 3), t(3, 3), -1), sample(t(1, 3), t(2, 3))],
    [wrong(t(2, 2), t(2, 2), match="no dimension of size 3"), wrong(t(3), t(3, 3), match="same number of dim")],
)
op(
    "linalg.cross",
    [sample(t(2, 3), t(1, 3)), sample(t(3, 4), t(3, 4), dim=0)],
    wrong(t(2, 2), t(2, 2), match="must have length 3"),
)
op(
    "cosine_similarity",
    sample(t(3, 4), t(3, 4)),
    sample(t(3, 4, 2), t(4, 2), -1),
    sample(t(5), t(5), dim=0),
    sample(t(3, 4), t(3, 4), 1, 9.0),
    [wrong(t(3, 4), t(3, 5), match="do not broadcast"), wrong(t(3, 4), t(3, 4), 3, error=IndexError, match="range")],
    op=F.cosine_similarity,
)
op(
    "pairwise_distance",
    [sample(t(3, 4), t(3, 4)), sample(t(3, 4), t(4), 1.0, keepdim=True), sample(t(4), t(4), 3.0)],
    wrong(t(3, 4), t(3, 5), match="do not broadcast"),
    op=F.pairwise_distance,
)
op(
    "cdist",
    sample(t(5, 3), t(4, 3)),
    sample(t(2, 5, 3), t(4, 3), 1.0),
    sample(t(2, 5, 3), t(2, 4, 3), p=3.0),
    sample(t(5, 3), t(4, 3), math.inf),
    sample(t(5, 3), t(4, 3), compute_mode="donot_use_mm_for_euclid_dist"),
    wrong(t(5, 3), t(4, 2), match="number of columns"),
    wrong(t(3), t(4, 3), match="at least 2D"),
    wrong(t(5, 3), t(4, 3), -1.0, match="non-negative"),
    dtypes=(torch.float32, torch.float64),
)


# factorizations

op(
    "linalg.ldl_factor_ex",
    sample(t(3, 3)),
    sample(t(2, 4, 4)),
    sample(t(0, 0)),
    sample(t(3, 3).t()),
    sample(t(3, 3), hermitian=True, check_errors=False),
    [wrong(t(3), match="2 dimensions"), wrong(t(2, 3), match="square")],
    dtypes=(torch.float32, torch.float64, torch.complex64),
    gradient=False,
)
