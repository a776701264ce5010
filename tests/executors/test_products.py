"""Products fused with the calls that follow, under select="measured". The timer is the tests' own."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
from forge.api.options import resolve_options
from forge.compiler.autotune import PARTS
from forge.executors import FusionExecutor, claim, decline, resolve_executors
from forge.executors.executor import Decision, Declined, ProductExecutor
from forge.executors.inductorex import inductorex, lower
from forge.ir import BoundSymbol, Trace
from forge.runtime import cuda_recorder
from forge.transforms.products import ProductSymbol
from tests.executors.test_cuda_graphs import Double
from tests.executors.test_select import FAST, SLOW, Timer, another_process, measured, timer, who

assert timer  # a fixture
CUDA = torch.cuda.is_available()
PRODUCTS = frozenset({"linear", "mm", "bmm", "matmul", "addmm"})
POINTWISE = frozenset({"add", "mul", "gelu", "relu", "double", "transpose", "t", "tensor_reshape", "gelu_backward"})


def _by_torch(region: Trace) -> Callable:
    return claim(region, resolve_executors(["torch"]))[0].python_callable()


class Products(ProductExecutor):
    """An executor that takes products by name and has torch run them with the calls that follow; `regions` has the
    calls of each region."""

    def __init__(self) -> None:
        super().__init__("products")
        self.regions: list[list[str]] = []
        self.failure: Declined | Exception | None = None
        self.takes_symbols = True

    def identity(self) -> str:
        return "1"

    def is_product(self, bound: BoundSymbol) -> Decision:
        if bound.symbol.name in PRODUCTS and bound.output.dtype == torch.float64:
            return decline("there is no template in float64")
        return bound.symbol.name in PRODUCTS

    def is_epilogue(self, bound: BoundSymbol) -> Decision:
        return bound.symbol.name in POINTWISE

    def fuse_product(self, region: Trace) -> Callable | Declined:
        if isinstance(self.failure, Exception):
            raise self.failure
        if self.failure is not None:
            return self.failure
        if not self.takes_symbols and any(isinstance(size, torch.SymInt) for size in region.output[0].shape):
            return decline("its sizes are symbolic")
        (call,) = region.bound_symbols
        self.regions.append([sub.symbol.name for sub in call.subsymbols])
        return _by_torch(region)


class Fuser(FusionExecutor):
    """An executor that takes pointwise calls and sums, and has an executor of products."""

    def __init__(self) -> None:
        super().__init__("fuser")
        self.products = Products()
        self.regions: list[list[str]] = []

    def identity(self) -> str:
        return "1"

    def can_fuse(self, bound: BoundSymbol) -> Decision:
        taken = bound.symbol.name in POINTWISE | {"sum", "layer_norm"}
        return taken or decline("not mine")

    def fuse(self, region: Trace) -> Callable:
        self.regions.append([bound.symbol.name for bound in region.bound_symbols])
        return _by_torch(region)

    def product_executor(self) -> ProductExecutor:
        return self.products


@pytest.fixture
def fuser(timer: Timer) -> Fuser:
    """Return an executor whose products are faster than their parts."""
    timer.seconds = {"products": FAST, PARTS: SLOW}
    return Fuser()


def randn(*shapes: tuple[int, ...], **options: Any) -> list[torch.Tensor]:
    return [torch.randn(shape, **options) for shape in shapes]


def feed_forward(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, w, b))


SHAPES = (4, 8), (8, 8), (8,)


# the candidate that is kept


def test_a_product_that_is_faster_with_its_epilogue_is_one_region(timer: Timer, fuser: Fuser) -> None:
    told = measured(feed_forward, *randn(*SHAPES), executors=[fuser, "torch"])
    assert who(told) == ["products"]
    assert timer.asked == [["products", PARTS]]
    assert fuser.products.regions == [["linear", "gelu"]]
    call = "forge.product.linear_gelu(float32[4, 8], float32[8, 8], float32[8])"
    assert str(told.measured[0]) == f"{call}: products 10.0 µs (kept), its parts 40.0 µs"


def test_a_product_whose_parts_are_faster_runs_as_before(timer: Timer, fuser: Fuser) -> None:
    timer.seconds = {"products": SLOW, PARTS: FAST}
    told = measured(feed_forward, *randn(*SHAPES), executors=[fuser, "torch"])
    assert who(told) == ["torch", "torch"]  # one call does not make a region
    assert ("products", "measured: 40.0 µs against 10.0 µs of its parts") in told.rows[0].declined
    assert timer.asked == [["products", PARTS]]


def test_the_default_configuration_measures_no_product(timer: Timer, fuser: Fuser) -> None:
    told = measured(feed_forward, *randn(*SHAPES), executors=[fuser, "torch"], select="order")
    assert who(told) == ["torch", "torch"] and timer.asked == [] and not told.measured
    assert resolve_options().product_executors == []


@pytest.mark.parametrize("options", [{"numerics": "eager"}, {"check": "regions"}, {"executors": ["inductor-whole"]}])
def test_inductor_has_no_products_where_their_rounding_or_edges_are_checked(options: dict[str, Any]) -> None:
    given = {"executors": ["inductor", "torch"], "select": "measured", **options}
    assert resolve_options(**given).product_executors == []


# conditions on a call


@pytest.mark.parametrize(
    ("follow", "names"),
    [
        (lambda y, r: y + r, ["add"]),
        (lambda y, r: (y * 0.5 + r).relu(), ["mul", "add", "relu"]),
        (lambda y, r: y.double(), ["double"]),
        (lambda y, r: y.reshape(2, 2, 8) * 2, ["tensor_reshape", "mul"]),
        (lambda y, r: y.t().t(), []),
        (lambda y, r: y.sum(), []),
        (lambda y, r: (y * 2).sum(), ["mul"]),
        (lambda y, r: y + torch.ones(3, 4, 8), []),
    ],
    ids=["residual", "scale", "conversion", "view inside", "view", "reduction", "before a reduction", "broadcast"],
)
def test_the_pointwise_calls_that_follow_a_product_are_in_its_region(
    fuser: Fuser, follow: Callable, names: list[str]
) -> None:
    measured(lambda x, w, r: follow(x @ w, r), *randn((4, 8), (8, 8), (4, 8)), executors=[fuser, "torch"])
    assert fuser.products.regions[-1] == ["matmul", *names]


def test_what_a_backward_reads_is_returned_as_well(fuser: Fuser) -> None:
    told = measured(feed_forward, *randn(*SHAPES, requires_grad=True), executors=[fuser, "torch"])
    assert who(told) == ["products"]
    assert fuser.products.regions.count(["linear", "gelu"]) == 1  # it is measured as it runs
    assert ["matmul"] in fuser.products.regions[1:]
    assert len(told.saved) > 2  # the product's own result beside the inputs


def test_a_product_of_a_backward_has_the_gradient_of_the_activation_before_it(fuser: Fuser) -> None:
    def function(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.gelu(x @ w) @ v

    measured(function, *randn((4, 8), (8, 8), (8, 8), requires_grad=True), executors=[fuser, "torch"])
    assert any(calls[0] == "matmul" and "gelu_backward" in calls[-1] for calls in fuser.products.regions)


def test_a_call_that_another_one_reads_first_ends_the_epilogue(fuser: Fuser) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x @ w
        total = y.cumsum(0)
        return total + y

    measured(function, *randn((4, 8), (8, 8)), executors=[fuser, "torch"])
    assert fuser.products.regions == [["matmul"]]


def test_a_call_that_follows_two_products_belongs_to_the_last(fuser: Fuser) -> None:
    def function(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.gelu(x @ w) * (x @ v)

    measured(function, *randn((4, 8), (8, 8), (8, 8)), executors=[fuser, "torch"])
    assert fuser.products.regions == [["matmul", "gelu"], ["matmul", "mul"]]


def test_products_of_one_level_are_regions_of_their_own(fuser: Fuser) -> None:
    def function(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.gelu(x @ w), (x @ v).relu()

    jitted = forge.jit(function, executors=[fuser, "torch"], select="measured")
    inputs = randn((4, 8), (8, 8), (8, 8))
    torch.testing.assert_close(jitted(*inputs), function(*inputs))
    assert fuser.products.regions == [["matmul", "gelu"], ["matmul", "relu"]]
    calls = forge.last_traces(jitted)[-1].bound_symbols
    assert sum(call.symbol.executor is fuser.products for call in calls) == 2


def test_neighbours_of_an_epilogue_are_measured_with_it(timer: Timer, fuser: Fuser) -> None:
    """The sum would be in one region with the residual, where it costs nothing."""
    told = measured(lambda x, w, r: (x @ w + r).sum(), *randn((4, 8), (8, 8), (4, 8)), executors=[fuser, "torch"])
    assert ["add", "sum"] in fuser.regions  # of the parts, as it was measured
    assert who(told)[0] == "products" and fuser.products.regions == [["matmul", "add"]]
    assert len(told.measured) == 1


# measurements


def test_layers_that_are_alike_are_measured_once(timer: Timer, fuser: Fuser) -> None:
    def function(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.gelu(F.gelu(x @ w) @ v) @ w)

    told = measured(function, *randn((4, 8), (8, 8), (8, 8)), executors=[fuser, "torch"])
    assert len(timer.asked) == 1 and told.measured[0].calls == 3
    assert who(told) == ["products"] * 3
    assert fuser.products.regions == [["matmul", "gelu"]]


@pytest.mark.parametrize("factor", [0.5, 2])
def test_a_constant_of_the_epilogue_is_part_of_the_call(timer: Timer, fuser: Fuser, factor: float) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (((x @ w) * 2.0) @ w) * factor

    measured(function, *randn((4, 8), (8, 8)), executors=[fuser, "torch"])
    assert len(timer.asked) == 2


def test_strides_of_an_operand_are_part_of_the_call(timer: Timer, fuser: Fuser) -> None:
    """A backward's operands are views, whose strides are not in the trace."""
    measured(torch.matmul, *randn((8, 8), (8, 8), requires_grad=True), executors=[fuser, "torch"])
    assert len(timer.asked) == 3


