"""The rewriting of calls by rules, and the update of the rest of the program."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
from forge.ir import BoundSymbol, Trace
from forge.transforms import rewrite


def without(name: str) -> Any:
    """Return a transform that drops the calls of a symbol."""
    return lambda trace: rewrite(trace, "dropped", lambda call: call.args[0] if call.symbol.name == name else None)


def jitted(function: Any, *transforms: Any) -> Any:
    return forge.jit(function, executors=["torch"], transforms=transforms, cache=False)


def after(function: Any) -> Trace:
    return next(trace for trace in forge.last_traces(function) if trace.stage in ("dropped", "doubled"))


def test_what_reads_a_dropped_result_reads_what_replaces_it() -> None:
    """The readers are in nested arguments, keywords, calls inside a composite, and behind several dropped calls."""

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.cat([x.relu().relu(), y]), weight=y.relu())

    x, y = -torch.rand(2, 3), (-torch.rand(2, 3)).requires_grad_()
    function = jitted(program, without("relu"))
    result = function(x, y)
    torch.testing.assert_close(result, F.linear(torch.cat([x, y]), y))
    assert [bound.symbol.name for bound in after(function).bound_symbols] == ["cat", "linear"]
    result.sum().backward()
    assert y.grad is not None


def test_a_returned_result_keeps_memory_of_its_own() -> None:
    x = -torch.rand(2, 3)
    function = jitted(lambda x: (x.relu(), x.relu().view(-1), x.relu().t()), without("relu"))
    results = function(x)
    assert len({each.untyped_storage().data_ptr() for each in (x, *results)}) == 4
    torch.testing.assert_close(results, (x, x.view(-1), x.t()))


def test_a_view_in_the_place_of_a_returned_result_is_cloned_and_a_new_value_is_not() -> None:
    def flipped(trace: Trace) -> Trace:
        return rewrite(trace, "doubled", lambda call: call.args[0].t() if call.symbol.name == "relu" else None)

    def doubled(trace: Trace) -> Trace:
        return rewrite(trace, "doubled", lambda call: (call.args[0] * 2).t() if call.symbol.name == "relu" else None)

    x = torch.arange(4.0).view(2, 2)
    for transform, calls, expected in ((flipped, ["t", "clone"], x.t()), (doubled, ["mul", "t"], x.t() * 2)):
        function = jitted(lambda x: x.relu(), transform)
        result = function(x)
        torch.testing.assert_close(result, expected)
        assert result.data_ptr() != x.data_ptr()
        assert [bound.symbol.name for bound in after(function).bound_symbols] == calls


def test_calls_of_a_rule_have_the_place_the_tags_and_the_name_of_what_they_replace() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x.relu()
        return x * y

    def doubled(trace: Trace) -> Trace:
        return rewrite(trace, "doubled", lambda call: torch.add(*call.args, 1) if call.symbol.name == "relu" else None)

    x = torch.ones(3, requires_grad=True)
    function = jitted(program, doubled)
    function(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2, 2, 2]
    before, added = forge.last_traces(function)[0].bound_symbols[0], after(function).bound_symbols[0]
    assert (added.tags, added.source, added.outputs) == (before.tags, before.source, before.outputs)
    assert added.symbol.name == "add" and added.source is not None


def test_a_rule_that_replaces_nothing_gives_the_trace_itself() -> None:
    def records_and_keeps(call: BoundSymbol) -> None:
        torch.relu(call.args[0])

    trace = forge.trace(lambda x: x.relu() + 1, torch.ones(2))
    assert rewrite(trace, "same", records_and_keeps) is trace


def test_a_replacement_of_another_shape_is_an_error_with_both() -> None:
    trace = forge.trace(lambda x: x.sum(0) + 1, torch.ones(2, 3))
    with pytest.raises(
        ValueError, match=r"dropped: .*torch.sum.* gives f32\[3\], but its replacement gives f32\[2, 3\]"
    ):
        without("sum")(trace)


@pytest.mark.parametrize(
    ("given", "name"), [(1.0, "float"), (True, "bool"), ("x", "str"), (torch.ones(2), "Tensor")], ids=str
)
def test_a_replacement_that_is_no_value_of_the_program_is_an_error_with_its_type(given: Any, name: str) -> None:
    trace = forge.trace(lambda x: x.relu() + 1, torch.ones(2))
    with pytest.raises(ValueError, match=rf"its replacement gives a {name} that is no value of the program \(forge\.t"):
        rewrite(trace, "dropped", lambda call: given if call.symbol.name == "relu" else None)


def _with_item(x: Any) -> Any:
    y = x.clone()
    y[0] = 5
    return y


IN_PLACE = {
    "a method": lambda x: x.tanh_(),
    "an option": lambda x: F.relu(x, inplace=True),
    "out": lambda x: torch.tanh(x, out=x),
    "a view": lambda x: x.view(-1).tanh_(),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_rule_that_changes_an_earlier_value_is_an_error(name: str) -> None:
    trace = forge.trace(lambda x: (x * 2).tanh() + 1, torch.ones(2))
    message = r"dropped: the replacement of .*torch\.tanh.* changes t0: f32\[2\] cpu in place: return a new value"
    with pytest.raises(ValueError, match=message):
        rewrite(trace, "dropped", lambda call: IN_PLACE[name](call.args[0]) if call.symbol.name == "tanh" else None)


@pytest.mark.parametrize("change", [lambda x: (x * 1).tanh_(), _with_item, lambda x: (x + 1).view(-1).mul_(2)])
def test_a_rule_may_change_its_own_values(change: Any) -> None:
    def changed(trace: Trace) -> Trace:
        return rewrite(trace, "dropped", lambda call: change(call.args[0]) if call.symbol.name == "relu" else None)

    x = torch.randn(3)
    torch.testing.assert_close(jitted(lambda x: (x.relu() + 1, x), changed)(x), (change(x) + 1, x))
