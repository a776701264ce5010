"""The partition of calls into regions: levels, ordering constraints, and calls outside."""

from typing import Any

import pytest
import torch

import forge
from forge.api.functional import Direct
from forge.executors import FusionExecutor, claim, decline, resolve_executors
from forge.ir import BoundSymbol, Trace


class Taking(FusionExecutor):
    """An executor that takes the named symbols, and keeps its regions."""

    def __init__(self, *names: str, name: str = "fuser") -> None:
        super().__init__(name)
        self.names = names
        self.regions: list[Trace] = []

    def can_fuse(self, bound: BoundSymbol) -> Any:
        return bound.symbol.name in self.names or decline(f"{bound.symbol.name} is not taken")

    def fuse(self, region: Trace) -> Any:
        self.regions.append(region)
        return claim(region, resolve_executors(["torch"]))[0].python_callable()

    def is_profitable(self, calls: list[BoundSymbol]) -> bool:
        return True


def calls_of(region: Trace) -> list[str]:
    return [bound.symbol.name for bound in region.bound_symbols]


def run(function: Any, fusers: list[FusionExecutor], *inputs: torch.Tensor) -> Direct:
    """Run a function, and compare it with eager."""
    direct = Direct(function, [*fusers, "torch"])
    torch.testing.assert_close(direct(*inputs), function(*inputs))
    return direct


X = torch.linspace(-1, 1, 12).view(3, 4)


def test_calls_between_two_products_are_one_region_however_far_apart() -> None:
    fuser = Taking("mul", "exp")

    def function(x: torch.Tensor) -> Any:
        a = x * 2
        b = x @ x.t()
        return torch.exp(a), b, a * 3

    run(function, [fuser], X)
    assert [calls_of(region) for region in fuser.regions] == [["mul", "exp", "mul"]]


def test_a_product_stands_between_the_region_that_it_reads_and_the_one_that_reads_it() -> None:
    fuser = Taking("mul", "add")
    run(lambda x: ((x * 2) @ (x * 3) + 1) * 2, [fuser], torch.ones(3, 3))
    assert [calls_of(region) for region in fuser.regions] == [["mul", "mul"], ["add", "mul"]]


def test_identical_regions_are_fused_once() -> None:
    fuser = Taking("mul", "exp")

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x * 0.5) @ torch.eye(4)

    run(lambda x: layer(layer(layer(x))), [fuser], X)
    assert [calls_of(region) for region in fuser.regions] == [["mul", "exp"]]


def test_regions_that_differ_in_a_number_or_a_stride_are_not_identical() -> None:
    fuser = Taking("mul")

    def function(x: torch.Tensor) -> torch.Tensor:
        x = (x * 2) @ x
        x = (x * 3) @ x
        x = (x.t() * 3) @ x
        return (x * 3) @ x

    run(function, [fuser], torch.ones(3, 3))
    assert [calls_of(region) for region in fuser.regions] == [["mul"]] * 3  # the last is the second


def test_a_view_is_made_inside_of_the_region_that_reads_it() -> None:
    fuser = Taking("mul", "transpose", "add")
    run(lambda x: (x * 2).transpose(0, 1) + 1, [fuser], X)
    assert [calls_of(region) for region in fuser.regions] == [["mul", "transpose", "add"]]


def test_a_view_that_leaves_the_program_shares_memory() -> None:
    fuser = Taking("mul", "transpose", "add")

    def function(x: torch.Tensor) -> Any:
        y = x * 2
        return y, y.transpose(0, 1), y.transpose(0, 1) + 1

    direct = Direct(function, [fuser, "torch"])
    y, view, _ = direct(X)
    assert view.untyped_storage()._cdata == y.untyped_storage()._cdata


def names_of(direct: Direct) -> list[str]:
    """Return the names of the calls that run."""
    ((_, compiled),) = direct.compiled.values()
    return [bound.symbol.name for bound in compiled.traces[-1].bound_symbols]


def product_of_views(x: torch.Tensor) -> Any:
    parts = torch.exp(x).reshape(2, 3, 2).transpose(0, 1).chunk(3, 0)
    return parts[1][0] @ parts[2][0].t()


def test_a_chain_of_views_before_a_product_is_one_call() -> None:
    fuser = Taking("exp", "view", "reshape", "transpose", "t", "split", "chunk", "select", "getitem", "slice")
    fuser.strided = True
    calls = names_of(run(product_of_views, [fuser], X.contiguous()))
    assert calls.count("reinterpreted") == 2
    assert not {"transpose", "reshape", "chunk", "split"} & set(calls)


def test_views_of_memory_whose_strides_are_a_promise_stay_calls() -> None:
    fuser = Taking("exp", "view", "reshape", "transpose", "t", "split", "chunk", "select", "getitem", "slice")
    assert "reinterpreted" not in names_of(run(product_of_views, [fuser], X.contiguous()))


