"""The claim pass: order, checkers and their reasons, execution transforms, errors."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
from forge import clang, prims, torchlang
from forge.executors import Declined, OperatorExecutor, claim, decline, registry, resolve_executors
from forge.ir import Symbol, TensorProxy, Trace, recording
from forge.prims.core import like

TORCH = resolve_executors(["torch"])


def executor(name: str, *symbols: Symbol, **how: Any) -> OperatorExecutor:
    """Return an executor that runs these symbols with a function named after itself."""
    mine = OperatorExecutor(name)
    for symbol in symbols:
        mine.register_implementation(symbol, lambda *args, **kwargs: None, **how)
    return mine


def silu() -> Trace:
    return forge.trace(lambda x: F.silu(x), torch.ones(2))


def who(trace: Trace, *executors: OperatorExecutor) -> list[str]:
    return [found.executor for found in claim(trace, executors)[1]]


def test_the_first_executor_that_has_a_symbol_claims_it() -> None:
    first, second = executor("first", torchlang.silu), executor("second", torchlang.silu)
    assert who(silu(), first, second) == ["first"]
    assert who(silu(), second, first) == ["second"]


def test_a_whole_call_is_claimed_before_what_is_inside() -> None:
    """A later executor that takes the whole call precedes an earlier one that takes a part of it."""
    part, whole = executor("part", prims.sigmoid), executor("whole", torchlang.silu)
    assert who(silu(), part, whole) == ["whole"]


def test_what_nobody_has_whole_is_claimed_in_parts() -> None:
    part = executor("part", prims.sigmoid)
    claimed, claims = claim(silu(), [part, *resolve_executors(["torch-prims"])])
    assert [found.executor for found in claims] == ["part", "torch-prims"]
    assert [found.level for found in claims] == [2, 2]
    assert [bound.symbol.name for bound in claimed.bound_symbols] == ["sigmoid", "mul"]


def test_a_checker_is_asked_with_the_arguments_of_the_call() -> None:
    asked: list[tuple] = []

    def checker(*args: Any, **kwargs: Any) -> bool:
        asked.append((args, kwargs))
        return True

    trace = forge.trace(lambda x: torch.add(x, 1, alpha=2), torch.ones(2))
    claim(trace, [executor("mine", torchlang.add, checker=checker)])
    ((args, kwargs),) = asked
    assert isinstance(args[0], TensorProxy) and args[1] == 1 and kwargs == {"alpha": 2}


def test_reasons_for_declining_are_kept_down_to_the_parts() -> None:
    no = executor("no", torchlang.silu, checker=lambda x: decline("H = 2 is not a multiple of 8"))
    mute = executor("mute", torchlang.silu, checker=lambda x: False)
    _, claims = claim(silu(), [no, mute, *resolve_executors(["torch-prims"])])
    assert [found.declined for found in claims] == [
        [("no", "H = 2 is not a multiple of 8"), ("mute", "the checker declined without a reason")]
    ] * len(claims)


def test_a_reason_is_false() -> None:
    assert not decline("why") and isinstance(decline("why"), Declined)
    assert repr(decline("why")) == "Declined('why')"


def test_a_prim_that_nobody_claims_is_an_error_with_all_reasons() -> None:
    trace = forge.trace(lambda x: torch.exp(x), torch.ones(2))
    no = executor("no", prims.exp, checker=lambda x: decline("only on Sundays"))
    with pytest.raises(
        NotImplementedError, match=r"no executor claims prims\.exp\(x: f32\[2\] cpu\); asked no: no: only"
    ):
        claim(trace, [no])
    with pytest.raises(NotImplementedError, match="asked other: none of them has it"):
        claim(trace, [executor("other")])


def test_a_prim_that_another_registered_executor_has_is_an_error_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    prim = Symbol("theirs", "test.theirs", meta=lambda x: like(x))
    monkeypatch.setitem(registry._executors, "theirs", executor("theirs", prim))
    trace = Trace()
    with recording(trace, clang.language):
        trace.output = prim(trace.add_input(TensorProxy("x", (2,), torch.float32, torch.device("cpu"))))
    with pytest.raises(NotImplementedError, match="none of them has it; add 'theirs' to executors, which has it"):
        claim(trace, TORCH)


def test_an_execution_transform_calls_operators_in_place_of_the_symbol() -> None:
    mine = OperatorExecutor("mine")
    half = mine.register_operator("half", meta=lambda x: like(x), fn=lambda x: x / 2)
    twice = mine.register_operator("twice", like=prims.neg, fn=lambda x: x * 2)

    def transform(x: TensorProxy) -> TensorProxy:
        return twice(half(half(x)))

    mine.register_implementation(torchlang.silu, execution_transform=transform)
    trace = silu()
    claimed, claims = claim(trace, [mine])
    assert [bound.symbol.id for bound in claimed.bound_symbols] == ["mine.half", "mine.half", "mine.twice"]
    assert claimed.bound_symbols[-1].outputs == trace.output_names and len(claims) == 1
    assert torch.equal(claimed.python_callable()(torch.ones(2)), torch.full((2,), 0.5))


def test_an_operator_like_a_composite_has_its_metadata_and_records_nothing_else() -> None:
    mine = OperatorExecutor("mine")
    linear = mine.register_operator("linear", like=torchlang.linear, fn=F.linear)
    mine.register_implementation(torchlang.linear, execution_transform=lambda *args: linear(*args))
    x, w = torch.ones(2, 3), torch.ones(4, 3)
    claimed, _ = claim(forge.trace(F.linear, x, w), [mine])
    (bound,) = claimed.bound_symbols
    assert bound.symbol is linear and bound.output.shape == (2, 4)
    assert torch.equal(claimed.python_callable()(x, w), F.linear(x, w))


def test_an_execution_transform_that_calls_a_prim_is_an_error_that_says_so() -> None:
    mine = OperatorExecutor("mine")
    mine.register_implementation(torchlang.silu, execution_transform=lambda x: prims.neg(x))
    with pytest.raises(TypeError, match=r"executor mine: its execution_transform of torch.* calls prims\.neg"):
        claim(silu(), [mine])


def test_an_execution_transform_that_returns_its_input_is_an_error_that_says_so() -> None:
    mine = OperatorExecutor("mine")
    mine.register_implementation(torchlang.silu, execution_transform=lambda x: x)
    with pytest.raises(ValueError, match=r"executor mine: its execution_transform of torch.* returns its input"):
        claim(silu(), [mine])


def test_a_claimed_call_keeps_what_it_was_as_its_subsymbol() -> None:
    claimed, _ = claim(forge.trace(lambda x: torch.exp(x), torch.ones(2)), TORCH)
    (bound,) = claimed.bound_symbols
    assert bound.symbol.op is torch.exp and bound.subsymbols[0].symbol is torchlang.exp


def test_claiming_twice_changes_nothing() -> None:
    claimed, _ = claim(silu(), TORCH)
    again, claims = claim(claimed, TORCH)
    assert str(again) == str(claimed) and [found.executor for found in claims] == ["torch"]


def test_clang_calls_are_claimed_where_torch_does_the_same() -> None:
    claimed, _ = claim(forge.trace(lambda x, y: clang.add(x, y), torch.ones(2), torch.ones(3, 2)), TORCH)
    assert [bound.symbol.op for bound in claimed.bound_symbols] == [torch.add]