def test_reduced_precision_of_products_is_part_of_the_call(timer: Timer, fuser: Fuser) -> None:
    inputs = randn(*SHAPES)
    measured(feed_forward, *inputs, executors=[fuser, "torch"])
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        measured(feed_forward, *inputs, executors=[fuser, "torch"])
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(timer.asked) == 2 and len(fuser.products.regions) == 2


def test_another_process_reads_what_was_measured(timer: Timer, fuser: Fuser, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = randn(*SHAPES)
    for _ in range(2):
        another_process(monkeypatch)
        assert who(measured(feed_forward, *inputs, executors=[fuser, "torch"])) == ["products"]
    assert len(timer.asked) == 1


def test_of_a_changing_length_the_one_at_hand_is_measured(timer: Timer, fuser: Fuser) -> None:
    timer.seconds = {"products": SLOW, PARTS: FAST}
    _, w, b = randn(*SHAPES)
    jitted = forge.jit(feed_forward, executors=[fuser, "torch"], select="measured", dynamic=True)
    for length in (6, 9):
        x = torch.randn(length, 8)
        torch.testing.assert_close(jitted(x, w, b), feed_forward(x, w, b))
    told = forge.explain(jitted)
    assert told.graphs == 1 and len(timer.asked) == 1
    reason = "measured at float32[6, 8], float32[8, 8], float32[8]: 40.0 µs against 10.0 µs of its parts"
    assert ("products", reason) in told.rows[0].declined


def test_a_product_of_a_size_that_depends_on_data_runs_as_before(timer: Timer, fuser: Fuser) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.gelu(x[x[:, 0] > 0] @ w)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        told = measured(function, *randn((6, 8), (8, 8)), executors=[fuser, "torch"])
    assert timer.asked == [] and "products" not in who(told)
    assert any("is not known before the program runs" in str(each.why_not) for each in told.measured)


def test_a_dtype_without_a_template_is_a_reason(timer: Timer, fuser: Fuser) -> None:
    told = measured(feed_forward, *randn(*SHAPES, dtype=torch.float64), executors=[fuser, "torch"])
    assert timer.asked == [] and ("products", "there is no template in float64") in told.rows[0].declined


@pytest.mark.parametrize("failure", [decline("torch's kernel is the fastest"), RuntimeError("no registers left")])
def test_a_search_that_finds_no_template_leaves_the_parts(timer: Timer, fuser: Fuser, failure: Any) -> None:
    fuser.products.failure = failure
    told = measured(feed_forward, *randn(*SHAPES), executors=[fuser, "torch"])
    reason = getattr(failure, "reason", "RuntimeError: no registers left")
    assert who(told) == ["torch", "torch"] and ("products", f"measured: {reason}") in told.rows[0].declined


def test_a_region_that_is_declined_once_it_was_measured_leaves_its_parts_to_others(
    timer: Timer, fuser: Fuser, recwarn: pytest.WarningsRecorder
) -> None:
    """A region of symbolic sizes may be declined so, because it is measured with known sizes."""
    fuser.products.takes_symbols = False
    _, w, b = randn(*SHAPES)

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(x, w)) * 2 + b

    jitted = forge.jit(function, executors=[fuser, "torch"], select="measured", dynamic=True)
    for length in (6, 9):
        x = torch.randn(length, 8)
        torch.testing.assert_close(jitted(x, w, b), function(x, w, b))
    told = forge.explain(jitted)
    assert who(told) == ["torch", "fuser", "fuser", "fuser"] and len({row.region for row in told.rows[1:]}) == 1
    assert ("products", "its sizes are symbolic") in told.rows[0].declined and not recwarn.list