def test_a_view_that_leaves_the_program_is_torchs() -> None:
    fuser = Taking("exp", "t")
    fuser.strided = True

    def function(x: torch.Tensor) -> Any:
        y = torch.exp(x)
        return y, y.t() @ y, y.t()

    direct = run(function, [fuser], X)
    value, _, view = direct(X)
    value.add_(1)
    assert torch.equal(view, value.t())
    assert "t" in names_of(direct)


def test_regions_of_two_executors_do_not_wait_for_each_other() -> None:
    ones, others = Taking("mul", name="ones"), Taking("add", name="others")
    run(lambda x: ((x * 2 + 1) * 3 + 1) * (x + 5), [ones, others], X)
    assert [calls_of(region) for region in ones.regions] == [["mul"], ["mul"], ["mul"]]


def test_executors_are_asked_in_order_call_by_call() -> None:
    fuser = Taking("mul", "exp")
    direct = Direct(lambda x: torch.exp(x * 2), ["torch", fuser])
    direct(X)
    assert fuser.regions == []
    ((_, compiled),) = direct.compiled.values()
    assert {made.executor for made in compiled.claims} == {"torch"}


def test_the_parts_of_a_call_are_taken_where_all_are() -> None:
    whole, parts = Taking("softplus"), Taking("exp", "log1p", "add", "mul", "where", "gt", "div", "true_divide")
    for fuser in (whole, parts):
        direct = Direct(lambda x: torch.nn.functional.softplus(x), [fuser, "torch"])
        torch.testing.assert_close(direct(X), torch.nn.functional.softplus(X))
    assert calls_of(whole.regions[0]) == ["softplus"]


def test_random_calls_keep_their_order() -> None:
    fuser = Taking("mul", "add")

    def function(x: torch.Tensor) -> Any:
        a = torch.rand_like(x)
        b = (x @ x.t()).sum() * torch.rand_like(x)
        return a * 2 + torch.rand_like(x), b + 1

    torch.manual_seed(3)
    expected = function(X)
    torch.manual_seed(3)
    actual = Direct(function, [fuser, "torch"])(X)
    torch.testing.assert_close(actual, expected)


def test_a_region_reads_a_value_before_it_is_written_to() -> None:
    fuser = Taking("mul", "add")

    def function(x: torch.Tensor) -> torch.Tensor:
        before = x * 2 + 1
        x.add_(10)
        return before

    x, y = X.clone(), X.clone()
    torch.testing.assert_close(Direct(function, [fuser, "torch"])(x), function(y))
    torch.testing.assert_close(x, y)


@pytest.mark.parametrize("count", [2, 5])
def test_weight_gradients_split_no_region(count: int) -> None:
    """A product that makes a weight's gradient is only an output of the program: it runs one level later."""
    fuser = Taking("mul", "tanh", "tanh_backward", "add", "sub", "neg")
    weights = [torch.randn(4, 4, requires_grad=True) for _ in range(count)]

    def function(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = torch.tanh(x @ weight) * 2
        return x

    direct = Direct(function, [fuser, "torch"])
    found = torch.autograd.grad(direct(X, *weights).sum(), weights)
    expected = torch.autograd.grad(function(X, *weights).sum(), weights)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_softmax_that_runs_again_is_beside_its_gradient() -> None:
    """The product for v's gradient has no dependents: it may run after that of the scores."""
    torch.manual_seed(0)
    x = torch.randn(4, 160, 160, dtype=torch.bfloat16, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(x * 1.5 @ (x * 2).mT / 8, -1, dtype=torch.float32).to(x.dtype)
        return (weights * 2 @ (x * 3)).tanh()  # torch's attention has no factor of the weights

    jitted = forge.jit(function, executors=["inductor", "torch"], memory="balanced")
    result = jitted(x)
    (gradient,) = torch.autograd.grad(result.sum(), x)
    torch.testing.assert_close(gradient, torch.autograd.grad(function(x).sum(), x)[0], atol=0.1, rtol=0.1)
    regions = [bound for bound in forge.last_backward_traces(jitted)[-1].bound_symbols if bound.symbol.executor]
    inside = [[sub.symbol.name for sub in bound.subsymbols] for bound in regions]
    assert any({"softmax", "softmax_backward"} <= set(names) for names in inside), inside


def test_a_product_is_delayed_only_for_memory_that_is_read_anyway() -> None:
    """Only the later region reads exp(a), so its product moves; exp(b) is not read there, so its product stays."""
    fuser = Taking("exp", "mul", "add")
    a, b = torch.randn(256, 256), torch.randn(256, 256)

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        first, other = torch.exp(a) @ b, torch.exp(b) @ b
        second = (b @ b) * a
        return second @ b + first + other

    run(function, [fuser], a / 16, b / 16)
    assert [calls_of(region) for region in fuser.regions] == [["exp"], ["exp", "mul"], ["add", "add"]]


def test_small_memory_delays_no_product() -> None:
    fuser = Taking("exp", "mul", "add")

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        first = torch.exp(a) @ b
        second = (b @ b) * a
        return second @ b + first

    run(function, [fuser], torch.randn(8, 8), torch.randn(8, 8))
    assert [calls_of(region) for region in fuser.regions] == [["exp"], ["mul"], ["add"]]
