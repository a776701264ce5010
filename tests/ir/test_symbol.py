"""Symbols, bound symbols, proxies and the state in which they are recorded."""

import pytest
import torch

import forge
from forge import clang, prims, torchlang
from forge.ir import (
    BoundSymbol,
    NumberProxy,
    Symbol,
    Tag,
    TensorProxy,
    Trace,
    check,
    current_trace,
    recording,
    set_language,
)
from forge.ir.proxies import short_dtype
from forge.ir.symbol import substitute

CPU = torch.device("cpu")


def proxy(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> TensorProxy:
    return TensorProxy(name, shape, dtype, CPU)


def test_a_symbol_has_a_meta_or_a_body() -> None:
    with pytest.raises(AssertionError, match=r"test\.both: a symbol has a meta or a body"):
        Symbol("both", "test.both", meta=lambda: None, body=lambda: None)
    with pytest.raises(AssertionError, match="a meta or a body"):
        Symbol("neither", "test.neither")


def test_a_symbol_documents_itself_with_its_meta_or_body() -> None:
    assert prims.exp2.is_prim and not clang.mean.is_prim
    assert prims.exp2.__doc__.startswith("2^x")
    assert repr(prims.exp2) == "<symbol prims.exp2>"


def test_a_composite_records_its_calls_inside() -> None:
    trace = forge.trace(lambda x: torch.exp2(x), torch.ones(2))
    (bound,) = trace.bound_symbols
    assert bound.symbol is torchlang.exp2
    assert [sub.symbol.id for sub in bound.subsymbols] == ["clang.exp2"]
    assert [sub.symbol for sub in bound.subsymbols[0].subsymbols] == [prims.exp2]


def test_an_identity_records_nothing() -> None:
    trace = Trace()
    x = trace.add_input(proxy("x", 2))
    with recording(trace, clang.language):
        assert clang.to(x, torch.float32) is x
        assert clang.reshape(x, (-1,)) is x
    assert trace.bound_symbols == []


def test_a_scope_closes_when_a_body_raises() -> None:
    trace = Trace()
    x = trace.add_input(proxy("x", 2))
    with recording(trace, clang.language):
        with pytest.raises(RuntimeError, match="number of dims"):
            clang.permute(x, (0, 1))
        clang.exp(x)
    assert [bound.symbol for bound in trace.bound_symbols] == [clang.exp]


def test_a_bound_symbol_knows_what_it_reads_and_defines() -> None:
    x, y, out = proxy("x", 2), proxy("y", 2), proxy("out", 2)
    bound = BoundSymbol(prims.cat, ([x, y, x],), {"dim": 0}, out)
    assert bound.inputs == ["x", "y"]
    assert bound.outputs == ["out"]
    assert repr(bound) == "out = prims.cat([x, y, x], dim=0)"
    assert BoundSymbol(prims.neg, (x,), {}, x).outputs == []  # an output that is an input is not defined here


def test_replace_makes_another_bound_symbol() -> None:
    """A bound symbol is never changed after it was recorded; `replace` leaves the first as it was."""
    x, out, other = proxy("x", 2), proxy("out", 2), proxy("other", 2)
    bound = BoundSymbol(prims.neg, (x,), {}, out, source="model.py:1", tags=frozenset({Tag.NO_GRAD}))
    changed = bound.replace(output=other)
    assert bound.output is out and bound.outputs == ["out"]
    assert changed.output is other and changed.outputs == ["other"]
    assert (changed.symbol, changed.args, changed.source, changed.tags) == (
        bound.symbol,
        bound.args,
        bound.source,
        bound.tags,
    )
    with pytest.raises(AttributeError):
        bound.anything = 1


def _snapshot(calls: list[BoundSymbol]) -> list[tuple]:
    return [
        (
            id(bound),
            bound.symbol.id,
            repr(bound.args),
            repr(bound.kwargs),
            repr(bound.output),
            _snapshot(bound.subsymbols),
        )
        for bound in calls
    ]


def test_transforms_leave_the_trace_they_are_given() -> None:
    from forge.executors import claim, resolve_executors
    from forge.transforms import cse, dce, delete_last_used

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        unused = x * 3  # noqa: F841
        return torch.relu(x @ w) + torch.relu(x @ w)

    trace = forge.trace(function, torch.ones(2, 3), torch.ones(3, 4))
    before = _snapshot(trace.bound_symbols), str(trace)
    claimed, _ = claim(cse(dce(trace)), resolve_executors(["torch"]))
    delete_last_used(claimed)
    assert (_snapshot(trace.bound_symbols), str(trace)) == before


def test_tags_are_those_of_the_call_its_symbol_and_the_calls_inside() -> None:
    x = proxy("x", 2)
    inner = BoundSymbol(prims.detach, (x,), {}, proxy("y", 2))
    outer = BoundSymbol(torchlang.relu, (x,), {}, inner.output, [inner], tags=frozenset({Tag.RECOMPUTE}))
    assert outer.all_tags == {Tag.VIEW, Tag.NOT_DIFFERENTIABLE, Tag.RECOMPUTE}


def test_substitute_renames_inside_and_out() -> None:
    x, y, out = proxy("x", 2), proxy("y", 2), proxy("out", 2)
    inner = BoundSymbol(prims.neg, (x,), {}, out)
    outer = BoundSymbol(torchlang.neg, (x,), {}, out, [inner])
    renamed = substitute(outer, {"x": y})
    assert renamed.inputs == ["y"] and renamed.subsymbols[0].inputs == ["y"]
    assert outer.inputs == ["x"] and inner.inputs == ["x"]
    assert substitute(inner, {"nothing": y}) is inner


def test_a_symbol_outside_of_a_trace_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"called outside of a trace; use forge\.trace"):
        prims.exp2(proxy("x", 2))
    with pytest.raises(RuntimeError, match="outside of a trace"):
        current_trace()


