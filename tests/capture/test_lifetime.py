"""Lifetimes of objects in a jitted function: it keeps nothing alive that torch.compile would not."""

import gc
import linecache
import sys
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils._traceback import CapturedTraceback

import forge
from forge.capture.handles import handle_of
from tests.unknown_operator import rounded

X = torch.linspace(-1, 1, 24).view(6, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


class Breaking(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        torch._dynamo.graph_break()
        return self.second(hidden)


class Opaque(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rounded(self.second(torch.relu(self.first(x))))


def call(jitted: Callable, net: nn.Module) -> None:
    jitted(X)


def backward(jitted: Callable, net: nn.Module) -> None:
    jitted(X).sum().backward()


def update(jitted: Callable, net: nn.Module) -> None:
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(2):
        jitted(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def recompile(jitted: Callable, net: nn.Module) -> None:
    for rows in (6, 5, 4):
        jitted(X[:rows]).sum().backward()
    net.eval()
    with torch.no_grad():
        jitted(X)


def replace(jitted: Callable, net: nn.Module) -> None:
    backward(jitted, net)
    net.second = nn.Linear(8, 3)
    backward(jitted, net)


def weights_left(make: Callable[[], nn.Module], jit: Callable, use: Callable, count: int) -> int:
    """Return how many parameters of `count` jitted and deleted models are alive after torch._dynamo.reset()."""
    weights = []
    for _ in range(count):
        net = make()
        jitted = jit(net)
        weights += [weakref.ref(parameter) for parameter in net.parameters()]
        use(jitted, net)
        weights += [weakref.ref(parameter) for parameter in net.parameters()]
        del net, jitted
    torch._dynamo.reset()
    gc.collect()
    return sum(weight() is not None for weight in weights)


@pytest.mark.parametrize("use", [call, backward, update, recompile, replace], ids=lambda use: use.__name__)
def test_the_weights_of_deleted_jitted_models_are_freed(use: Callable) -> None:
    assert weights_left(Net, forge.jit, use, 12) == 0


@pytest.mark.parametrize("make", [Breaking, Opaque], ids=lambda make: make.__name__)
def test_the_weights_of_models_with_graph_breaks_and_opaque_calls_are_freed(make: Callable) -> None:
    assert weights_left(make, forge.jit, update, 2) == 0


def test_the_weights_that_a_jitted_function_closes_over_are_freed() -> None:
    def jit(net: nn.Module) -> Callable:
        return forge.jit(lambda x: net(x) * 2)

    assert weights_left(Net, jit, update, 2) == 0


@pytest.mark.skipif(
    (3, 12) <= sys.version_info[:3] < (3, 12, 4),
    reason="inspect.getattr_static, which Dynamo calls, keeps classes until Python 3.12.4 (python/cpython#118013)",
)
def test_the_weights_of_a_jitted_model_inside_a_jitted_one_are_freed() -> None:
    assert weights_left(lambda: nn.Sequential(forge.jit(Net()), nn.Tanh()), forge.jit, update, 2) == 0


def test_a_deleted_model_is_freed_without_a_reset() -> None:
    net = Net()
    jitted = forge.jit(net)
    backward(jitted, net)
    weight = weakref.ref(net.first.weight)
    del net, jitted
    gc.collect()
    assert weight() is None


class Traced(Net):
    """A module whose frames are in a traceback, as torch's flight recorder keeps them for each collective."""

    tracebacks: ClassVar[list[CapturedTraceback]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        self.tracebacks.append(CapturedTraceback.extract())
        return self.second(hidden)


def programs_left(make: Callable[[], nn.Module]) -> list[Any]:
    """Return the programs that are alive after a jitted model was trained and deleted."""
    jitted = forge.jit(make())
    handle = handle_of(jitted)
    backward(jitted, jitted)
    assert handle.reports
    del jitted
    gc.collect()
    return handle.reports


@pytest.mark.parametrize(
    "make", [Net, Breaking, pytest.param(Opaque, marks=pytest.mark.slow), Traced], ids=lambda make: make.__name__
)
def test_the_programs_of_a_deleted_model_are_freed_without_a_reset(make: Callable) -> None:
    """Programs after a graph break are in the cache of a method's code, which lives as long as the class."""
    for _ in range(2):
        assert programs_left(make) == []


def test_a_backward_runs_after_its_model_is_deleted() -> None:
    net = Breaking()
    jitted = forge.jit(net)
    loss, expected = jitted(X).sum(), torch.autograd.grad(net(X).sum(), [*net.parameters()])
    del jitted
    gc.collect()
    torch.testing.assert_close(torch.autograd.grad(loss, [*net.parameters()]), expected)


def test_another_jitted_model_of_the_class_keeps_its_programs() -> None:
    models = [Breaking() for _ in range(3)]
    jitted = [forge.jit(each) for each in models]
    for each in jitted:
        backward(each, each)
    handle = handle_of(jitted[1])
    del jitted[0]
    gc.collect()
    assert len(handle.reports) == 2
    for each, model in zip(jitted, models[1:], strict=True):
        with torch.compiler.set_stance("fail_on_recompile"):
            torch.testing.assert_close(each(X), model(X))


@pytest.mark.slow  # as many as the limit, sequentially
def test_deleted_jitted_models_leave_the_recompile_limit_to_others() -> None:
    for _ in range(torch._dynamo.config.recompile_limit + 1):
        assert programs_left(Breaking) == []
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        torch.compile(Breaking(), backend="eager")(X)
    jitted = forge.jit(Breaking())
    jitted(X)
    assert forge.explain(jitted).graphs == 2


@pytest.mark.slow
def test_generated_text_goes_with_what_was_generated() -> None:
    def texts() -> int:
        gc.collect()
        gc.collect()  # frees the objects of the deleted jitted function
        return sum(path.startswith("<forge") for path in linecache.cache)

    before = texts()
    jitted = forge.jit(Net())
    backward(jitted, jitted)
    assert texts() == before + 2  # the forward's and the backward's
    del jitted
    assert texts() == before


def test_a_graph_that_dynamo_drops_is_dropped_from_the_record() -> None:
    jitted = forge.jit(Net())
    for _ in range(3):
        backward(jitted, jitted)
        assert len(handle_of(jitted).reports) == forge.explain(jitted).graphs == 1
        torch._dynamo.reset()
        gc.collect()
    assert handle_of(jitted).reports == []
    assert forge.last_traces(jitted) and forge.last_backward_traces(jitted)


def test_reasons_to_compile_again_are_kept_up_to_a_number() -> None:
    history = handle_of(forge.jit(Net())).history
    for reasons in (history.graph_breaks, history.recompiles):
        reasons.extend(map(str, range(10_000)))
        assert len(reasons) < 1000 and reasons[-1] == "9999"


def test_jit_of_a_jitted_function_has_a_record_of_its_own() -> None:
    inner = forge.jit(lambda x: x * 2)
    outer = forge.jit(inner)
    torch.testing.assert_close(outer(X), X * 2)
    assert forge.explain(outer).graphs == 1 and forge.explain(inner).graphs == 0


def test_parameters_of_a_jitted_module_can_be_swapped() -> None:
    """torch.utils.swap_tensors refuses tensors with weak references, for example from the captured program."""
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(3, 4)
    jitted = forge.jit(module)
    for _ in range(2):
        jitted(x).sum().backward()
        module.zero_grad()
        for parameter in list(module.parameters()):
            torch.utils.swap_tensors(parameter, nn.Parameter(torch.randn_like(parameter)))
        torch.testing.assert_close(jitted(x), module(x))


def test_a_jitted_module_is_converted_by_swapping() -> None:
    module, x = nn.Linear(4, 2), torch.randn(3, 4)
    jitted = forge.jit(module)
    with torch.no_grad():
        jitted(x)
    before = module.weight
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        jitted.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert module.weight is before and before.dtype == torch.float64
    torch.testing.assert_close(jitted(x.double()), module(x.double()))


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.linear(x)
        return hidden, hidden.unflatten(1, (2, 2)).pow(2)


def of_heads(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    heads = y.view(1, 6, 2, 2).transpose(1, 2)
    return y, heads, nn.functional.scaled_dot_product_attention(heads, heads, heads)


RETURN_WHAT_IS_SAVED: dict[str, Callable] = {
    "a value and a function of its view": lambda y: (y, y.view(-1) ** 2),
    "a view and a function of it": lambda y: (v := y.view(-1), v**2),
    "a view of a view": lambda y: (y, y.t()[1:].unsqueeze(0) ** 2),
    "a transpose": lambda y: (y, y.t() ** 2, y.exp()),
    "a slice": lambda y: (y, y[1:3] ** 2),
    "chunks": lambda y: (lambda a, b: (y, a * a, b))(*y.chunk(2)),
    "a dict": lambda y: {"whole": y, "rows": [row**2 for row in y.unbind(0)]},
    "a shape of more dims": lambda y: (y, y.expand(3, 6, 4) ** 2 * y.unsqueeze(0)),
    "a complex view": lambda y: (y, torch.view_as_complex(y.view(6, 2, 2)) ** 2),
    "heads of attention": of_heads,
}


@pytest.mark.parametrize("name", RETURN_WHAT_IS_SAVED)
def test_results_are_freed_where_no_backward_runs(name: str) -> None:
    """The node of the forward saves a view of a result, whose history is that node."""
    function = RETURN_WHAT_IS_SAVED[name]
    assert memory_left(forge.jit(lambda x, w: function(x @ w)), torch.randn(4, 4, requires_grad=True)) == 0


def test_results_of_a_module_are_freed_where_no_backward_runs() -> None:
    assert memory_left(forge.jit(Views())) == 0


def memory_left(jitted: Callable, *others: torch.Tensor) -> int:
    """Return the number of results of three calls whose memory is alive after deletion, without the garbage
    collector."""
    jitted(X, *others)  # compiles
    gc.disable()
    try:
        found = []
        for _ in range(3):
            results = [each for each in tree_leaves(jitted(X.clone(), *others)) if each.requires_grad]
            found += [weakref.ref(each.untyped_storage()) for each in results]
            del results
        assert len(found) >= 6
        return sum(memory() is not None for memory in found)
    finally:
        gc.enable()


def test_a_change_of_a_result_is_seen_by_the_view_of_it_that_is_saved() -> None:
    y, square = forge.jit(lambda x: (y := x @ x.t(), y.view(-1) ** 2))(X.clone().requires_grad_())
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()
