"""Artifacts of regions: dtypes and sizes."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
from forge import clang, prims
from forge.executors.inductorex import aten_graph, compile_wait, lower, operators
from forge.ir import Symbol, TensorProxy, Trace, recording
from forge.torch_internals.versions import TORCH

EXECUTORS = ["inductor", "torch"]


def curve(x: torch.Tensor) -> torch.Tensor:
    return (x * 2 + 1).sigmoid() * x


def row_curve(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax((x * w).relu() + w, -1).sum(-1) * 3


def fused(jitted: Callable) -> int:
    """Return the number of regions in the forward."""
    return sum(bound.symbol.id.startswith("inductor.") for bound in forge.last_traces(jitted)[-1].bound_symbols)


def assert_as_eager(jitted: Callable, function: Callable, *inputs: torch.Tensor) -> None:
    """Compare the result and the gradients with eager's."""
    ours = [x.detach().clone().requires_grad_() for x in inputs]
    theirs = [x.detach().clone().requires_grad_() for x in inputs]
    found, expected = jitted(*ours), function(*theirs)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, theirs, upstream)
    torch.testing.assert_close(torch.autograd.grad(found, ours, upstream), gradients)


@pytest.mark.slow
def test_float64_never_meets_an_artifact_made_for_float32() -> None:
    jitted = forge.jit(curve, executors=EXECUTORS)
    for dtype in (torch.float32, torch.float64, torch.float32):
        x = torch.randn(4, 5, dtype=dtype)
        result = jitted(x)
        assert result.dtype == dtype
        torch.testing.assert_close(result, curve(x), rtol=1e-12 if dtype == torch.float64 else 1e-5, atol=1e-6)
        assert fused(jitted) == 1


@pytest.mark.slow
def test_another_layout_never_meets_an_artifact_made_for_contiguous_inputs() -> None:
    jitted = forge.jit(curve, executors=EXECUTORS)
    x = torch.randn(4, 4)
    for given in (x, x.t(), x[::2]):
        result = jitted(given)
        torch.testing.assert_close(result, curve(given))
        assert result.stride() == curve(given).stride()


def test_one_artifact_is_right_at_several_sizes() -> None:
    jitted = forge.jit(row_curve, executors=EXECUTORS, dynamic=True)
    for rows, columns in ((4, 6), (7, 13), (1, 5)):
        assert_as_eager(jitted, row_curve, torch.randn(rows, columns), torch.randn(columns))
    assert fused(jitted) == 1


def test_a_symbolic_backward_with_products_of_lengths_is_right() -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        flat = (x * 2).reshape(-1, x.shape[-1]).tanh() + 1
        return (flat @ flat.t()).softmax(-1).mean() * x.shape[0]

    jitted = forge.jit(attend, executors=EXECUTORS, dynamic=True)
    for shape in ((2, 3, 4), (3, 5, 7)):
        assert_as_eager(jitted, attend, torch.randn(shape))
    assert fused(jitted) == 2


WITHOUT_DIMS = {
    "an element": lambda x, i, j: (x * 2)[i, j].exp() + 1,
    "a row": lambda x, i, j: (x[i] * 2 + 1).exp() * x.sum(),
    "a written element": lambda x, i, j: ((x * 2).index_put((i, j), x[j, i]) + 1).exp() * 2,
    "a position": lambda x, i, j: (x.select(0, 1)[i] + 1).exp() * 2,
}


@pytest.mark.parametrize("name", WITHOUT_DIMS)
@pytest.mark.one_in(2)
def test_regions_beside_an_index_that_is_a_tensor_without_dims(name: str) -> None:
    """Its value is a symbol when layouts are computed, which is not a symbol of the regions."""
    function = WITHOUT_DIMS[name]
    jitted = forge.jit(function, executors=EXECUTORS)
    x, i, j = torch.randn(4, 5, 3), torch.tensor(1), torch.tensor(2)
    torch.testing.assert_close(jitted(x, i, j), function(x, i, j))
    assert fused(jitted) > 0


