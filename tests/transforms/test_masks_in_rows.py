"""Masks that attention kernels do not accept are laid out in rows, once for all calls that share one."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import forge
from forge import torchlang
from forge.ir import Trace
from forge.prims.core import same_shape
from forge.transforms import masks_in_rows
from forge.transforms.masks_in_rows import ATTENTION
from tests.transforms.test_channels_last import strides_in_torch

AS_ON_A_GPU = partial(masks_in_rows, strides=strides_in_torch, device="cpu")
BATCH, HEADS, WIDTH, LAYERS = 2, 3, 4, 3


def permuted(table: torch.Tensor, length: int) -> torch.Tensor:
    """Return a bias that is looked up per pair of positions: its heads are innermost in memory."""
    distances = (torch.arange(length)[:, None] - torch.arange(length)).abs()
    return F.embedding(distances, table).permute(2, 0, 1).unsqueeze(0)


def expanded(table: torch.Tensor, length: int) -> torch.Tensor:
    return permuted(table, length).expand(BATCH, -1, -1, -1)


def hidden(table: torch.Tensor, length: int) -> torch.Tensor:
    visible = torch.arange(length)[:, None] >= torch.arange(length)
    return torch.where(visible.expand(BATCH, 1, length, length), permuted(table, length), -1e30)


def alibi(table: torch.Tensor, length: int) -> torch.Tensor:
    return (table[0, :, None] * torch.arange(length)).view(1, HEADS, 1, length)


def added(table: torch.Tensor, length: int) -> torch.Tensor:
    return permuted(table, length) + alibi(table, length)


MASKS = [permuted, expanded, hidden, alibi, added]


def attend(bias: Callable, length: int) -> Callable:
    """Return a stack of layers that share a bias."""

    def program(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        mask = bias(table, length)
        for _ in range(LAYERS):
            x = x + F.scaled_dot_product_attention(x, x.sin(), x.cos(), attn_mask=mask)
        return x

    return program


def given(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(BATCH, HEADS, length, WIDTH, requires_grad=True)
    return x, torch.randn(length, HEADS, requires_grad=True)


def stage_of(jitted: Callable) -> Trace:
    (stage,) = [trace for trace in forge.last_traces(jitted) if trace.stage == "masks_in_rows"]
    return stage


def masks_read(trace: Trace) -> list[str]:
    calls = [bound for bound in trace.bound_symbols if bound.symbol is ATTENTION]
    return [ATTENTION.bind(call.args, call.kwargs)["attn_mask"].name for call in calls]


@pytest.mark.parametrize("executors", [["torch"], ["inductor", "torch"]])
@pytest.mark.parametrize(
    ("bias", "length"), [(bias, length) for bias in MASKS for length in (16, 19) if (bias, length) != (alibi, 16)]
)
def test_a_mask_that_layers_share_is_laid_out_once(bias: Callable, length: int, executors: list[str]) -> None:
    program, (x, table) = attend(bias, length), given(length)
    jitted = forge.jit(program, executors=executors, transforms=[AS_ON_A_GPU])
    actual, expected = jitted(x, table), program(x, table)
    torch.testing.assert_close(actual, expected, check_stride=True)
    gradients = [torch.autograd.grad(each.square().sum(), (x, table)) for each in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    stage = stage_of(jitted)
    (name,) = set(masks_read(stage))
    assert len(masks_read(stage)) == LAYERS
    *steps, step = strides_in_torch(stage)[name]
    assert step == 1 and all(each % 16 == 0 for each in steps)
    assert bias is not expanded or steps[0] == 0  # expanded dims stay expanded
    assert sum(bound.symbol is torchlang.pad for bound in stage.bound_symbols) == (length % 16 > 0)


@pytest.mark.parametrize(
    ("shape", "view"),
    [
        ((HEADS, 1, 19), lambda mask: mask),
        ((19, 19), lambda mask: mask),
        ((19, 19), lambda mask: mask[:, :1].expand(-1, HEADS, -1, -1)),
    ],
    ids=["over queries", "over heads", "and again"],
)
def test_an_input_that_is_expanded_has_a_gradient_of_each_element(shape: tuple, view: Callable) -> None:
    def program(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x.sin(), x.cos(), attn_mask=view(mask))

    x = given(19)[0]
    mask = torch.randn(shape).expand(BATCH, HEADS, 19, 19).detach().requires_grad_()
    jitted = forge.jit(program, executors=["torch"], transforms=[AS_ON_A_GPU])
    actual, expected = jitted(x, mask), program(x, mask)
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(each.square().sum(), (x, mask)) for each in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    assert len(masks_read(stage_of(jitted))) == 1


@pytest.mark.parametrize("length", [16, 19])
def test_the_backward_reads_one_layout(length: int) -> None:
    jitted = forge.jit(attend(hidden, length), executors=["torch"], memory="speed", transforms=[AS_ON_A_GPU])
    x, table = given(length)
    jitted(x, table.detach())
    (split,) = [trace for trace in forge.last_traces(jitted) if trace.stage == "split"]
    shape = (BATCH, HEADS, length, length)
    saved = [each for each in split.output[1] if same_shape(each.shape, shape) and each.dtype == torch.float32]
    assert [each.name for each in saved] == masks_read(stage_of(jitted))[:1]


@pytest.mark.parametrize("length", [16, 19])
def test_a_layer_without_gradients_has_a_mask_of_its_own(length: int) -> None:
    def program(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        mask = permuted(table, length)
        with torch.no_grad():
            still = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
            large = mask.expand(BATCH, -1, -1, -1)
        x = F.scaled_dot_product_attention(x, still, x, attn_mask=mask)
        return F.scaled_dot_product_attention(x, still, x, attn_mask=large)

    x, table = given(length)
    jitted = forge.jit(program, executors=["torch"], transforms=[AS_ON_A_GPU])
    actual, expected = jitted(x, table), program(x, table)
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(each.square().sum(), (x, table)) for each in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    assert len(set(masks_read(stage_of(jitted)))) == 3


def test_a_checkpointed_layer_shares_a_mask() -> None:
    def program(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        mask = permuted(table, 16)

        def layer(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x + F.scaled_dot_product_attention(x, x.sin(), x, attn_mask=mask)

        for _ in range(LAYERS):
            x = torch.utils.checkpoint.checkpoint(layer, x, mask, use_reentrant=False)
        return x

    x, table = given(16)
    jitted = forge.jit(program, executors=["torch"], transforms=[AS_ON_A_GPU])
    actual, expected = jitted(x, table), program(x, table)
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(each.square().sum(), (x, table)) for each in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    assert len(set(masks_read(stage_of(jitted)))) == 1


def padding(lengths: torch.Tensor, length: int) -> torch.Tensor:
    """Return the mask of sequences of some lengths: the same for each head and query."""
    return (torch.arange(length) < lengths[:, None])[:, None, None].expand(-1, HEADS, length, length)


def causal_padding(lengths: torch.Tensor, length: int) -> torch.Tensor:
    return padding(lengths, length)[:, :1] & torch.ones(length, length).tril().bool()


def hides_whole_rows(lengths: torch.Tensor, length: int) -> torch.Tensor:
    return padding(lengths, length).transpose(-1, -2)


@pytest.mark.parametrize("executors", [["torch"], ["inductor", "torch"]])
@pytest.mark.parametrize("length", [16, 19])
@pytest.mark.parametrize("mask_of", [padding, causal_padding, hides_whole_rows])
def test_a_mask_of_bools_is_converted_once(mask_of: Callable, length: int, executors: list[str]) -> None:
    def program(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        mask = mask_of(lengths, length)
        for _ in range(LAYERS):
            x = x + F.scaled_dot_product_attention(x, x.sin(), x.cos(), attn_mask=mask)
        return x

    x, lengths = given(length)[0], torch.tensor([length, 5])
    jitted = forge.jit(program, executors=executors, transforms=[AS_ON_A_GPU])
    actual, expected = jitted(x, lengths), program(x, lengths)
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(each.square().sum(), x) for each in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    stage = stage_of(jitted)
    (name,) = set(masks_read(stage))
    assert sum(bound.symbol is torchlang.masked_fill for bound in stage.bound_symbols) == 1
    *steps, step = strides_in_torch(stage)[name]
    assert step == 1 and all(each % 16 == 0 for each in steps)
    assert mask_of is not padding or steps[1:] == [0, 0]  # expanded dims stay expanded


def test_a_mask_of_bools_is_converted_once_by_default() -> None:
    def program(x: torch.Tensor, half: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(LAYERS):
            x = x + F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
            half = half + F.scaled_dot_product_attention(half, half, half, attn_mask=mask)
        return x, half

    jitted = forge.jit(program)
    for length in (16, 24, 32):
        x = torch.randn(BATCH, HEADS, length, 8)
        inputs = (x, x.bfloat16(), padding(torch.tensor([length, 5]), length))
        for actual, expected in zip(jitted(*inputs), program(*inputs), strict=True):
            torch.testing.assert_close(actual, expected)
    stage = stage_of(jitted)
    assert sum(bound.symbol is torchlang.masked_fill for bound in stage.bound_symbols) == 2  # one for each dtype
    assert all(call.symbol is not torchlang.pad for call in stage.bound_symbols)  # which GPU kernels need


def test_a_layer_of_a_mask_of_bools_is_differentiated_twice() -> None:
    def program(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x.sin(), x, x.cos(), attn_mask=mask)

    def second(function: Callable) -> torch.Tensor:
        (first,) = torch.autograd.grad(function(x, mask).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    x, mask = given(16)[0], causal_padding(torch.tensor([16, 5]), 16)
    with sdpa_kernel(SDPBackend.MATH):  # torch's kernel has no second gradient
        expected = second(program)
    torch.testing.assert_close(second(forge.jit(program)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "mask",
    [
        lambda x: None,
        lambda x: torch.randn(1, HEADS, 16, 16),
        lambda x: torch.randn(16, 1).expand(16, 16),
        lambda x: torch.randn(BATCH, 1, 16, 1),
    ],
    ids=["none", "rows", "one column", "a column"],
)
def test_a_mask_that_kernels_take_stays(mask: Callable) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask(x))

    trace = forge.trace(program, given(16)[0])
    assert AS_ON_A_GPU(trace) is trace


def test_a_call_that_another_kernel_runs_stays() -> None:
    trace = forge.trace(attend(permuted, 16), *given(16))
    assert AS_ON_A_GPU(trace) is not trace
    assert AS_ON_A_GPU(trace, in_torch=lambda bound: False) is trace
    assert masks_in_rows(trace, strides=strides_in_torch) is trace  # its tensors are not on a GPU
