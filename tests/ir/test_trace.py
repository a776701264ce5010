"""Traces: names, scopes, tags, constants, derivation."""

import pytest
import torch

import forge
from forge import clang, prims
from forge.ir import Tag, TensorProxy, Trace, recording
from forge.ir.pytree import free_symbols, leaves, names, proxies, rename, tree_map

CPU = torch.device("cpu")


def new_trace(*inputs: str) -> Trace:
    trace = Trace()
    for name in inputs:
        trace.add_input(TensorProxy(name, (2,), torch.float32, CPU))
    return trace


def test_names_are_unique() -> None:
    trace = new_trace("x", "t0")
    assert [trace.fresh_name(), trace.fresh_name()] == ["t1", "t2"]
    assert trace.fresh_name("h") == "h"
    second = trace.fresh_name("h")
    assert second.startswith("h_") and second != trace.fresh_name("h")


def test_names_inside_of_adopted_calls_are_taken() -> None:
    other = new_trace("x")
    with recording(other, clang.language):
        forge.torchlang.softmax(other.inputs[0], 0)
    inside = {name for sub in other.bound_symbols[0].subsymbols for name in sub.outputs}
    trace = Trace()
    trace.adopt(other.bound_symbols)
    assert trace.bound_symbols == other.bound_symbols
    assert len(inside) > 1 and inside.isdisjoint(trace.fresh_name() for _ in range(10))


def test_a_proxy_takes_the_users_name() -> None:
    trace = new_trace("x")
    y = trace.tensor((2,), torch.float32, CPU)
    trace.rename(y, "hidden")
    assert y.name == "hidden" and "t0" not in trace.names
    z = trace.tensor((2,), torch.float32, CPU)
    trace.rename(z, "hidden")
    assert z.name.startswith("hidden_")


def test_collecting_takes_calls_out_of_the_trace() -> None:
    trace = new_trace("x")
    with recording(trace):
        with trace.collecting() as found:
            prims.neg(trace.inputs[0])
        prims.exp(trace.inputs[0])
    assert [bound.symbol for bound in found] == [prims.neg]
    assert [bound.symbol for bound in trace.bound_symbols] == [prims.exp]


def test_tagged_gives_exactly_its_tags_and_the_source_line() -> None:
    trace = new_trace("x")
    trace.tags = frozenset({Tag.NO_GRAD})
    with recording(trace):
        with trace.set_tags({Tag.RECOMPUTE}, "model.py:7"):
            prims.neg(trace.inputs[0])
        prims.exp(trace.inputs[0])
    inside, outside = trace.bound_symbols
    assert inside.tags == {Tag.RECOMPUTE} and inside.source == "model.py:7"
    assert outside.tags == {Tag.NO_GRAD} and outside.source is None


def test_a_derived_trace_shares_nothing_that_changes() -> None:
    trace = new_trace("x")
    trace.add_constant(torch.ones(2), "c")
    new = trace.derive("next", name="other", output=trace.inputs[0])
    new.add_constant(torch.zeros(2), "d")
    new.fresh_name("h")
    assert (new.name, new.stage, new.output_names) == ("other", "next", ["x"])
    assert list(trace.constants) == ["c"] and "h" not in trace.names and trace.output is None
    assert repr(new) == "<trace other, next, 0 calls>"


def test_the_same_program_recorded_twice_prints_the_same() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.exp(x * 2 + y)

    first, second = (str(forge.trace(function, torch.ones(3), torch.ones(3))) for _ in range(2))
    assert first == second


def test_parameters_of_the_function_name_the_inputs() -> None:
    def function(weights: list[torch.Tensor], *, bias: torch.Tensor) -> torch.Tensor:
        return weights[0] * weights[1] + bias

    trace = forge.trace(function, [torch.ones(2), torch.ones(2)], bias=torch.ones(2))
    assert trace.input_names == ["weights0", "weights1", "bias"]


# nests


def nest() -> tuple:
    x, y = (TensorProxy(name, (2,), torch.float32, CPU) for name in "xy")
    return (x, [1, {"key": y, "other": x}], slice(0, x, None)), x, y


def test_leaves_of_a_nest_come_in_order() -> None:
    tree, x, y = nest()
    assert list(leaves(tree)) == [x, 1, y, x, 0, x, None]
    assert proxies(tree) == [x, y, x, x] and names(tree) == ["x", "y", "x", "x"]


def test_tree_map_keeps_the_kind_of_every_nest() -> None:
    tree, _, y = nest()
    mapped = tree_map(lambda leaf: leaf.name, tree)
    assert mapped == ("x", [1, {"key": "y", "other": "x"}], slice(0, "x", None))
    assert rename(tree, {"x": y})[0] is y and tree[0].name == "x"
    result = torch.sort(torch.ones(2))
    assert type(tree_map(lambda leaf: 0, result)) in (tuple, type(result))


def test_symbolic_numbers_are_dependencies() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    size = _symbol(ShapeEnv(), 5)
    (symbol,) = free_symbols(size)
    assert names([size * 2 + 1]) == [symbol]


def _symbol(env: object, hint: int) -> torch.SymInt:
    from torch._dynamo.source import ConstantSource

    symbol = env.create_symbol(hint, ConstantSource("size"))
    return env.create_symintnode(symbol, hint=hint)


@pytest.mark.parametrize("value", [1, 1.5, True, None, "text", 2j])
def test_literals_are_left_as_they_are(value: object) -> None:
    assert tree_map(lambda leaf: pytest.fail("a literal is no leaf to map"), value) is value
    assert list(leaves(value)) == [value]
