"""Programs that the fuzzer found, and others of their class, in the default configuration against eager."""

import re
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

import forge


def written(shape: tuple[int, ...], key: object, value: Callable) -> Callable:
    """Return a function that writes value(row) to zeros at a key."""

    def write(row: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(shape)
        out[key] = value(row)
        return out

    return write


def through(view: Callable, value: Callable) -> Callable:
    """Return a function that copies value(row) into a view of zeros."""

    def write(row: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(2, 3)
        view(out).copy_(value(row))
        return out

    return write


# each fills a whole tensor: the result is not a view of the written value, and has no overlapping elements
WHOLE_WRITES = {
    "copy_": lambda row: torch.ones(2, 3).copy_(row),
    "copy_ of one dtype to another": lambda row: torch.ones(2, 3, dtype=torch.bfloat16).copy_(row),
    "copy_ through a slice": through(lambda out: out[:], lambda row: row),
    "copy_ through a flat view": through(lambda out: out.view(-1), lambda row: row[0]),
    "slice": written((2, 3), slice(None), lambda row: row),
    "ellipsis": written((2, 3), Ellipsis, lambda row: row),
    "none": written((2, 3), None, lambda row: row),
    "the only row": written((1, 3), 0, lambda row: row),
    "column": written((3, 2), slice(None), lambda row: row[:, None]),
    "element": written((2, 3), slice(None), lambda row: row[0]),
    "number": written((2, 3), slice(None), lambda row: 2),
    "fill_": lambda row: torch.zeros(2, 3).fill_(row[0]),
}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", WHOLE_WRITES)
def test_what_is_written_to_all_of_a_tensor_is_copied(name: str, grad: bool) -> None:
    row = torch.randn(3, requires_grad=grad)
    expected, actual = WHOLE_WRITES[name](row), forge.jit(WHOLE_WRITES[name])(row)
    assert torch.equal(actual, expected) and actual.stride() == expected.stride()
    assert actual.untyped_storage().data_ptr() != row.untyped_storage().data_ptr()
    if expected.requires_grad:
        wanted, found = (torch.autograd.grad(each.float().square().sum(), row)[0] for each in (expected, actual))
        torch.testing.assert_close(found, wanted)
    before = row.detach().clone()
    actual.detach().add_(1)
    assert torch.equal(row, before)


@pytest.mark.parametrize(
    "repeated",
    [
        lambda x: x.sum().repeat(2, 2),
        lambda x: x[:1].repeat(2, 1),
        lambda x: x.sum().repeat_interleave(3),
        lambda x: torch.tile(x[:1], (2, 1)),
    ],
)
def test_copies_of_a_tensor_are_no_views_of_it_when_prims_run_them(repeated: Callable) -> None:
    x = torch.randn(1, 3)
    expected, actual = repeated(x), forge.jit(repeated, executors=["torch-prims"])(x)
    assert torch.equal(actual, expected) and actual.stride() == expected.stride()


FIRST = torch.tensor([0, 1])
COLUMN = torch.zeros(2, 1, dtype=torch.long)
# in place, each keeps the layout of the changed tensor; its function returns a contiguous tensor
IN_PLACE = {
    "masked_fill_": lambda y: y.masked_fill_(y > 0, 1.0),
    "masked_scatter_": lambda y: y.masked_scatter_(y > 0, torch.ones(2, 3)),
    "index_add_": lambda y: y.index_add_(0, FIRST, torch.ones(2, 3)),
    "index_copy_": lambda y: y.index_copy_(0, FIRST, torch.ones(2, 3)),
    "scatter_": lambda y: y.scatter_(1, COLUMN, 2.0),
    "scatter_add_": lambda y: y.scatter_add_(1, COLUMN, torch.ones(2, 1)),
    "scatter_reduce_": lambda y: y.scatter_reduce_(1, COLUMN, torch.ones(2, 1), "amax"),
    "tril_": lambda y: y.tril_(),
    "cumsum_": lambda y: y.cumsum_(0),
    "copy_": lambda y: y.copy_(torch.ones(2, 3)),
    "addmm_": lambda y: y.addmm_(torch.ones(2, 4), torch.ones(4, 3)),
}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_changed_in_place_keeps_its_layout(name: str, grad: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return IN_PLACE[name](x.t() * 2)

    x = torch.randn(3, 2, requires_grad=grad)
    expected, actual = function(x), forge.jit(function, strict=True)(x)
    assert actual.stride() == expected.stride() == (1, 2)
    torch.testing.assert_close(actual, expected)
    if expected.requires_grad:
        wanted, found = (torch.autograd.grad(each.square().sum(), x)[0] for each in (expected, actual))
        torch.testing.assert_close(found, wanted)


# results in row-major order, whatever the strides of x
IN_ROW_MAJOR = {
    "copy_ to a new tensor": lambda x: torch.empty(2, 3).copy_(x),
    "copy_ to a result": lambda x: torch.atan2(torch.ones(2, 3), torch.ones(3)).copy_(x),
    "copy_ of another dtype": lambda x: torch.empty(2, 3, dtype=torch.float64).copy_(x),
    "logsigmoid": torch.nn.functional.logsigmoid,
    "a value of logsigmoid": lambda x: torch.nn.functional.logsigmoid(x) * 2,
    "view_copy": lambda x: torch.view_copy(x, (-1, 3)) + 1,
    "isin": lambda x: torch.isin(x + 1, torch.ones(2)) * x.detach().clone(memory_format=torch.contiguous_format),
}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", IN_ROW_MAJOR)
def test_results_in_row_major_order_are_so_whatever_is_given(name: str, grad: bool) -> None:
    function = IN_ROW_MAJOR[name]
    x = torch.randn(3, 2).t().requires_grad_(grad)
    expected, actual = function(x), forge.jit(function, strict=True)(x)
    assert actual.stride() == expected.stride() == (3, 1)
    torch.testing.assert_close(actual, expected)


TURNED = torch.arange(6.0).view(3, 2)
# the layout of x, of a view of it or of a result after a write to one of them; x lies as the number says
IN_ORDER = {
    "an input": (lambda x: (x.copy_(TURNED.t().contiguous()), x + 1)[1], (1, 2)),
    "an input by a mask": (lambda x: (x.masked_fill_(x > 0, 1.0), x + 1)[1], (1, 2)),
    "a base": (lambda x: (x.t().copy_(TURNED), x + 1)[1], (3, 1)),
    "a base of a sum": (lambda x: (x.t().cumsum_(0), x + 1)[1], (3, 1)),
    "a view": (lambda x: (v := x.t(), v.cumsum_(0), v + 1)[2], (3, 1)),
    "a result": (lambda x: (y := x * 2, y.t().cumsum_(0), y + 1)[2], (3, 1)),
    "a base by an item": (lambda x: (y := x * 2, y.t().__setitem__(slice(None), TURNED), y + 1)[2], (3, 1)),
    "a view of more dims": (
        lambda x: (y := x * 2, y.unsqueeze(0).baddbmm_(torch.ones(1, 2, 4), torch.ones(1, 4, 3)), y + 1)[2],
        (1, 2),
    ),
}


@pytest.mark.parametrize("executors", [["hub", "inductor", "torch"], ["torch"]], ids=["fused", "unfused"])
@pytest.mark.parametrize("name", IN_ORDER)
def test_what_shows_memory_that_was_written_to_keeps_its_layout(name: str, executors: list[str]) -> None:
    function, strides = IN_ORDER[name]
    found = []
    for call in (function, forge.jit(function, executors=executors)):
        x = torch.empty_strided((2, 3), strides).copy_(torch.arange(6.0).view(2, 3))
        found.append((call(x), x))
    for expected, actual in zip(*found, strict=True):
        assert actual.stride() == expected.stride()
        assert torch.equal(actual, expected)


# of transposed x of changing length, with tensors expanded to it
EXPANDED = {
    "a row and x": lambda x: x.sum(0).expand(x.shape) * x,
    "x and a row": lambda x: x * x.sum(0).expand(x.shape),
    "a broadcast row": lambda x: x.sum(0) + x,
    "a function of both": lambda x: (x.sum(0).expand(x.shape) * x).exp() + 1,
    "a column": lambda x: x.sum(1, keepdim=True).expand(x.shape) / x.exp(),
    "a choice": lambda x: torch.where(x > 0, x.sum(0).expand(x.shape), x),
    "a variance's gradient": lambda x: x.var(0),
    "a mean's and another gradient": lambda x: x.mean(0) + x.sum(0) + x.exp(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EXPANDED)
def test_what_is_expanded_takes_the_layout_of_the_other_operand_at_every_length(name: str, dtype: torch.dtype) -> None:
    function = EXPANDED[name]
    jitted = forge.jit(function)
    for length in (2, 5, 7):
        flows = []
        for call in (function, jitted):
            torch.manual_seed(0)
            x = torch.randn(3, length).to(dtype).t().requires_grad_()
            result = call(x)
            flows.append((result, *torch.autograd.grad(result.float().cos().sum(), x)))
        for expected, actual in zip(*flows, strict=True):
            assert actual.stride() == expected.stride()
            torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


NORMS = {
    "batch norm": lambda x: torch.nn.functional.batch_norm(x, None, None, training=True),
    "batch norm of statistics": lambda x: torch.nn.functional.batch_norm(x, x[0, :, 0].detach() * 0, torch.ones(3)),
    "batch norm of a product": lambda x: torch.nn.functional.batch_norm(x * 2, None, None, training=True),
    "rms norm": lambda x: torch.nn.functional.rms_norm(x, (4,)),
    "rms norm of what was changed": lambda x: torch.nn.functional.rms_norm((x * 1).mul_(2), (4,), torch.ones(4)),
}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", NORMS)
def test_norms_lay_out_their_results_as_torchs_kernels_do(name: str, grad: bool) -> None:
    jitted = forge.jit(NORMS[name], strict=True)
    for batch in (2, 3, 5):
        x = torch.randn(4, batch, 3).permute(1, 2, 0).requires_grad_(grad)
        expected, actual = NORMS[name](x), jitted(x)
        assert actual.stride() == expected.stride()
        torch.testing.assert_close(actual, expected)


def history(view: Callable) -> Callable:
    """Return a function that computes with a view made under no_grad."""

    def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            shown = view(x, y)
        return shown + shown

    return compute


VIEWS_OF_TWO = {
    "meshgrid": lambda x, y: torch.meshgrid(x, y, indexing="ij"),
    "atleast_2d": torch.atleast_2d,
    "broadcast_tensors": torch.broadcast_tensors,
}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("needed", [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("name", VIEWS_OF_TWO)
def test_a_view_under_no_grad_has_the_history_of_its_own_base(name: str, needed: tuple[bool, bool], place: int) -> None:
    function = history(lambda x, y: VIEWS_OF_TWO[name](x, y)[place])
    x, y = (torch.randn(3, requires_grad=each) for each in needed)
    assert forge.jit(function)(x, y).requires_grad == function(x, y).requires_grad


def filled(x: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.celu(x)
    with torch.no_grad():
        y.index_fill_(0, torch.tensor([0]), -1)
    return y.neg_()


def test_what_follows_strides_of_the_kernel_is_no_view_of_known_strides() -> None:
    jitted = forge.jit(filled, check="regions")  # the strides of celu's result are random then
    x = torch.randn(4, 8)[..., ::2]
    for _ in range(20):
        assert torch.equal(jitted(x), filled(x))


def test_an_argument_without_gradient_that_a_call_returns_is_the_argument() -> None:
    x, y = torch.ones(1, requires_grad=True), torch.ones(2, 3)
    results = forge.jit(lambda x, y: torch.broadcast_tensors(x, y))(x, y)
    assert results[0].requires_grad and results[1] is y


aten = torch.ops.aten
# of a transposed x and a y in row-major order
TWO_ORDERS = {
    "binary_cross_entropy": lambda x, y: torch.nn.functional.binary_cross_entropy(x, y, reduction="none"),
    "binary_cross_entropy of the other": lambda x, y: torch.nn.functional.binary_cross_entropy(y, x, reduction="none"),
    "hardswish_backward": lambda x, y: aten.hardswish_backward(y, x),
    "hardtanh_backward": lambda x, y: aten.hardtanh_backward(y, x, -1, 1),
    "softplus_backward": lambda x, y: aten.softplus_backward(y, x, 1, 20),
    "_log_softmax_backward_data": lambda x, y: aten._log_softmax_backward_data(x, x, 1, torch.float32),
}


@pytest.mark.parametrize("name", TWO_ORDERS)
def test_operators_of_two_orders_lay_out_their_results_as_torchs_kernels_do(name: str) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (TWO_ORDERS[name](x, y) * 2).sin()

    x, y = torch.rand(4, 3).t(), torch.rand(3, 4)
    expected, actual = function(x, y), forge.jit(function, strict=True)(x, y)
    assert actual.stride() == expected.stride()
    torch.testing.assert_close(actual, expected)


def test_one_hot_vectors_lie_in_row_major_order() -> None:
    numbers = torch.arange(6).view(3, 2).t()
    expected, actual = (
        call(numbers, 6) for call in (torch.nn.functional.one_hot, forge.jit(torch.nn.functional.one_hot))
    )
    assert torch.equal(actual, expected) and actual.stride() == expected.stride()


# of x, which has one column: a view beside x itself, both by one call
BESIDE_THE_WHOLE = {
    "tensor_split": lambda x: torch.tensor_split(x, 3, dim=-1)[1],
    "hsplit": lambda x: torch.hsplit(x, [1, 1])[2],
    "split_with_sizes": lambda x: x.split([1, 0], -1)[1],
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, x.new_ones(2, 3, 1))[0],
    "atleast_3d": lambda x: torch.atleast_3d(x, x[None])[0],
}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", BESIDE_THE_WHOLE)
def test_a_view_beside_the_whole_value_reads_that_value(name: str, grad: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return BESIDE_THE_WHOLE[name](x.cumsum(0))

    x = torch.randn(3, 1, requires_grad=grad)
    expected, actual = function(x), forge.jit(function, strict=True)(x)
    assert torch.equal(actual, expected) and actual.shape == expected.shape and actual.stride() == expected.stride()


# of a leaf whose memory has gaps or is transposed: the gradient reads the value that was written, and that is returned
AFTER_A_WRITE = {
    "silu": torch.nn.functional.silu,
    "sigmoid beside it": lambda x: (x.sigmoid() * x, x),
    "softmax": lambda x: x.softmax(-1) * x,
    "rms_norm": lambda x: torch.nn.functional.rms_norm(x, (3,)).exp(),
}
WITH_GAPS = {
    "gaps": lambda: torch.randn(2, 6)[..., ::2].detach(),
    "transposed": lambda: torch.randn(3, 2).t().detach(),
    "of an image": lambda: torch.randn(2, 4, 5, 3).permute(0, 3, 1, 2)[:, :, 1:3, :3].detach(),
}


@pytest.mark.parametrize("memory", WITH_GAPS)
@pytest.mark.parametrize("name", AFTER_A_WRITE)
def test_what_was_written_is_read_by_the_backward_in_the_strides_that_it_has(name: str, memory: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x.mul_(2)
        found = AFTER_A_WRITE[name](x)
        return found[0] + found[1] if isinstance(found, tuple) else found + found

    gradients = []
    for call in (function, forge.jit(function)):
        torch.manual_seed(0)
        x = WITH_GAPS[memory]().requires_grad_()
        call(x).cos().sum().backward()
        gradients += [x.grad, x.detach()]
    for actual, expected in zip(gradients[2:], gradients[:2], strict=True):
        torch.testing.assert_close(actual, expected)
        assert actual.stride() == expected.stride()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32])
@pytest.mark.parametrize("op", ["amax", "amin", "sum", "prod", "any", "all"])
def test_a_reduction_over_the_dim_that_a_number_does_not_have_is_a_tensor_of_its_own(
    op: str, dtype: torch.dtype
) -> None:
    x = torch.ones((), dtype=dtype)
    reduced = forge.jit(lambda x: getattr(x, op)(0))(x)
    assert reduced.data_ptr() != x.data_ptr()
    assert torch.equal(reduced, getattr(x, op)(0))


@pytest.mark.parametrize("shape", [(1, 6), (6, 1), (2, 1, 3)])
def test_what_as_strided_shows_of_a_view_of_a_row_shares_its_memory(shape: tuple[int, ...]) -> None:
    """Strides of dims of length 1 differ between eager's view and the program's."""

    def shown(x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(x.shape.index(max(shape)), (-1, max(shape)))
        return x.as_strided((2,), (1,))

    x = torch.randn(tuple(reversed(shape))).permute(*reversed(range(len(shape)))).detach().requires_grad_()
    expected, actual = shown(x), forge.jit(shown)(x)
    assert torch.equal(actual, expected) and actual.data_ptr() == expected.data_ptr() == x.data_ptr()


F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
# functions whose kernels return other dtypes than on fake tensors
MIXED = {
    "huber_loss": lambda x, y: F.huber_loss(x, y, reduction="none"),
    "huber_loss, mean": F.huber_loss,
    "soft_margin_loss": lambda x, y: F.soft_margin_loss(x, y, reduction="none"),
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), x.sigmoid(), y, reduction="none"),
    "block_diag": lambda x, y: torch.block_diag(x, y[0, 0]),
    "block_diag, empty": lambda x, y: torch.block_diag(x, y[:0]),
    "threshold_backward": lambda x, y: torch.ops.aten.threshold_backward(x, y, 0.5),
}


@pytest.mark.parametrize("dtypes", [(F32, F64), (BF16, F32), (F32, BF16)], ids=str)
@pytest.mark.parametrize("name", MIXED)
def test_what_is_computed_of_two_dtypes_has_the_dtype_that_the_kernel_gives(name: str, dtypes: tuple) -> None:
    x, y = (torch.rand(2, 3).to(dtype) for dtype in dtypes)

    def doubled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result = MIXED[name](x, y)
        return result * y.sum().to(result.dtype)

    try:
        expected = doubled(x, y)
    except RuntimeError as refused:  # binary_cross_entropy takes no weights of some other dtypes
        with pytest.raises(RuntimeError, match=re.escape(str(refused)[:20])):
            forge.jit(doubled)(x, y)
        return
    torch.testing.assert_close(forge.jit(doubled)(x, y), expected, rtol=2**-6, atol=1e-3)


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_a_view_of_all_of_a_vector_is_another_tensor(count: int, grad: bool) -> None:
    """A view without elements has its own memory for tensors without values."""

    def shown(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = (x + 1).reshape(-1)
        return y.reshape(y.numel()), y

    first, second = forge.jit(shown)(torch.ones(count, requires_grad=grad))
    assert first is not second and first.data_ptr() == second.data_ptr()


@pytest.mark.parametrize("p", [1, 2, 3])
def test_the_gradient_of_slices_scaled_to_a_norm_is_rounded_as_eagers(p: int) -> None:
    """For slices of one element, the result is rounding error only."""
    x = torch.randn(6, 1, generator=torch.manual_seed(0)) + 4
    found = []
    for function in (torch.renorm, forge.jit(torch.renorm)):
        leaf = x.clone().requires_grad_()
        function(leaf, p, 0, 1.0).sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)


OVERLAPPING = {
    "unfold": lambda x: x.unfold(1, 3, 1),
    "unfold, some places twice": lambda x: x.unfold(1, 3, 2),
    "expand": lambda x: x.expand(3, 2, 5),
    "as_strided": lambda x: x.as_strided((3, 3), (2, 1)),
    "as_strided of unfold": lambda x: x.unfold(1, 3, 1).as_strided((2, 2, 2), (3, 1, 1)),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_elements_that_are_one_in_memory_share_the_gradient_of_as_strided(name: str) -> None:
    def cubes(x: torch.Tensor) -> torch.Tensor:
        return OVERLAPPING[name](x).as_strided((3, 2), (2, 1)) ** 3

    x = torch.randn(2, 5, dtype=torch.double, generator=torch.manual_seed(0)).requires_grad_()
    weights = torch.arange(1.0, 7).view(3, 2)
    gradients = []
    for function in (cubes, forge.jit(cubes)):
        (first,) = torch.autograd.grad((function(x) * weights).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((first * torch.arange(10.0).view(2, 5)).sum(), x)
        gradients.append((first, second))
    torch.testing.assert_close(*gradients)


def test_frexp_of_a_tensor_of_one_value() -> None:
    """Inductor folds it to a number, although it is a pair."""

    def powers(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ones = torch.ones((x + x + x).shape)
        return ones + ones, torch.frexp(ones)[0], ones

    x = torch.rand(2, 3)
    torch.testing.assert_close(forge.jit(powers, check="regions")(x), powers(x))
