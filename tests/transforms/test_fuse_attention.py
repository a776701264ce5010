"""Attention written out by a model becomes one call of torch's attention; attention sinks stay apart from the
scores."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

import forge
from forge.executors.torchex.attention import ATTENDING
from forge.ir import BoundSymbol

B, H, L, S, E = 2, 3, 8, 10, 16
QUERY, KEY, ROWS, COLUMNS = (B, H, L, E), (B, H, S, E), (B * H, L, E), (B * H, S, E)
WINDOWS = (B, 4, H, L, E), (B, 4, H, S, E), (B, 4, H, S, E)


class Program(NamedTuple):
    """A program, the shapes of the tensors that need gradients, and its masks, which are bools if `shape` ends with
    "b"."""

    function: Callable
    shapes: tuple[tuple[int, ...], ...] = (QUERY, KEY, KEY)
    masks: tuple[tuple, ...] = ()


def in_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return attention as in BART: the products have three dims, the mask is added to four."""
    scores = torch.bmm(q, k.transpose(1, 2)).view(B, H, L, S) + mask
    weights = F.dropout(F.softmax(scores.view(B * H, L, S), -1), 0.1, False)
    return torch.bmm(weights, v).view(B, H, L, E).transpose(1, 2).reshape(B, L, H * E)


