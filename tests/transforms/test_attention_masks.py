"""Masks that depend on no input: causal ones become is_causal, those that hide nothing go; others stay."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import forge

SDPA = "torch.nn.functional.scaled_dot_product_attention"


def qkv(rows: int = 5, columns: int = 5) -> list[torch.Tensor]:
    return [torch.randn(2, 3, length, 4, requires_grad=True) for length in (rows, columns, columns)]


def ran(function: Callable, *args: torch.Tensor, dynamic: bool = False) -> tuple[bool, bool]:
    """Return whether the attention has a mask, and is causal; check its result and gradients against eager."""
    jitted = forge.jit(function, dynamic=dynamic)
    actual, expected = jitted(*args), function(*args)
    torch.testing.assert_close(actual, expected)
    wanted = [each for each in args if each.requires_grad]
    for ours, theirs in zip(*[torch.autograd.grad(each.sum(), wanted) for each in (actual, expected)], strict=True):
        torch.testing.assert_close(ours, theirs)
    hoisted = next(
        stage for stage in reversed(forge.last_traces(jitted)) if stage.stage in ("hoist", "attention_masks", "cse")
    )
    (call,) = [bound for bound in hoisted.bound_symbols if bound.symbol.id == SDPA]
    given = {
        **dict(zip(("q", "k", "v", "attn_mask", "dropout_p", "is_causal"), call.args, strict=False)),
        **call.kwargs,
    }
    return given.get("attn_mask") is not None, bool(given.get("is_causal"))


def attend(mask: Callable[[], torch.Tensor], **options: float) -> Callable:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask(), **options)


CAUSAL: dict[str, Callable[[], torch.Tensor]] = {
    "tril": lambda: torch.ones(5, 5).tril().bool(),
    "of positions, with a batch": lambda: (torch.arange(5)[:, None] >= torch.arange(5))[None, None].expand(2, 1, 5, 5),
    "added": lambda: torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf")),
}
OTHER: dict[str, Callable[[], torch.Tensor]] = {
    "sliding window": lambda: torch.ones(5, 5).tril().triu(-1).bool(),
    "strictly lower, with its first row open": lambda: torch.ones(5, 5).tril(-1).bool() | (torch.arange(5) == 0),
    "added with a finite minimum": lambda: torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -1e9),
    "added biases": lambda: torch.arange(25.0).view(5, 5),
    "one row for all": lambda: (torch.arange(5) < 3)[None],
    "another in one batch": lambda: torch.stack([torch.ones(5, 5).tril(), torch.ones(5, 5)]).bool()[:, None],
}


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_becomes_is_causal(name: str) -> None:
    assert ran(attend(CAUSAL[name]), *qkv()) == (False, True)


@pytest.mark.parametrize(
    "make", [lambda: torch.ones(5, 5).bool(), lambda: torch.zeros(1, 5), lambda: torch.ones(2, 1, 1, 5) > 0]
)
def test_a_mask_that_hides_nothing_goes(make: Callable[[], torch.Tensor]) -> None:
    assert ran(attend(make), *qkv()) == (False, False)


@pytest.mark.parametrize("name", OTHER)
def test_another_mask_stays(name: str) -> None:
    assert ran(attend(OTHER[name]), *qkv()) == (True, False)


def test_a_lower_triangle_of_other_lengths_stays() -> None:
    """is_causal would mean the same there, but for a bottom-right one, which is told apart by its values alone."""
    assert ran(attend(lambda: torch.ones(3, 5).tril().bool()), *qkv(3, 5)) == (True, False)
    assert ran(attend(lambda: torch.ones(3, 5).tril(2).bool()), *qkv(3, 5)) == (True, False)


def test_a_mask_of_the_input_stays() -> None:
    q, k, v = qkv()
    mask = torch.ones(5, 5).tril().bool()
    assert ran(lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask), q, k, v, mask) == (True, False)


def test_with_dropout_the_mask_stays() -> None:
    """Under one seed the same values are dropped as in eager, which depends on the kernel."""
    jitted, q = forge.jit(attend(CAUSAL["tril"], dropout_p=0.5)), qkv()
    torch.manual_seed(0)
    actual = jitted(*q)
    torch.manual_seed(0)
    torch.testing.assert_close(actual, attend(CAUSAL["tril"], dropout_p=0.5)(*q))
    assert "attention_masks" not in [stage.stage for stage in forge.last_traces(jitted)]


def test_a_mask_of_a_length_that_changes_stays() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(q.shape[-2])[:, None] >= torch.arange(k.shape[-2])
        return F.scaled_dot_product_attention(q, k, v, mask)

    assert ran(attend, *qkv(), dynamic=True) == (True, False)


def test_one_mask_for_several_calls() -> None:
    def twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(5, 5).tril().bool()
        first = F.scaled_dot_product_attention(q, k, v, mask)
        return F.scaled_dot_product_attention(first, k, v, attn_mask=mask, scale=0.3)

    jitted, args = forge.jit(twice), qkv()
    torch.testing.assert_close(jitted(*args), twice(*args))
    text = str(next(stage for stage in forge.last_traces(jitted) if stage.stage == "attention_masks"))
    assert text.count("is_causal=True") == 2
