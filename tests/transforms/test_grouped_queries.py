"""Keys and values repeated for groups of queries are passed to attention without the repetition."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import forge
from forge import torchlang
from forge.compiler import passes
from forge.executors import OperatorExecutor

SDPA = "torch.nn.functional.scaled_dot_product_attention"
TIMES = 4


def qkv(batch: int = 2, length: int = 6) -> list[torch.Tensor]:
    heads = (2 * TIMES, 2, 2)
    return [torch.randn(batch, count, length, 8, requires_grad=True) for count in heads]


def repeat_kv(x: torch.Tensor) -> torch.Tensor:
    """Repeat keys or values as in transformers."""
    batch, heads, length, width = x.shape
    x = x[:, :, None, :, :].expand(batch, heads, TIMES, length, width)
    return x.reshape(batch, heads * TIMES, length, width)


def positions_first(x: torch.Tensor) -> torch.Tensor:
    """Return attention as in Llama's own code: heads and positions are transposed later."""
    x = x.transpose(1, 2)
    batch, length, heads, width = x.shape
    x = x[:, :, :, None, :].expand(batch, length, heads, TIMES, width).reshape(batch, length, heads * TIMES, width)
    return x.transpose(1, 2)


def grouped(function: Callable, *args: torch.Tensor, **options: object) -> bool:
    """Return whether the attention call uses groups; check its result and gradients against eager."""
    jitted = forge.jit(function, executors=["torch"], **options)
    actual, expected = jitted(*args), function(*args)
    torch.testing.assert_close(actual, expected)
    for ours, theirs in zip(*[torch.autograd.grad(each.sum(), args) for each in (actual, expected)], strict=True):
        torch.testing.assert_close(ours, theirs)
    (call,) = [bound for bound in optimized(jitted) if bound.symbol.id == SDPA]
    found = bool(call.kwargs.get("enable_gqa"))
    assert call.symbol.bind(call.args, call.kwargs)["key"].shape[1] == (2 if found else 2 * TIMES)
    return found


def optimized(jitted: Callable) -> list[forge.ir.BoundSymbol]:
    stages = ("fold_constants", "grouped_queries", "attention_masks", "cse")
    return next(stage for stage in reversed(forge.last_traces(jitted)) if stage.stage in stages).bound_symbols


def attend(repeat: Callable[[torch.Tensor], torch.Tensor], **options: object) -> Callable:
    return lambda q, k, v: F.scaled_dot_product_attention(q, repeat(k), repeat(v), **options)


REPEATS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expand and reshape": repeat_kv,
    "positions first": positions_first,
    "repeat_interleave": lambda x: torch.repeat_interleave(x, TIMES, dim=1),
    "repeat_interleave, from the back": lambda x: x.repeat_interleave(TIMES, -3).contiguous(),
    "unsqueeze and flatten": lambda x: x.unsqueeze(2).expand(-1, -1, TIMES, -1, -1).flatten(1, 2),
}
OTHER: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "each head in turn": lambda x: x.repeat(1, TIMES, 1, 1),
    "the groups before the heads": lambda x: x[:, None].expand(-1, TIMES, -1, -1, -1).flatten(1, 2),
    "positions": lambda x: torch.cat([x] * TIMES, 1).flip(1),
    "repeated, then changed": lambda x: repeat_kv(x) * 2,
    "without a gradient": lambda x: repeat_kv(x.detach()) + 0 * x.sum(),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", REPEATS)
def test_repeated_heads_become_groups(name: str, dynamic: bool | None) -> None:
    assert grouped(attend(REPEATS[name]), *qkv(), dynamic=dynamic)


@pytest.mark.parametrize("name", OTHER)
def test_what_is_repeated_otherwise_stays(name: str) -> None:
    assert not grouped(attend(OTHER[name]), *qkv())


@pytest.mark.parametrize(
    "options",
    [{"is_causal": True}, {"scale": 0.3}, {"attn_mask": torch.randn(2, 1, 6, 6)}],
    ids=lambda each: str(*each),
)
def test_the_calls_options_stay(options: dict[str, object]) -> None:
    assert grouped(attend(repeat_kv, **options), *qkv())


def test_only_both_of_key_and_value_become_groups() -> None:
    def one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, repeat_kv(k), v.repeat(1, TIMES, 1, 1))

    assert not grouped(one, *qkv())


def test_another_number_of_times_for_key_than_for_value_stays() -> None:
    query, key, _ = qkv()
    value = torch.randn(2, 4, 6, 8, requires_grad=True)

    def uneven(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, repeat_kv(k), v.repeat_interleave(2, 1))

    assert not grouped(uneven, query, key, value)


