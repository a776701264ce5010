"""Gradients of operands of products are computed in the layout of the tensors that the operands are views of."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import forge
from forge import clang, prims
from forge.api.functional import Direct
from forge.executors import claim, resolve_executors
from forge.ir import BoundSymbol, TensorProxy, Trace, recording
from forge.ir.pytree import tensors
from forge.transforms.grad import backward, differentiate
from forge.transforms.makers import Makers
from forge.transforms.transposed_products import transpose_products

PRODUCTS = {prims.matmul, prims.grouped_mm}


def offsets(device: str) -> torch.Tensor:
    return torch.tensor([8, 8, 24], dtype=torch.int32, device=device)


Shape = tuple[int, ...]
# products of x and a previously transposed weight, with their shapes
CASES: dict[str, tuple[Callable, Shape, Shape]] = {
    "mm": (lambda x, w: torch.mm(x, w.t()), (24, 16), (32, 16)),
    "mm, left": (lambda x, w: torch.mm(w.t(), x), (24, 16), (24, 32)),
    "matmul of three dims": (lambda x, w: x @ w.t(), (2, 24, 16), (32, 16)),
    "vector": (lambda x, w: x @ w.t(), (16,), (32, 16)),
    "linear": (lambda x, w: F.linear(x, w), (2, 24, 16), (32, 16)),
    "linear, transposed": (lambda x, w: F.linear(x, w.t()), (2, 24, 16), (16, 32)),
    "addmm": (lambda x, w: torch.addmm(x.sum(), x, w.t(), alpha=2), (24, 16), (32, 16)),
    "two uses": (lambda x, w: x @ w.t() + (2 * x) @ w.t(), (24, 16), (32, 16)),
    "one view of two uses": (lambda x, w: (lambda view: x @ view + (2 * x) @ view)(w.t()), (24, 16), (32, 16)),
    "grouped_mm": (lambda x, w: F.grouped_mm(x, w.mT, offs=offsets(x.device)), (24, 16), (3, 32, 16)),
    "grouped_mm of columns": (lambda x, w: F.grouped_mm(w.mT, x, offs=offsets(x.device)), (32, 24), (3, 32, 16)),
    "grouped_mm of contractions": (lambda x, w: F.grouped_mm(w.t(), x, offs=offsets(x.device)), (24, 32), (24, 16)),
    "grouped_mm of a batch": (lambda x, w: F.grouped_mm(x, w.mT), (3, 24, 16), (3, 32, 16)),
}
# products by which eager or forge computes those of batches
BATCHES: dict[str, tuple[Callable, Shape, Shape]] = {
    "bmm": (lambda x, w: torch.bmm(x, w.mT), (3, 24, 16), (3, 32, 16)),
    "bmm, left": (lambda x, w: torch.bmm(w.mT, x), (3, 24, 16), (3, 24, 32)),
    "matmul": (lambda x, w: x @ w.mT, (2, 3, 24, 16), (2, 3, 32, 16)),
    "broadcast": (lambda x, w: x @ w.mT, (2, 3, 24, 16), (3, 32, 16)),
    "baddbmm": (lambda x, w: torch.baddbmm(x.sum(), x, w.mT), (3, 24, 16), (3, 32, 16)),
    "einsum": (lambda x, w: torch.einsum("bsd,ed->bse", x, w), (2, 24, 16), (32, 16)),
    "einsum of heads": (lambda x, w: torch.einsum("bsd,hed->bhse", x, w), (2, 24, 16), (4, 8, 16)),
    "tensordot": (lambda x, w: torch.tensordot(x, w, dims=([2], [1])), (2, 24, 16), (32, 16)),
    "einsum of batches": (lambda x, w: torch.einsum("ecd,efd->ecf", x, w), (3, 24, 16), (3, 32, 16)),
}


def gradient_trace(function: Callable, *args: torch.Tensor) -> Trace:
    """Return the backward of a function with respect to its tensors."""
    trace = forge.trace(function, *args)
    joint = differentiate(
        trace.derive("", trace.bound_symbols, output=tuple(tensors(trace.output))), [x.name for x in trace.inputs]
    )
    (out,) = joint.forward.output
    return backward(joint, {out.name: TensorProxy("seed", out.shape, out.dtype, out.device)}, trace.inputs)


def makers_of(trace: Trace, name: str) -> set[BoundSymbol]:
    """Return the prims between products and a value, which make the value and are not products themselves."""
    maker = Makers(trace).prim(name)
    if maker is None or maker.symbol in PRODUCTS:
        return set()
    return {maker}.union(*[makers_of(trace, each) for each in maker.inputs])


def transposes(function: Callable, x: torch.Tensor, w: torch.Tensor) -> bool:
    """Return whether w's gradient is transposed after it is computed."""
    trace = gradient_trace(function, x, w)
    return prims.permute in {bound.symbol for bound in makers_of(trace, trace.output[1].name)}


