"""Masks that depend on no input: causal ones become is_causal, those that mask nothing are removed; others stay."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
from forge.transforms.attention_masks import Band, find_band

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
        stage
        for stage in reversed(forge.last_traces(jitted))
        if stage.stage in ("fold_constants", "attention_masks", "cse")
    )
    (call,) = [bound for bound in hoisted.bound_symbols if bound.symbol.id == SDPA]
    given = {
        **dict(zip(("q", "k", "v", "attn_mask", "dropout_p", "is_causal"), call.args, strict=False)),
        **call.kwargs,
    }
    return given.get("attn_mask") is not None, bool(given.get("is_causal"))


def attend(mask: Callable[[], torch.Tensor], **options: Any) -> Callable:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask(), **options)


CAUSAL: dict[str, Callable[[], torch.Tensor]] = {
    "tril": lambda: torch.ones(5, 5).tril().bool(),
    "of positions, with a batch": lambda: (torch.arange(5)[:, None] >= torch.arange(5))[None, None].expand(2, 1, 5, 5),
    "added": lambda: torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf")),
    "added with the lowest number": lambda: torch.full((5, 5), torch.finfo(torch.float32).min).triu(1),
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


@pytest.mark.parametrize("scale", [-0.5, 0.0])
@pytest.mark.parametrize("mask", [*CAUSAL.values(), lambda: torch.ones(5, 5, dtype=torch.bool)])
def test_with_a_scale_that_turns_scores_the_mask_stays(mask: Callable, scale: float) -> None:
    """torch's kernels mask a score by -inf before they scale it."""
    assert ran(attend(mask, scale=scale), *qkv()) == (True, False)


def test_a_lower_triangle_of_other_lengths_stays() -> None:
    """is_causal would have the same meaning there, except for a bottom-right triangle, which only its values
    distinguish."""
    assert ran(attend(lambda: torch.ones(3, 5).tril().bool()), *qkv(3, 5)) == (True, False)
    assert ran(attend(lambda: torch.ones(3, 5).tril(2).bool()), *qkv(3, 5)) == (True, False)


def test_a_mask_of_the_input_stays() -> None:
    q, k, v = qkv()
    mask = torch.ones(5, 5).tril().bool()
    assert ran(lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask), q, k, v, mask) == (True, False)


def test_with_dropout_the_mask_stays() -> None:
    """With the same seed the same values are dropped as in eager, which depends on the kernel."""
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


def band(left: int, right: int, length: int = 6) -> torch.Tensor:
    return torch.ones(length, length).bool().triu(-left).tril(right)


def added(mask: torch.Tensor, hidden: float = float("-inf"), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, hidden)


BANDS: dict[str, tuple[torch.Tensor, Band]] = {
    **{f"{left}, {right}": (band(left, right), Band(left, right)) for left in range(5) for right in range(5)},
    "without a left side": (band(5, 2), Band(None, 2)),
    "without a left side, farther": (band(9, 0), Band(None, 0)),
    "without a right side": (band(1, 5), Band(1, None)),
    "open": (band(5, 5), Band(None, None)),
    "of each head": (band(2, 1).repeat(2, 3, 1, 1), Band(2, 1)),
    "expanded": (band(2, 1).expand(2, 3, 6, 6), Band(2, 1)),
    "expanded batch, own heads": (band(2, 1).repeat(3, 1, 1).expand(2, 3, 6, 6), Band(2, 1)),
    "-inf": (added(band(2, 0)), Band(2, 0)),
    "lowest": (added(band(2, 0), torch.finfo(torch.float32).min), Band(2, 0)),
    "lowest bfloat16": (added(band(2, 0), torch.finfo(torch.bfloat16).min, torch.bfloat16), Band(2, 0)),
    "lowest float16": (added(band(2, 0), torch.finfo(torch.float16).min, torch.float16), Band(2, 0)),
    "one position": (torch.ones(1, 1).bool(), Band(None, None)),
    "of another length, open": (torch.ones(3, 5).bool(), Band(None, None)),
}


def changed(mask: torch.Tensor, *index: int) -> torch.Tensor:
    mask = mask.clone()
    mask[index] = ~mask[index] if mask.dtype == torch.bool else -1.0
    return mask


NO_BANDS: dict[str, torch.Tensor] = {
    **{f"but for {i}, {j}": changed(band(2, 1), i, j) for i in range(6) for j in range(6)},
    "but for one head": changed(band(2, 1).repeat(2, 3, 1, 1), 1, 2, 5, 5),
    "of two windows": torch.stack([band(2, 1), band(1, 1)])[:, None],
    "above the diagonal": torch.ones(6, 6).bool().triu(1),
    "below the diagonal": torch.ones(6, 6).bool().tril(-1),
    "of nothing": torch.zeros(6, 6).bool(),
    "dilated": (torch.arange(6)[:, None] - torch.arange(6)) % 2 == 0,
    "chunks": torch.block_diag(torch.ones(3, 3), torch.ones(3, 3)).bool(),
    "of other lengths": torch.ones(4, 6).bool().tril(),
    "added, with a bias": changed(added(band(2, 1)), 3, 3),
    "added, hidden by less": added(band(2, 1), -1e9),
    "added, with a NaN": added(band(2, 1), float("nan")),
    "added, with an infinity": added(band(2, 1), float("inf")),
    "one row": torch.ones(1, 6).tril().bool(),
}


@pytest.mark.parametrize("name", BANDS)
def test_a_band_is_found(name: str) -> None:
    mask, expected = BANDS[name]
    assert find_band(mask) == expected


@pytest.mark.parametrize("name", NO_BANDS)
def test_no_band_is_found(name: str) -> None:
    assert find_band(NO_BANDS[name]) is None
