"""Calls of flex_attention are compiled by torch inside a program: their scores are not materialized."""

import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import forge
from forge.runtime import flex_attention as runtime
from forge.torch_internals.dynamo import dynamo_config
from forge.torch_internals.functorch import allow_retained_graph

BIAS = torch.randn(4, 300)


def causal(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    return row >= column


def biased(
    score: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor
) -> torch.Tensor:
    return score + BIAS[head, column] + 0.1 * (row - column)


def qkv(length: int, heads: int = 4) -> list[torch.Tensor]:
    return [torch.randn(2, each, length, 16) for each in (4, heads, heads)]


@torch.no_grad()
def test_inference_runs_a_kernel_at_every_length() -> None:
    """The score function reads a tensor, and the mask has blocks."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: object) -> torch.Tensor:
        return flex_attention(q, k, v, score_mod=biased, block_mask=mask).square()

    jitted = forge.jit(attend)
    for length in (256, 200):
        mask = create_block_mask(causal, None, None, length, length, device="cpu")
        inputs = qkv(length)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns about an uncompiled call
            actual = jitted(*inputs, mask)
        torch.testing.assert_close(actual, attend(*inputs, mask), rtol=1e-4, atol=1e-5)
    explained = forge.explain(jitted)
    assert not explained.opaque_calls and not explained.graph_breaks


@torch.no_grad()
def test_layers_that_are_alike_share_a_kernel_and_heads_may_be_groups() -> None:
    runtime._compiled.clear()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        once = flex_attention(q, k, v, enable_gqa=True)
        return flex_attention(once, k, v, enable_gqa=True)

    inputs = qkv(128, heads=2)
    torch.testing.assert_close(forge.jit(attend)(*inputs), attend(*inputs), rtol=1e-4, atol=1e-5)
    assert len(runtime._compiled) == 1


@torch.no_grad()
def test_a_call_that_torch_cannot_compile_runs_in_eager_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise runtime.TorchDynamoException("no kernel for this processor\nand more")

    monkeypatch.setattr(runtime, "_compile", lambda *args: refuse)
    jitted, inputs = forge.jit(lambda q, k, v: flex_attention(q, k, v)), qkv(128)
    with pytest.warns(UserWarning, match="flex_attention runs in eager.*: no kernel for this processor$"):
        actual = jitted(*inputs)
    torch.testing.assert_close(actual, flex_attention(*inputs))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jitted(*inputs)


def test_a_compiled_backward_runs_again_while_its_graph_is_retained() -> None:
    """torch does not differentiate flex_attention on a CPU: another function stands in for its kernel."""

    def compute(x: torch.Tensor) -> torch.Tensor:
        return ((x @ x).sin() @ x).sin()

    x = torch.randn(8, 8, requires_grad=True)
    out = torch.compile(compute, backend=runtime._compile_graph, dynamic=True)(x)
    allow_retained_graph(out)
    once, again = (torch.autograd.grad(out.sum(), x, retain_graph=True)[0] for _ in range(2))
    torch.testing.assert_close(once, again, rtol=0, atol=0)
    torch.testing.assert_close(once, torch.autograd.grad(compute(x).sum(), x)[0])


@torch.no_grad()
@dynamo_config.patch(recompile_limit=1)
def test_other_score_functions_are_no_recompilations() -> None:
    """With a limit of one compilation for each of Dynamo's functions, none runs in eager."""
    runtime._compiled.clear()
    for heads in (2, 4):
        inputs = [torch.randn(1, heads, 128, 16) for _ in "qkv"]

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int = heads) -> torch.Tensor:
            return flex_attention(q, k, v, lambda score, batch, head, row, column: score * heads)

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            actual = forge.jit(attend)(*inputs)
        torch.testing.assert_close(actual, attend(*inputs), rtol=1e-4, atol=1e-5)
    assert len(runtime._compiled) == 2