def with_alibi(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, alibi: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return attention as in BLOOM: the product adds the bias, and the softmax is in float32."""
    scores = alibi.baddbmm(batch1=q, batch2=k, beta=1.0, alpha=0.25).view(B, H, L, S) + mask
    weights = F.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
    return torch.bmm(weights.view(B * H, L, S), v)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    hidden = torch.tril(torch.ones(L, L)) == 0
    return F.softmax((q @ k.mT / math.sqrt(E)).masked_fill(hidden, float("-inf")), -1) @ v


def of_sums(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).div(4).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(B, L, H * E) + 1


def along_an_axis(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    weights = torch.einsum("bxiye,bxjye->bxyij", q, k).div(4).softmax(-1)
    return torch.einsum("bxyij,bxyje->bxiye", weights, v.transpose(2, 3)).reshape(B, H, L, 4 * E) + 1


FUSED: dict[str, Program] = {
    "plain": Program(lambda q, k, v: (q @ k.transpose(-1, -2) / math.sqrt(E)).softmax(-1) @ v),
    "scaled before": Program(lambda q, k, v: torch.matmul(F.softmax(torch.matmul(q * 0.3, k.mT), dim=3), v)),
    "a transposed key": Program(lambda q, k, v: ((q @ k) * 0.2).softmax(-1) @ v, (QUERY, (B, H, E, S), KEY)),
    "without heads": Program(lambda q, k, v: torch.bmm(F.softmax(torch.bmm(q, k.mT), -1), v), (ROWS, COLUMNS, COLUMNS)),
    "sums of products": Program(of_sums, ((B, L, H, E), (B, S, H, E), (B, S, H, E))),
    "in heads": Program(in_heads, (ROWS, COLUMNS, COLUMNS), ((B, 1, L, S),)),
    "with alibi": Program(with_alibi, (ROWS, (B * H, E, S), COLUMNS), ((B * H, 1, S), (B, 1, L, S))),
    "causal": Program(causal, (QUERY, QUERY, QUERY)),
    "hidden scores": Program(
        lambda q, k, v, mask: (q @ k.mT).masked_fill(mask == 0, -math.inf).softmax(-1) @ v, masks=((1, 1, L, S, "b"),)
    ),
    "hidden scores second": Program(
        lambda q, k, v, mask: torch.where(mask == 0, -math.inf, q * 0.25 @ k.mT).softmax(-1) @ v,
        masks=((B, 1, L, S, "b"),),
    ),
    "shown scores and a bias": Program(
        lambda q, k, v, mask, bias: (torch.where(mask, q @ k.mT * 0.2, torch.tensor(-math.inf)) + bias).softmax(-1) @ v,
        masks=((B, 1, 1, S, "b"), (1, H, L, S)),
    ),
    "two masks": Program(
        lambda q, k, v, mask, bias: ((q @ k.mT * 0.2 + mask) + bias).softmax(-1) @ v, masks=((L, S), (1, H, L, S))
    ),
    "a mask of keys": Program(lambda q, k, v, mask: (q @ k.mT + mask).softmax(-1) @ v, masks=((S,),)),
    "hidden keys": Program(
        lambda q, k, v, mask: (q @ k.mT).masked_fill(~mask, -math.inf).softmax(-1) @ v, masks=((S, "b"),)
    ),
    "a mask of heads": Program(lambda q, k, v, mask: (q @ k.mT + mask).softmax(-1) @ v, masks=((H, 1, S),)),
    "windows": Program(lambda q, k, v: (q * 0.25 @ k.mT).softmax(-1) @ v, WINDOWS),
    "windows and a mask of heads": Program(
        lambda q, k, v, mask: (q @ k.mT + mask).softmax(-1) @ v, WINDOWS, ((1, 4, H, L, S),)
    ),
    "windows and a mask of a batch": Program(
        lambda q, k, v, mask: (q * 0.25 @ k.mT).masked_fill(mask == 0, -math.inf).softmax(-1) @ v,
        WINDOWS,
        ((B, 1, 1, 1, S, "b"),),
    ),
    "axes": Program(along_an_axis, ((B, H, L, 4, E), (B, H, S, 4, E), (B, H, S, 4, E))),
    "a call of windows": Program(F.scaled_dot_product_attention, WINDOWS),
    "a call of windows and a mask": Program(F.scaled_dot_product_attention, WINDOWS, ((B, 4, H, L, S, "b"),)),
    "a call without heads": Program(
        lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask, scale=0.3),
        (ROWS, COLUMNS, COLUMNS),
        ((B * H, 1, S),),
    ),
    "a causal call without heads": Program(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), (ROWS, ROWS, ROWS)
    ),
    "a mask of rows": Program(
        lambda q, k, v, mask: (torch.bmm(q, k.mT) + mask).view((*QUERY[:3], S)).softmax(-1) @ v,
        (ROWS, COLUMNS, KEY),
        ((1, L, S),),
    ),
}
WRITTEN_OUT: dict[str, Program] = {
    "a small value for hidden scores": Program(
        lambda q, k, v: (q @ k.mT).masked_fill(torch.ones(L, S).tril() == 0, -1e4).softmax(-1) @ v
    ),
    "weights are returned": Program(lambda q, k, v: (weights := (q @ k.mT).softmax(-1), weights @ v)[::-1]),
    "weights are scaled": Program(lambda q, k, v: ((q @ k.mT).softmax(-1) * 2) @ v),
    "softmax of columns": Program(lambda q, k, v: (q @ k.mT).softmax(-2) @ v),
    "a scaled mask": Program(lambda q, k, v, mask: ((q @ k.mT + mask) * 0.5).softmax(-1) @ v, masks=((B, 1, L, S),)),
    "a negative scale of hidden scores": Program(
        lambda q, k, v, mask: ((q @ k.mT).masked_fill(mask & ~mask, -math.inf) * -0.5).softmax(-1) @ v,
        masks=((L, S, "b"),),
    ),
    "a mask of other batches": Program(
        lambda q, k, v, mask: (q @ k.mT + mask).view(H, B, L, S).softmax(-1) @ v,
        (QUERY, KEY, (H, B, S, E)),
        ((B, 1, L, S),),
    ),
    "a mask of some windows": Program(
        lambda q, k, v, mask: (q @ k.mT + mask).softmax(-1) @ v, WINDOWS, ((1, 4, 1, L, S),)
    ),
    "a broadcast key": Program(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, (QUERY, (B, 1, S, E), (B, 1, S, E))),
    "dropped weights": Program(lambda q, k, v: (torch.manual_seed(1), F.dropout((q @ k.mT).softmax(-1), 0.5) @ v)[1]),
}


def run(program: Program, dtype: torch.dtype) -> Callable:
    """Compare a program's values, strides and gradients with eager's, and return it compiled."""
    torch.manual_seed(0)
    jitted, function = forge.jit(program.function), program.function
    masks = [
        (torch.rand(shape[:-1]) > 0.3).logical_or(torch.arange(S) == 0)
        if shape[-1] == "b"
        else torch.randn(shape, dtype=dtype)
        for shape in program.masks
    ]
    for requires_grad in (True, False):
        values = [torch.randn(shape, dtype=dtype) for shape in program.shapes]
        ours, theirs = ([x.clone().requires_grad_(requires_grad) for x in values] for _ in range(2))
        results = jitted(*ours, *masks), function(*theirs, *masks)
        actual, expected = (each[0] if isinstance(each, tuple) else each for each in results)
        tolerance = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(actual, expected, **tolerance)
        assert actual.stride() == expected.stride()
        if requires_grad:
            cotangent = torch.randn_like(expected)
            for result in (actual, expected):
                result.backward(cotangent)
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one.grad, other.grad, **tolerance)
                assert one.grad is not None and other.grad is not None and one.grad.stride() == other.grad.stride()
    return jitted


def attention_of(jitted: Callable) -> list[BoundSymbol]:
    """Return torch's attention calls in the program that was compiled last."""
    calls = forge.last_traces(jitted)[-1].bound_symbols
    return [
        bound for bound in calls if not {bound.symbol.id, bound.symbol.id.removeprefix("torch.")}.isdisjoint(ATTENDING)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FUSED)
def test_torchs_kernel_runs_attention_that_is_written_out(name: str, dtype: torch.dtype) -> None:
    assert attention_of(run(FUSED[name], dtype))


@pytest.mark.parametrize("name", ["plain", "sums of products", "causal"])
def test_torchs_kernel_computes_the_gradients(name: str) -> None:
    jitted = forge.jit(FUSED[name].function)
    jitted(*(torch.randn(shape, requires_grad=True) for shape in FUSED[name].shapes)).sum().backward()
    assert attention_of(jitted)


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_what_torchs_kernel_does_not_compute_stays_written_out(name: str) -> None:
    assert not attention_of(run(WRITTEN_OUT[name], torch.float32))


def test_a_constant_causal_mask_is_a_flag() -> None:
    jitted = run(FUSED["causal"], torch.float32)
    (call,) = attention_of(jitted)
    assert call.kwargs["is_causal"] and call.kwargs["attn_mask"] is None


@pytest.mark.parametrize("value", [-1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_row_that_sees_nothing_is_the_mean(value: float, is_added: bool, requires_grad: bool) -> None:
    """torch's kernels have other gradients there."""
    visible = torch.rand(B, 1, L, S) > 0.3
    visible[0, :, 2] = False

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.mT / 4
        scores = (
            scores + torch.zeros(visible.shape).masked_fill(~visible, value)
            if is_added
            else scores.masked_fill(~visible, value)
        )
        return scores.softmax(-1) @ v

    ours = [torch.randn(shape, requires_grad=requires_grad) for shape in (QUERY, KEY, KEY)]
    jitted = forge.jit(function)
    actual, expected = jitted(*ours), function(*ours)
    torch.testing.assert_close(actual, expected)
    assert bool(attention_of(jitted)) is not requires_grad
    if requires_grad:
        cotangent = torch.randn_like(expected)
        torch.testing.assert_close(*(torch.autograd.grad(each, ours, cotangent) for each in (actual, expected)))


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1e-9), (torch.float64, 1.0)])
def test_a_value_that_hides_too_little_keeps_attention_written_out(dtype: torch.dtype, scale: float) -> None:
    hidden = torch.rand(L, S) > 0.5
    hidden[2] = True
    query, key = torch.randn(QUERY, dtype=dtype), torch.randn(KEY, dtype=dtype)
    jitted = forge.jit(lambda q, k: ((q @ k.mT).masked_fill(hidden, -1e9) * scale).softmax(-1) @ k)
    expected = ((query @ key.mT).masked_fill(hidden, -1e9) * scale).softmax(-1) @ key
    torch.testing.assert_close(jitted(query, key), expected)
    assert not attention_of(jitted)