def test_where_torch_takes_its_composition_heads_stay_repeated() -> None:
    """The composition would repeat them again."""
    with sdpa_kernel(SDPBackend.MATH):
        jitted = forge.jit(attend(repeat_kv), executors=["torch"])
        jitted(*qkv())
    assert "enable_gqa" not in str(forge.last_traces(jitted)[-1])


def test_dropout_stays_as_it_is() -> None:
    """With the same seed the same values are dropped as in eager, which depends on the kernel."""
    function, args = attend(repeat_kv, dropout_p=0.5), qkv()
    jitted = forge.jit(function, executors=["torch"])
    torch.manual_seed(0)
    actual = jitted(*args)
    torch.manual_seed(0)
    torch.testing.assert_close(actual, function(*args))
    assert "enable_gqa" not in str(forge.last_traces(jitted)[-1])


def test_repeated_keys_that_the_program_returns_are_there() -> None:
    def both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = repeat_kv(k)
        return F.scaled_dot_product_attention(q, wide, repeat_kv(v)), wide

    args = qkv()
    jitted = forge.jit(both, executors=["torch"])
    torch.testing.assert_close(jitted(*args), both(*args))
    assert any(bound.kwargs.get("enable_gqa") for bound in optimized(jitted))


def test_a_call_for_which_another_kernel_was_named_stays() -> None:
    symbol = torchlang.scaled_dot_product_attention
    mine = OperatorExecutor("mine")
    mine.register_implementation(symbol, torchlang.torch_function_of(symbol))
    jitted = forge.jit(attend(repeat_kv), executors=[mine, "torch"])
    jitted(*qkv())
    assert not any(bound.kwargs.get("enable_gqa") for bound in optimized(jitted))


def test_a_second_backward_is_eagers() -> None:
    args = [each.detach().double().requires_grad_() for each in qkv()]
    function = attend(repeat_kv, is_causal=True)
    results = []
    for each in (forge.jit(function, executors=["torch"]), function):
        with sdpa_kernel(SDPBackend.MATH) if each is function else torch.enable_grad():
            first = torch.autograd.grad(each(*args).square().sum(), args, create_graph=True)
            results.append(torch.autograd.grad(sum(g.square().sum() for g in first), args))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("as_groups", [True, False])
@pytest.mark.parametrize("batch", [1, 2])
def test_one_head_of_keys_and_values(as_groups: bool, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is Falcon: torch would broadcast the head in its composition, in float32. The test pretends that a
    kernel takes it."""
    monkeypatch.setattr(passes, "takes_broadcast", lambda given, requires_grad: (as_groups, not as_groups))
    shapes = [(2, 4, 6, 8), (batch, 1, 6, 8), (batch, 1, 6, 8)]
    given = attend_to_one_head([torch.randn(shape, requires_grad=True) for shape in shapes])
    assert given["enable_gqa"] == (as_groups and batch == 2)
    assert given["key"].shape[:2] == ((2, 4) if not as_groups else (batch, 1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_one_head_of_keys_and_values_runs_in_a_kernel() -> None:
    shapes = [(2, 16, 256, 64), (2, 1, 256, 64), (2, 1, 256, 64)]
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    given = attend_to_one_head([torch.randn(shape, **options) for shape in shapes], rtol=0.02, atol=0.02)
    assert given["enable_gqa"] or given["key"].shape[1] == 16


def attend_to_one_head(inputs: list[torch.Tensor], **tolerance: float) -> dict[str, Any]:
    """Return the arguments of the attention call; check its result and gradients against eager."""
    program = partial(F.scaled_dot_product_attention, is_causal=True)
    jitted = forge.jit(lambda q, k, v: program(q, k, v), executors=["torch"])
    actual, expected = jitted(*inputs), program(*inputs)
    torch.testing.assert_close(actual, expected, **tolerance)
    for ours, theirs in zip(*[torch.autograd.grad(each.sum(), inputs) for each in (actual, expected)], strict=True):
        torch.testing.assert_close(ours, theirs, **{name: 10 * size for name, size in tolerance.items()})
    (call,) = [bound for bound in optimized(jitted) if bound.symbol.id == SDPA]
    return call.symbol.bind(call.args, call.kwargs)


def test_one_head_of_keys_stays_where_no_kernel_takes_it() -> None:
    q, k = (torch.randn(2, heads, 6, 8) for heads in (4, 1))
    jitted = forge.jit(lambda q, k: F.scaled_dot_product_attention(q, k, k), executors=["torch"])
    torch.testing.assert_close(jitted(q, k), F.scaled_dot_product_attention(q, k, k), rtol=0, atol=0)
    (call,) = [bound for bound in optimized(jitted) if bound.symbol.id == SDPA]
    given = call.symbol.bind(call.args, call.kwargs)
    assert not given["enable_gqa"] and given["key"].shape[1] == 1