POWERS = {
    "a square": lambda x: (x * 2).exp() / x.numel() ** 2,
    "a mean over two dims": lambda x: (x @ x.mT).softmax(-1).mean((0, 1)) * x.shape[0],
    "a variance of products": lambda x: (x * 2).reshape(-1, x.shape[-1]).var(0) * (x.shape[0] ** 3),
    "the larger length": lambda x: (x + 1).exp() * max(x.shape[0], x.shape[1]) ** 2,
    "a rounded half": lambda x: (x + 1).exp() * (x.shape[0] // 2 + x.shape[1] % 3) ** 2,
}


@pytest.mark.parametrize("name", POWERS)
@pytest.mark.one_in(4)
def test_expressions_of_lengths_are_computed_in_regions(name: str) -> None:
    function = POWERS[name]
    jitted = forge.jit(function, executors=EXECUTORS, dynamic=True)
    for shape in ((4, 3, 5), (6, 7, 2)):
        assert_as_eager(jitted, function, torch.randn(shape))
    assert fused(jitted) > 0


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x, scale: ((x * scale).tanh() + 1).exp(), id="a factor"),
        pytest.param(lambda x, eps: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * 2, id="an eps"),
        pytest.param(lambda x, scale: torch.where(x > scale / 2, x.exp(), x * 2) + 1, id="an expression"),
    ],
)
@pytest.mark.one_in(2)
def test_a_float_that_differs_from_run_to_run_is_in_no_region(function: Callable, caplog: Any) -> None:
    """Inductor's C++ would use it without declaring it."""
    jitted = forge.jit(function, executors=EXECUTORS, dynamic=True)
    for number in (0.5, 1.25, 3.0):
        x = torch.rand(3, 7) + 0.1
        torch.testing.assert_close(jitted(x, number), function(x, number))
    assert fused(jitted) >= 1 and "Inductor cannot compile" not in caplog.text


def test_lengths_of_slices_and_cats_are_right_at_several_sizes() -> None:
    def roll(x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return torch.cat([-x[..., half:], x[..., :half]], -1) * x.cos() + x.sin()

    jitted = forge.jit(roll, executors=EXECUTORS, dynamic=True)
    for columns in (6, 9, 3):
        assert_as_eager(jitted, roll, torch.randn(3, columns))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: (a / b).sigmoid() + 1,
        lambda a, b: (a.sqrt() * b).tanh(),
        lambda a, b: (a + torch.full_like(b, 3) * 0.1).exp(),
    ],
)
@pytest.mark.one_in(3)
def test_another_default_dtype_is_another_program(function: Callable) -> None:
    a, b = torch.randint(1, 9, (4, 5)), torch.randint(1, 9, (4, 5))
    jitted = forge.jit(function, executors=EXECUTORS)
    for dtype in (torch.float32, torch.float64, torch.float32):
        with default_dtype(dtype):
            torch.testing.assert_close(jitted(a, b), function(a, b))


@pytest.mark.slow
def test_a_region_of_another_default_dtype_is_not_taken() -> None:
    with default_dtype(torch.float32):
        forge.jit(lambda i, w: ((i / 7) * w).tanh() + 1, executors=EXECUTORS)(torch.arange(4), DOUBLES)
    with default_dtype(torch.float64):
        jitted = forge.jit(lambda i, w: ((i / 7) * w).tanh() + 1, executors=EXECUTORS)
        found, expected = jitted(torch.arange(4), DOUBLES), ((torch.arange(4) / 7) * DOUBLES).tanh() + 1
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)


DOUBLES = torch.linspace(0.1, 0.9, 4, dtype=torch.float64)