def leaf(shape: Shape, device: str = "meta", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device=device, requires_grad=True)


@pytest.mark.parametrize("case", CASES)
def test_a_product_is_computed_transposed_where_its_operand_was(case: str) -> None:
    function, x, w = CASES[case]
    for device in ("cpu", "meta"):
        assert not transposes(function, leaf(x, device), leaf(w, device))


@pytest.mark.parametrize("case", BATCHES)
def test_a_product_of_batches_is_computed_transposed_but_on_a_cpu(case: str) -> None:
    """On a CPU it is rounded as in eager."""
    function, x, w = BATCHES[case]
    assert not transposes(function, leaf(x), leaf(w))
    assert transposes(function, leaf(x, "cpu"), leaf(w, "cpu"))


def test_a_conversion_after_the_transposition_comes_after_the_product() -> None:
    x, w = leaf((24, 16)), leaf((32, 16))
    assert not transposes(lambda x, w: x.bfloat16() @ w.t().bfloat16(), x, w)


@pytest.mark.parametrize("case", ["mm", "linear", "addmm", "grouped_mm"])
def test_the_gradient_of_a_weight_in_columns_lies_in_columns(case: str) -> None:
    """A transposed column-major weight is a contiguous operand: its gradient is a contiguous product, transposed."""
    function, x, w = CASES[case]
    in_columns = torch.randn((*w[:-2], w[-1], w[-2]), device="meta").mT.requires_grad_()
    assert transposes(function, leaf(x), in_columns)


def test_a_product_that_is_also_read_as_it_is_stays() -> None:
    trace = Trace()
    a, b = (trace.add_input(TensorProxy(name, (4, 4), torch.float32, torch.device("cpu"))) for name in "ab")
    with recording(trace, clang.language):
        product = clang.matmul(a, b)
        trace.output = (prims.permute(product, (1, 0)), product)
    assert transpose_products(trace, trace.inputs) is trace
    trace.output = trace.output[:1]
    found = transpose_products(trace, trace.inputs[:1])
    assert found.bound_symbols[-1].symbol is clang.matmul
    assert found.bound_symbols[-1].output.name == trace.output[0].name


def test_a_transposition_that_is_a_product_now_is_no_base_of_another_operand() -> None:
    """In (a b)^T (c d)^T, each read once, both are computed as products, which the last product reads."""
    trace = Trace()
    inputs = [trace.add_input(TensorProxy(name, (4, 4), torch.float64, torch.device("cpu"))) for name in "abcd"]
    with recording(trace, clang.language):
        left, right = [clang.matmul(x, y).mT for x, y in (inputs[:2], inputs[2:])]
        trace.output = (clang.matmul(left, right).mT,)
    found = transpose_products(trace, inputs[:1])
    values = [torch.randn(4, 4, dtype=torch.float64) for _ in inputs]
    a, b, c, d = values
    (actual,) = claim(found, resolve_executors(["torch"]))[0].python_callable()(*values)
    torch.testing.assert_close(actual, ((a @ b).mT @ (c @ d).mT).mT)


# eager broadcasts to a batch of another shape, and computes tensordot as a matrix product
ROUNDED = ["batches: broadcast", "batches: tensordot"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_columns", [False, True])
@pytest.mark.parametrize("case", [*CASES, *(f"batches: {name}" for name in BATCHES)])
def test_gradients_are_eagers(case: str, in_columns: bool, dtype: torch.dtype) -> None:
    """They are bitwise equal, at sizes for which a BLAS rounds differently with swapped operands."""
    function, x, w = BATCHES[case.removeprefix("batches: ")] if case.startswith("batches") else CASES[case]
    if "grouped" in case and dtype == torch.float64:
        pytest.skip("torch has no grouped product of float64")
    torch.manual_seed(0)
    inputs = [leaf(x, "cpu", dtype), leaf(w, "cpu", dtype)]
    if in_columns:
        inputs[1] = inputs[1].detach().mT.contiguous().mT.requires_grad_()
    out = function(*inputs)
    g = torch.randn_like(out)
    expected = torch.autograd.grad(out, inputs, g)
    found = torch.autograd.grad(Direct(function, ["torch"])(*inputs), inputs, g)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **({} if case in ROUNDED else {"rtol": 0, "atol": 0}))


def test_it_is_differentiable_again() -> None:
    x, w = leaf((6, 4), "cpu", torch.float64), leaf((5, 4), "cpu", torch.float64)
    assert torch.autograd.gradgradcheck(Direct(lambda x, w: (x @ w.t()).sin(), ["torch"]), (x, w))