def test_where_measuring_fails_the_parts_run(timer: Timer, fuser: Fuser) -> None:
    def fail() -> None:
        raise RuntimeError("a bad moment")

    timer.wait = fail
    told = measured(feed_forward, *randn(*SHAPES), executors=[fuser, "torch"])
    assert who(told) == ["torch", "torch"] and "its parts by order" in str(told.measured[0])


# with the rest of forge


def test_a_second_tier_of_whole_programs_has_no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORGE_CHECK")
    config = resolve_options(["inductor", "torch"], select="measured")
    assert [each.name for each in config.product_executors] == ["inductor-products"]
    assert config.larger_regions().product_executors == []
    assert [each.name for each in config.larger_regions().executors] == ["inductor-whole", "torch"]


def test_a_stage_shows_the_calls(fuser: Fuser) -> None:
    jitted = forge.jit(feed_forward, executors=[fuser, "torch"], select="measured")
    jitted(*randn(*SHAPES))
    (stage,) = [each for each in forge.last_traces(jitted) if each.stage == "products"]
    (call,) = stage.bound_symbols
    assert isinstance(call.symbol, ProductSymbol) and [sub.symbol.name for sub in call.subsymbols] == ["linear", "gelu"]


def test_a_recorded_program_has_products(fuser: Fuser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_recorder, "_recorder", Double())
    inputs = randn((4, 8), (8, 8), (8, 8))

    def function(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.gelu(x @ w) @ v)

    jitted = forge.jit(function, executors=[fuser, "torch"], select="measured", cuda_graphs=True)
    for _ in range(5):
        torch.testing.assert_close(jitted(*inputs), function(*inputs))
    told = forge.explain(jitted)
    assert told.recorded and who(told) == ["products"] * 2


