"""Products fused with the calls that follow. Their claiming and timing is tested in
tests/executors/test_products.py."""

import torch

import forge
from forge.ir import BoundSymbol, Symbol, Tag, Trace
from forge.transforms import dce, products
from forge.transforms.products import ProductSymbol


def grouped(trace: Trace, views: tuple[str, ...] = ()) -> list[str]:
    """Return the names of the calls after products are fused with those that follow; a sum is fused."""
    new = products(
        trace,
        is_product=lambda bound: bound.symbol.name == "matmul",
        is_epilogue=lambda bound: bound.symbol.name != "sum",
        is_fused=lambda bound: bound.symbol.name == "sum",
        views=views,
        wins=lambda call, measured: True,
    )
    return [bound.symbol.name for bound in new.bound_symbols]


def traced() -> Trace:
    x, w, r = (torch.randn(4, 4) for _ in range(3))
    return forge.trace(lambda x, w, r: (x @ w) + r, x, w, r)


def test_a_product_and_what_follows_are_one_call() -> None:
    trace = traced()
    assert grouped(trace) == ["matmul_add"]


def test_no_call_moves_behind_an_effect() -> None:
    trace = traced()
    note = Symbol("note", "test.note", meta=lambda x: None, tags=frozenset({Tag.EFFECT}))
    product, add = trace.bound_symbols
    trace.bound_symbols[:] = [product, BoundSymbol(note, (trace.inputs[0],), {}, None), add]
    assert grouped(trace) == ["matmul", "note", "add"]


def test_no_call_returns_a_view_of_its_product() -> None:
    trace = dce(forge.trace(lambda x, w: (x @ w).t(), torch.randn(4, 4), torch.randn(4, 4)))
    assert grouped(trace) == ["matmul_t"]
    assert grouped(trace, tuple(trace.bound_symbols[1].outputs)) == ["matmul", "t"]


def test_a_call_of_several_has_their_metadata_where_it_is_recorded_again() -> None:
    trace = traced()
    new = products(
        trace,
        is_product=lambda bound: bound.symbol.name == "matmul",
        is_epilogue=lambda bound: True,
        is_fused=lambda bound: False,
        views=(),
        wins=lambda call, measured: call is measured,
    )
    (call,) = new.bound_symbols
    assert isinstance(call.symbol, ProductSymbol)
    again = forge.trace(lambda *inputs: call.symbol(call.args[0], *inputs), *(torch.randn(4, 4) for _ in range(3)))
    (repeated,) = again.bound_symbols
    assert [sub.symbol for sub in repeated.subsymbols] == [sub.symbol for sub in call.subsymbols]
    assert [proxy.shape for proxy in repeated.output] == [proxy.shape for proxy in call.output]