def test_numbers_are_masks() -> None:
    query = torch.randn(QUERY)
    for mask in (torch.tensor(0.5), torch.tensor([0.5]), torch.tensor(False)):
        add = torch.Tensor.add if mask.is_floating_point() else partial(torch.Tensor.masked_fill, value=-math.inf)
        jitted = forge.jit(lambda q, mask, add=add: add(q @ q.mT, mask).softmax(-1) @ q)
        torch.testing.assert_close(jitted(query, mask), (query @ query.mT).softmax(-1) @ query)
        assert attention_of(jitted)


def test_exact_numerics_keep_it_written_out() -> None:
    query = torch.randn(QUERY)
    jitted = forge.jit(FUSED["plain"].function, numerics="eager")
    jitted(query, query, query)
    assert not attention_of(jitted)


def with_sinks(scores: torch.Tensor, sinks: torch.Tensor, value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return attention with sinks as in GPT-OSS."""
    joined = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(B, -1, L, -1)], dim=-1)
    joined = joined - joined.max(dim=-1, keepdim=True).values
    shares = F.softmax(joined, dim=-1, dtype=joined.dtype)
    return (shares[..., :-1] @ value).transpose(1, 2).flatten(2) @ weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_are_not_joined_to_the_scores(dtype: torch.dtype) -> None:
    shapes = ((B, H, L, S), (H,), KEY, (H * E, 5))
    jitted = run(Program(with_sinks, shapes), dtype)
    traces = forge.last_traces(jitted)
    assert [each.stage for each in traces].count("separate_sinks") == 1 and "torch.cat" not in str(traces[-1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shares_beside_sinks_have_the_softmaxs_dtype(dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    scores, sinks = (torch.randn(B, H, L, columns, dtype=dtype) for columns in (S, 1))
    value = torch.randn(KEY, dtype=wide)

    def function(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        return F.softmax(torch.cat([scores, sinks], -1), -1, dtype=wide)[..., :-1] @ value

    jitted = forge.jit(function)
    torch.testing.assert_close(jitted(scores, sinks), function(scores, sinks))
    assert any(each.stage == "separate_sinks" for each in forge.last_traces(jitted))


def test_sinks_beside_no_scores() -> None:
    inputs = torch.randn(L, 0), torch.randn(L, 1), torch.randn(0, E)
    jitted = forge.jit(lambda scores, sinks, value: torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ value)
    torch.testing.assert_close(jitted(*inputs), torch.zeros(L, E))


def test_gradients_of_sinks() -> None:
    shapes = ((B, H, L, S), (H,), KEY, (H * E, 5))
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    jitted = forge.jit(with_sinks)
    assert torch.autograd.gradcheck(jitted, inputs) and torch.autograd.gradgradcheck(jitted, inputs)