# Inductor: its search is given templates alone, which may be slower than torch's kernels


@pytest.fixture
def template(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make Inductor's search consider the templates of one backend alone; these are faster than a product's parts."""
    timer.seconds = {"inductor-products": FAST, PARTS: SLOW}
    return lambda backend: monkeypatch.setitem(lower._SEARCH, "max_autotune_gemm_backends", backend)


def off(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element."""
    return ((actual.double() - exact).abs().max() / exact.abs().max()).item()


@pytest.mark.usefixtures("compiled_regions")
@pytest.mark.skipif(not inductorex.is_available(), reason="there is no C++ compiler for its kernels")
def test_inductor_writes_a_batch_of_products_with_its_epilogue(
    template: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    template("CPP")
    inputs = randn((4, 32, 32), (4, 32, 32), (32,))

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.gelu(torch.bmm(x, w) + b)

    with caplog.at_level(logging.WARNING):
        told = measured(function, *inputs, executors=["inductor", "torch"])
    assert who(told) == ["inductor-products"]
    assert not [each for each in caplog.records if each.name.startswith(("forge", "torch._inductor"))]
    torch._dynamo.reset()
    again = measured(function, *inputs, executors=["inductor", "torch"])
    assert again.cached == 1 and who(again) == ["inductor-products"] and again.measured == told.measured
    torch._dynamo.reset()
    assert measured(function, *inputs, executors=["inductor", "torch"], select="order").cached == 0


@pytest.mark.usefixtures("compiled_regions")
@pytest.mark.skipif(not inductorex.is_available(), reason="there is no C++ compiler for its kernels")
def test_a_search_that_keeps_torchs_kernel_is_no_candidate(template: Callable[[str], None], timer: Timer) -> None:
    template("ATEN")
    told = measured(lambda x: F.gelu(torch.bmm(x, x)), *randn((4, 32, 32)), executors=["inductor", "torch"])
    reason = "measured: torch's kernel is the fastest in Inductor's search"
    assert ("inductor-products", reason) in told.rows[0].declined and timer.asked == []


@pytest.mark.usefixtures("compiled_regions")
@pytest.mark.skipif(not inductorex.is_available(), reason="there is no C++ compiler for its kernels")
def test_a_search_among_several_prints_nothing(
    template: Callable[[str], None],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))  # of no earlier search
    template("CPP,ATEN")
    measured(lambda x: F.relu(torch.bmm(x, x)), *randn((4, 32, 32)), executors=["inductor", "torch"])
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("compiled_regions")
@pytest.mark.skipif(not inductorex.is_available(), reason="there is no C++ compiler for its kernels")
def test_inductor_has_no_template_in_cpp_for_weights_that_change(timer: Timer) -> None:
    inputs = randn((16, 8), *SHAPES[1:])  # a linear layer of few rows is not a product
    told = measured(feed_forward, *inputs, executors=["inductor", "torch"])
    reason = "Inductor's C++ template for aten.addmm.default takes constant weights only"
    assert ("inductor-products", reason) in told.rows[0].declined and timer.asked == []


@pytest.mark.usefixtures("compiled_regions")
@pytest.mark.skipif(not CUDA, reason="no GPU here")
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_on_a_gpu_triton_computes_a_product_with_its_epilogue(
    template: Callable[[str], None], capfd: pytest.CaptureFixture[str], cuda_graphs: bool
) -> None:
    template("TRITON")
    shapes = (256, 512), (1024, 512), (1024,), (256, 1024)
    inputs = randn(*shapes, dtype=torch.bfloat16, device="cuda")

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(x, w, b)) * 0.5 + r

    exact = function(*[each.double() for each in inputs])
    jitted = forge.jit(function, select="measured", cuda_graphs=cuda_graphs)
    results = [jitted(*inputs) for _ in range(5)]
    assert max(off(each, exact) for each in results) <= 2 * off(function(*inputs), exact)
    assert "inductor-products" in who(forge.explain(jitted)) and "AUTOTUNE" not in capfd.readouterr().err
    torch._dynamo.reset()
    again = forge.jit(function, select="measured", cuda_graphs=cuda_graphs)
    torch.testing.assert_close(again(*inputs), results[0], rtol=0, atol=0)
    assert forge.explain(again).cached == (not cuda_graphs)


