"""Attention whose mask hides all but a band and depends on an input is computed block by block."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import forge
from forge.transforms.attention_blocks import Blocks, attention_blocks, blocks_of, find_reach, is_profitable

SDPA = "torch.nn.functional.scaled_dot_product_attention"
LENGTH = 512
SIZES, STEP = (32, 64), 16


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use block sizes that are fast to test, on the CPU."""
    pays = lambda given, blocks: 2 * blocks.keys <= LENGTH
    as_on_a_gpu = partial(attention_blocks, device="cpu", pays=pays, sizes=SIZES, step=STEP)
    monkeypatch.setattr("forge.transforms.attention_blocks", as_on_a_gpu)


def qkv(heads: tuple[int, int] = (2, 2), batch: int = 2, length: int = LENGTH) -> list[torch.Tensor]:
    shapes = [(batch, length, count, 8) for count in (heads[0], *heads[1:] * 2)]
    return [torch.randn(*shape, requires_grad=True).transpose(1, 2) for shape in shapes]


def padding(batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    mask = torch.ones(batch, length, dtype=torch.bool)
    mask[0, length * 3 // 4 :] = False  # rows there are fully masked
    mask[-1, :5] = False
    return mask


def band(left: int, right: int, length: int = LENGTH) -> torch.Tensor:
    positions = torch.arange(length)
    distance = positions - positions[:, None]
    return (distance >= -left) & (distance <= right)


def attend(left: int, right: int, **options: Any) -> Callable:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        mask = band(left, right, q.shape[-2])[None, None] & padding[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, mask, **options)

    return function


def check(function: Callable, leaves: list[torch.Tensor], *others: torch.Tensor, **options: Any) -> list[tuple]:
    """Check the result and its gradients against eager; return the shapes of the queries and keys of each attention."""
    jitted = forge.jit(function, **options)
    actual, expected = jitted(*leaves, *others), function(*leaves, *others)
    torch.testing.assert_close(actual, expected)
    g = torch.randn_like(expected)
    for ours, theirs in zip(*[torch.autograd.grad(each, leaves, g) for each in (actual, expected)], strict=True):
        torch.testing.assert_close(ours, theirs)
    stage = next(
        each for each in forge.last_traces(jitted) if each.stage == "fold_constants" or "differentiate" in each.stage
    )
    calls = [bound for bound in stage.bound_symbols if bound.symbol.id == SDPA]
    return [tuple(tuple(x.shape) for x in bound.args[:2]) for bound in calls]


@pytest.mark.parametrize(
    ("left", "right", "keys"),
    [(16, 16, 64), (10, 3, 64), (0, 0, 32), (0, 40, 80), (63, 0, 96), (100, 70, 224), (32, 64, 128)],
)
def test_a_band_and_padding_are_computed_in_blocks(left: int, right: int, keys: int) -> None:
    count = LENGTH // 32
    assert check(attend(left, right), qkv(), padding()) == [((2 * count, 2, 32, 8), (2 * count, 2, keys, 8))]


def test_heads_of_groups_stay_groups() -> None:
    function = attend(16, 0, enable_gqa=True, scale=0.4)
    assert check(function, qkv((4, 2)), padding()) == [((32, 4, 32, 8), (32, 2, 48, 8))]


def test_an_operand_inside_of_others() -> None:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(LENGTH)
        distance = positions - positions[:, None]
        mask = (distance >= -16) & padding[:, None, None, :] & (distance <= 0)
        return F.scaled_dot_product_attention(q, k, v, mask.expand(2, 2, -1, -1))

    assert check(function, qkv(), padding()) == [((32, 2, 32, 8), (32, 2, 48, 8))]


def test_a_mask_for_all_batches() -> None:
    function = attend(16, 16)
    assert check(function, qkv(), padding(1)) == [((32, 2, 32, 8), (32, 2, 64, 8))]


def test_calls_that_share_a_mask_share_its_parts() -> None:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        mask = band(16, 16)[None, None] & padding[:, None, None, :]
        first = F.scaled_dot_product_attention(q, k, v, mask)
        return F.scaled_dot_product_attention(first, k, v, mask)

    jitted, inputs = forge.jit(function), [*qkv(), padding()]
    torch.testing.assert_close(jitted(*inputs), function(*inputs))
    stage = next(each for each in forge.last_traces(jitted) if each.stage == "attention_blocks")
    first, second = (bound for bound in stage.bound_symbols if bound.symbol.id == SDPA)
    assert first.args[3].name == second.args[3].name


def _stays(function: Callable, *inputs: torch.Tensor, **options: Any) -> bool:
    jitted = forge.jit(function, **options)
    torch.testing.assert_close(jitted(*inputs), function(*inputs))
    return "attention_blocks" not in [stage.stage for stage in forge.last_traces(jitted)]


def test_other_masks_stay() -> None:
    inputs = qkv()
    assert _stays(attend(LENGTH, 0), *inputs, padding())  # causal
    assert _stays(attend(300, 300), *inputs, padding())  # its window is too wide

    def either(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, band(16, 16)[None, None] | padding[:, None, None, :])

    assert _stays(either, *inputs, padding())

    def of_input(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, padding[:, None, None, :])

    assert _stays(of_input, *inputs, padding())


def test_a_mask_that_depends_on_no_input_stays() -> None:
    """It is a window, or a mask that no kernel takes."""
    q, k, v = qkv()
    assert _stays(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, band(16, 16)), q, k, v)


def test_other_calls_stay() -> None:
    assert _stays(attend(16, 16), *[x[..., :500, :] for x in qkv()], padding()[:, :500])  # no block divides it
    assert _stays(attend(16, 16), *qkv(), padding(), numerics="eager")
    assert _stays(attend(16, 16), *qkv(), padding(), dynamic=True)


def test_keys_of_one_batch_for_all_stay() -> None:
    q, k, v = qkv()
    assert _stays(attend(16, 16), q, k[:1], v[:1], padding())


def test_lengths_are_divided_without_a_rest() -> None:
    assert list(blocks_of(128, 16, 0, SIZES, STEP)) == [Blocks(32, 16, 0), Blocks(64, 16, 0)]
    assert list(blocks_of(96, 17, 1, SIZES, STEP)) == [Blocks(32, 32, 16)]
    assert list(blocks_of(100, 16, 0, SIZES, STEP)) == []
    assert list(blocks_of(128, 127, 0, SIZES, STEP)) == []


def test_the_reach_of_a_mask() -> None:
    assert find_reach(band(3, 1, 9)) == (3, 1)
    assert find_reach(torch.stack([band(3, 1, 9), band(1, 4, 9)])[:, None]) == (3, 4)
    assert find_reach(torch.zeros(4, 4, dtype=torch.bool)) == (0, 0)
    assert find_reach(torch.ones(4, 4).triu(2).bool()) == (0, 3)
    assert find_reach(torch.ones(4, 4).tril(-2).bool()) == (3, 0)
    assert find_reach(band(3, 1, 9) & (torch.arange(9) % 3 > 0)) == (3, 1)
    assert find_reach(band(2, 1, 9).expand(2, 1, 9, 9)) == (2, 1)


@pytest.mark.parametrize(
    ("batch", "length", "dtype", "blocks", "pays"),
    [
        (8, 1024, torch.bfloat16, Blocks(128, 64, 64), True),
        (8, 1024, torch.float32, Blocks(128, 64, 64), False),
        (8, 256, torch.bfloat16, Blocks(128, 64, 64), False),
        (1, 1024, torch.bfloat16, Blocks(128, 64, 64), False),
        (8, 1024, torch.bfloat16, Blocks(128, 512, 0), False),
    ],
)
def test_blocks_pay_where_much_is_hidden(
    batch: int, length: int, dtype: torch.dtype, blocks: Blocks, pays: bool
) -> None:
    x = forge.ir.TensorProxy("x", (batch, 12, length, 64), dtype, torch.device("cuda"))
    assert is_profitable({"query": x, "key": x, "value": x}, blocks) == pays