@pytest.mark.parametrize(
    "divide",
    [
        lambda a, b: torch.div(a, b, rounding_mode="trunc"),
        lambda a, b: a // b,
        lambda a, b: a % b,
        torch.fmod,
        lambda a, b: torch.remainder(5, b),
    ],
)
def test_integers_that_are_divided_by_zero_raise(divide: Callable) -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (divide(a, b) + 1) * 2

    jitted = forge.jit(program, executors=EXECUTORS)
    a = torch.arange(32)
    torch.testing.assert_close(jitted(a, a + 3), program(a, a + 3))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        jitted(a, a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.one_in(2)
def test_a_choice_between_a_tensor_and_a_number_is_in_a_region(dtype: torch.dtype) -> None:
    def choose(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        positive = x > 0
        return torch.where(positive, x, 3) + x, torch.where(positive, -0.1, x), torch.where(positive, x, True) + x

    x = torch.arange(-4, 8).view(3, 4).to(dtype)
    jitted = forge.jit(choose, executors=EXECUTORS)
    for found, expected in zip(jitted(x), choose(x), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    assert [bound.symbol.id for bound in forge.last_traces(jitted)[-1].bound_symbols][:1] == ["inductor.fusion0"]
    assert "torch.where" not in str(forge.last_traces(jitted)[-1])


def test_one_choice_is_one_kernel_on_a_cpu() -> None:
    jitted = forge.jit(lambda x, y: torch.where(x > y, x, 3.0), executors=EXECUTORS)
    alone = forge.jit(lambda c, x: torch.where(c, x, 3.0), executors=EXECUTORS)
    x, y = torch.randn(2, 5)
    jitted(x, y)
    alone(x > y, x)
    assert [fused(each) for each in (jitted, alone)] == [1, 0]


def test_a_number_that_does_not_fit_the_dtype_of_integers_raises() -> None:
    def choose(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, 2**40) + x

    x = torch.ones(3, dtype=torch.int32)
    for function in (choose, forge.jit(choose, executors=EXECUTORS)):
        with pytest.raises(RuntimeError, match="without overflow"):
            function(x)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x - x.bfloat16().float(),
        lambda x: x - x.half().view(2, 4).t().float().t().reshape(8),
        lambda x: (x.double() / 3).float().double() - x.double() / 3,
        lambda x: (x.bfloat16() * 1).float() + x.bfloat16().float() - x,
    ],
    ids=["bfloat16", "half, through views", "float32", "among others"],
)
@pytest.mark.one_in(2)
def test_a_conversion_there_and_back_rounds(program: Callable) -> None:
    x = torch.linspace(0.1, 1.3, 8)
    found = forge.jit(program, executors=EXECUTORS)(x)
    torch.testing.assert_close(found, program(x), rtol=0, atol=0)


def _assigned(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    y = x.cos()
    y[i[0]] = x.sin()
    return y.exp() + 1


INDEXED: dict[str, Callable] = {
    "gather": lambda x, i: torch.gather(x.sin() * 2, 1, i).cos() + 1,
    "take_along_dim": lambda x, i: torch.take_along_dim(x.cos(), i, 1).cos() + 1,
    "take": lambda x, i: torch.take(x.cos(), i).cos() + 1,
    "index": lambda x, i: x.sin()[i].exp() + 1,
    "assigned": _assigned,
    "index_select": lambda x, i: torch.index_select(x.sin(), 0, i[0]).cos() + 1,
    "index_add": lambda x, i: x.cos().index_add(0, i[0], x.exp()).cos() + 1,
    "index_copy": lambda x, i: x.cos().index_copy(0, i[0], x.exp()).cos() + 1,
    "index_fill": lambda x, i: x.cos().index_fill(0, i[0], 3.0).cos() + 1,
    "index_put": lambda x, i: x.cos().index_put((i[0],), x.exp(), accumulate=True).cos() + 1,
    "scatter": lambda x, i: torch.zeros(64, 64).scatter(1, i, x.exp()).cos() + 1,
    "scatter_add": lambda x, i: torch.zeros(64, 64).scatter_add(1, i, x.exp()).cos() + 1,
    "embedding": lambda x, i: F.embedding(i, x.cos() * 2).sin() + 1,
    "nll_loss": lambda x, i: F.nll_loss(x.log_softmax(-1) * 2, i[0]) + 1,
    "cross_entropy": lambda x, i: F.cross_entropy(x * 2, i[0]) + 1,
    "one_hot": lambda x, i: (F.one_hot(i, 64) * x[:, :, None]).cos() + 1,
}


@pytest.mark.parametrize("index", [64, -1, -65])
@pytest.mark.parametrize("name", INDEXED)
@pytest.mark.one_in(4)
def test_an_index_out_of_range_is_refused_as_torch_does(name: str, index: int) -> None:
    """Inductor's loops would abort the process if threads share them, or count from the end."""
    x, i = torch.randn(64, 64, generator=torch.manual_seed(0)), torch.arange(64).repeat(64, 1)
    jitted = forge.jit(INDEXED[name], executors=["inductor", "torch"])
    torch.testing.assert_close(jitted(x, i), INDEXED[name](x, i))
    i[0, 3] = index
    try:
        expected = INDEXED[name](x, i)
    except (IndexError, RuntimeError) as error:
        with pytest.raises(type(error)):
            jitted(x, i)
    else:
        torch.testing.assert_close(jitted(x, i), expected)


PLACES = torch.tensor([7, -3, 2, 9, -8, 100])
SHOWN = torch.tensor([True, False, True, True, True, False])
LABELS = torch.tensor([[3, 0, -1, 1], [-1, 2, 2, 2], [1, 1, 2, 0]])
WRONG: dict[str, tuple[tuple[int, ...], Callable]] = {
    "_unsafe_masked_index": ((5,), lambda x: torch._unsafe_masked_index(x.sin(), SHOWN, [PLACES], 2.0).cos() + 1),
    "_unsafe_masked_index, twice": (
        (5, 5),
        lambda x: torch._unsafe_masked_index(x.sin(), SHOWN[:, None], [PLACES[:, None], PLACES], 0.0).cos() + 1,
    ),
    **{
        f"multilabel_margin_loss, {reduction}": (
            (3, 4),
            lambda x, reduction=reduction: F.multilabel_margin_loss(x.sin() * 3, LABELS, reduction=reduction) * 2 + 1,
        )
        for reduction in ("none", "mean", "sum")
    },
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.one_in(2)
def test_an_operator_that_inductor_computes_otherwise_is_left_to_torch(name: str, requires_grad: bool) -> None:
    """Indices out of range that torch clamps; fewer targets than classes."""
    shape, program = WRONG[name]
    x = torch.randn(shape, generator=torch.manual_seed(0), requires_grad=requires_grad)
    torch.testing.assert_close(forge.jit(program, executors=EXECUTORS, cache=False)(x), program(x))


@pytest.mark.parametrize("operator", [torch.ops.aten.searchsorted.Tensor, torch.ops.aten.bucketize.Tensor])
def test_a_search_is_in_a_region_where_inductor_finds_places_in_parts_of_tensors(operator: Any) -> None:
    """Before 2.13, Inductor's GPU kernel searched from the start of the part's memory."""
    assert operators._has_loops(operator) == (TORCH >= (2, 13))


def test_infinities_are_divided_as_torch_does() -> None:
    x = torch.tensor([float("inf"), -float("inf"), 3.0])
    jitted = forge.jit(lambda x: (x * 1.0) // 2 + 1, executors=EXECUTORS)
    torch.testing.assert_close(jitted(x), (x * 1.0) // 2 + 1, equal_nan=True)


def test_two_opaque_calls_with_backwards_of_their_own_are_told_apart() -> None:
    """The backward of one returns one gradient, that of the other two: z.exp() and a product, of complex numbers."""
    function = lambda z: (z.exp() * z.conj()).abs().pow(2).sum()
    z = torch.randn(3, dtype=torch.complex64, requires_grad=True)
    found, expected = [second_gradient(each, z) for each in (forge.jit(function, executors=EXECUTORS), function)]
    torch.testing.assert_close(found, expected)


def second_gradient(function: Callable, z: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(function(z), z, create_graph=True)
    return torch.autograd.grad(gradient.abs().sum(), z)[0]


@pytest.mark.parametrize("dynamic", [True, None])
def test_a_length_that_is_a_multiple_of_another_is_told_to_a_region(dynamic: bool | None, caplog: Any) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (each.repeat_interleave(4, 1) for each in (k, v))
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask) * 2

    jitted = forge.jit(attend, executors=EXECUTORS, dynamic=dynamic)
    for length, keys in ((5, 5), (3, 3), (3, 6)):
        shapes = (2, 8, length, 16), (2, 2, keys, 16), (2, 2, keys, 16)
        assert_as_eager(jitted, attend, *[torch.randn(*shape) for shape in shapes])
    assert "cannot compile" not in caplog.text


@pytest.mark.slow
def test_a_region_of_a_length_that_is_a_product_of_three_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """make_fx writes one operator.mul of the three."""
    failures: list[Exception] = []
    monkeypatch.setattr(lower.compile_wait, "notice", failures.append)

    def unpooled(x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        y, places = torch.nn.functional.max_pool2d(x.relu(), 2, return_indices=True)
        return torch.nn.functional.max_unpool2d(y, places, 2) + h[:, None, None]

    jitted = forge.jit(unpooled, executors=EXECUTORS, dynamic=True, cache=False)
    for shape in ((2, 4, 6, 6), (3, 4, 8, 10)):
        assert_as_eager(jitted, unpooled, torch.randn(*shape), torch.randn(4))
    assert not failures


@pytest.mark.parametrize("dim", [None, 1])
def test_any_of_uint8_is_uint8(dim: int | None) -> None:
    function = lambda x: ((x + 1).any() if dim is None else (x + 1).any(dim), x * 2)
    x = torch.tensor([[0, 255], [255, 255]], dtype=torch.uint8)
    jitted = forge.jit(function, executors=EXECUTORS)
    torch.testing.assert_close(jitted(x), function(x))
    assert fused(jitted)


def test_what_inductor_warns_of_its_kernels_reaches_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_fx_inner = lower.compile_fx_inner

    def warning(*args: Any, **options: Any) -> Any:
        for module in ("torch._inductor.lowering", "somebody.elses"):
            warnings.warn_explicit("online softmax is disabled", UserWarning, f"{module}.py", 1, module=module)
        return compile_fx_inner(*args, **options)

    monkeypatch.setattr(lower, "compile_fx_inner", warning)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        forge.jit(lambda x: (x.exp() + 3).sin(), executors=EXECUTORS, cache=False)(torch.ones(31))
    assert [each.filename for each in found if "softmax" in str(each.message)] == ["somebody.elses.py"]


def test_no_kernel_reduces_rows_and_columns_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such kernels of Inductor leave results unwritten; their results on a GPU are tested in
    tests/gpu/reductions.py."""
    compile_fx_inner, seen = lower.compile_fx_inner, []

    def noting(*args: Any, **options: Any) -> Any:
        seen.append(lower.inductor_config.triton.mix_order_reduction)
        return compile_fx_inner(*args, **options)

    monkeypatch.setattr(lower, "compile_fx_inner", noting)
    jitted = forge.jit(lambda x, w: F.rms_norm(x.tanh(), (8,), w).exp(), executors=["inductor", "torch"], cache=False)
    with lower.inductor_config.patch({"triton.mix_order_reduction": True}):
        jitted(torch.randn(5, 8, requires_grad=True), torch.randn(8, requires_grad=True)).sum().backward()
    assert seen and not any(seen)


def test_pooling_to_one_of_channels_beside_each_other_is_fused() -> None:
    """torch's kernel changes its result's strides in place at the end, where they have no meaning."""

    x = torch.randn(2, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    region = forge.trace(lambda h: (torch.nn.functional.adaptive_avg_pool2d(h, (1, 1)),), x)
    (out,) = region.output
    region.output = (TensorProxy(out.name, out.shape, out.dtype, out.device, strides=(4, 1, 1, 1)),)
    function = lower.compile_region(region)
    compile_wait.finish()
    torch.testing.assert_close(function([x])[0], x.mean((2, 3), keepdim=True))


OF_ONE: dict[str, Callable] = {
    "median": lambda x: torch.median(x, -1, True),
    "nanmedian": lambda x: torch.nanmedian(x, 1, keepdim=True),
    "of rows": lambda x: torch.median(x.t(), 0, True),
    "in a program": lambda x: (x.sin() + torch.median(x * 2, -1, True).values, torch.nanmedian(x.exp(), -1, True)[1]),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", OF_ONE)
def test_a_median_of_one_element_is_compiled(name: str, requires_grad: bool) -> None:
    x = torch.rand(3, 1, requires_grad=requires_grad)
    torch.testing.assert_close(tuple(forge.jit(OF_ONE[name], executors=EXECUTORS)(x)), tuple(OF_ONE[name](x)))


def test_what_torch_calls_for_a_part_of_a_call_does_not_take_the_name_of_another_part() -> None:
    """expand(unsqueeze(x)) for a broadcast has an intermediate value that the call does not have."""

    def body(x: TensorProxy) -> TensorProxy:
        doubled = x + x
        in_columns = prims.broadcast_in_dim(x, (3, 5), (0,))
        return in_columns * prims.broadcast_in_dim(doubled, (3, 5), (0,))

    trace = Trace()
    x = trace.add_input(TensorProxy("x", (3,), torch.float32, torch.device("cpu")))
    with recording(trace, clang.language):
        Symbol("outer", "outer", body=body)(x)
    calls = aten_graph.claim_by_torch(trace.bound_symbols)
    made = [name for call in calls for name in call.outputs]
    assert len(made) == len(set(made)) == 6


MIXED = {
    "layer_norm": lambda x, w: F.layer_norm(x + 1, (8,), w, w) * 2,
    "group_norm": lambda x, w: F.group_norm(x + 1, 2, w[:4], w[:4]) * 2,
    "batch_norm": lambda x, w: F.batch_norm(x + 1, w[:4], w[:4].abs()) * 2,
    "instance_norm": lambda x, w: F.instance_norm(x + 1, weight=w[:4], bias=w[:4]) * 2,
    "huber_loss": lambda x, w: F.huber_loss(x + 1, w.expand(2, 4, 8)) * 2,
    "binary_cross_entropy": lambda x, w: F.binary_cross_entropy(x.sigmoid(), w.sigmoid().expand(2, 4, 8)) * 2,
}


def dtype_of(function: Callable, x: torch.Tensor, w: torch.Tensor) -> Any:
    try:
        return function(x, w).dtype
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("name", MIXED)
@pytest.mark.one_in(3)
def test_a_mixture_of_dtypes_gives_what_it_gives_in_eager(name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    x, w = torch.rand(2, 4, 8).to(dtypes[0]), torch.rand(8).to(dtypes[1])
    assert dtype_of(forge.jit(MIXED[name], executors=["inductor", "torch"]), x, w) == dtype_of(MIXED[name], x, w)


@pytest.mark.usefixtures("compiled_regions")
@pytest.mark.parametrize("shape", [(), (2, 3)], ids=str)
def test_a_flip_is_in_a_region_also_of_the_dim_that_a_number_does_not_have(shape: tuple[int, ...]) -> None:
    jitted = forge.jit(lambda x: x.exp().flip(0) * 2)
    x = torch.randn(shape)
    torch.testing.assert_close(jitted(x), x.exp().flip(0) * 2)
    assert fused(jitted) == 1