@pytest.mark.usefixtures("compiled_regions")
@pytest.mark.skipif(not CUDA, reason="no GPU here")
def test_on_a_gpu_products_of_a_backward_are_templates(template: Callable[[str], None]) -> None:
    template("TRITON")
    shapes = (256, 512), (1024, 512), (512, 1024)
    inputs = randn(*shapes, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    def function(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(x, w)), v)

    def gradients(call: Callable, given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(call(*given).square().sum(), given)

    jitted = forge.jit(function, select="measured")
    exact = gradients(function, [each.detach().double().requires_grad_() for each in inputs])
    given = zip(gradients(jitted, inputs), gradients(function, inputs), exact, strict=True)
    for ours, eager, right in given:
        assert off(ours, right) <= 2 * off(eager, right)
    assert "inductor-products" in who(forge.explain(jitted), "backward")


@pytest.mark.usefixtures("compiled_regions")
@pytest.mark.skipif(not CUDA, reason="no GPU here")
@pytest.mark.parametrize(("precision", "bound"), [("highest", 1e-5), ("high", 1e-2)])
def test_on_a_gpu_templates_have_the_precision_that_was_set(
    template: Callable[[str], None], precision: str, bound: float
) -> None:
    template("TRITON")
    inputs = randn((256, 512), (1024, 512), (1024,), device="cuda")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        jitted = forge.jit(feed_forward, select="measured")
        actual = jitted(*inputs)
    finally:
        torch.set_float32_matmul_precision(before)
    assert "inductor-products" in who(forge.explain(jitted))
    assert off(actual, feed_forward(*[each.double() for each in inputs])) < bound