def test_check_raises_what_it_is_told_and_formats_only_then() -> None:
    check(True, lambda: pytest.fail("a passing check formats nothing"))
    with pytest.raises(ValueError, match="too long"):
        check(False, lambda: "too long")
    with pytest.raises(IndexError, match="out of range"):
        check(False, lambda: "out of range", IndexError)


# proxies


def test_a_tensor_proxy_answers_questions_about_metadata() -> None:
    x = TensorProxy("x", (2, 3), torch.bfloat16, CPU, requires_grad=True, strides=(3, 1))
    assert (x.ndim, x.dim(), x.numel(), x.element_size(), len(x)) == (2, 2, 6, 2, 2)
    assert x.size() == (2, 3) and x.size(-1) == 3
    assert x.is_floating_point() and not x.is_complex() and not x.is_cuda
    assert x.layout is torch.strided and x.requires_grad and x.strides == (3, 1)
    assert repr(x) == "x: bf16[2, 3] cpu"


def test_short_dtype_names_every_dtype() -> None:
    assert short_dtype(torch.float32) == "f32" and short_dtype(torch.bool) == "bool"
    assert short_dtype(torch.float8_e4m3fn) == "float8_e4m3fn"


def test_a_branch_on_a_proxy_is_an_error_with_a_way_out() -> None:
    with pytest.raises(TypeError, match=r"the value of x: f32\[2\] cpu is not known while tracing.*torch\.where"):
        bool(proxy("x", 2))


def test_a_0d_proxy_has_no_length() -> None:
    with pytest.raises(TypeError, match=r"len\(\) of a 0-d tensor"):
        len(proxy("x"))
    with pytest.raises(TypeError, match="iteration over a 0-d tensor"):
        iter(proxy("x"))


def test_operators_outside_of_a_trace_are_errors() -> None:
    x = proxy("x", 2)
    with pytest.raises(TypeError, match="does not support 'add' outside of a trace"):
        x + 1
    with pytest.raises(AttributeError, match="has no attribute 'sum' outside of a trace"):
        x.sum  # noqa: B018
    with pytest.raises(TypeError, match=r"'eq' outside of a trace; compare proxies by `is` or by \.name"):
        x == 2  # noqa: B015
    with pytest.raises(TypeError, match="the current language has no torch functions"):
        torch.exp(x)


def test_a_language_decides_what_operators_mean() -> None:
    trace = Trace()
    x = trace.add_input(proxy("x", 2))
    with recording(trace, torchlang.language):
        x + 1
        with set_language(clang.language):
            x + 1
            with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
                x.nothing  # noqa: B018
            with pytest.raises(TypeError, match="no torch functions"):
                torch.exp(x)
    assert [bound.symbol for bound in trace.bound_symbols] == [torchlang.add, clang.add]


def test_a_torch_function_in_a_body_is_an_error_that_names_the_symbol() -> None:
    inner = Symbol("inner", "test.inner", body=lambda x: torch.exp(x))
    outer = Symbol("outer", "test.outer", body=lambda x: inner(x))
    with (
        recording(Trace(), clang.language),
        pytest.raises(TypeError, match=r"exp was called .* in the body of test\.inner, .* forge\.torchlang\.exp"),
    ):
        outer(proxy("x", 2))


def test_a_reflected_operator_keeps_its_order() -> None:
    trace = forge.trace(lambda x: 1 - x, torch.ones(2))
    assert trace.bound_symbols[0].args[0] == 1


def test_a_number_proxy_shows_its_kind() -> None:
    assert repr(NumberProxy("n", 3)) == "n: int"


def test_a_call_shows_its_literals() -> None:
    (call,) = forge.trace(lambda x: torch.mul(x, 2), torch.ones(3)).bound_symbols
    assert repr(call) == "t0 = torch.mul(x, 2)"
