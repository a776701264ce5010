"""Patterns: matches, non-matches, and unchanged results of programs with replaced sites."""

import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import forge
from forge.api.functional import Direct
from forge.executors import OperatorExecutor
from forge.executors.hubex import HubExecutor
from forge.ir import BoundSymbol, Symbol, Tag, TensorProxy
from forge.patterns import Match, Pattern, builtin, find_matches, replace_patterns
from forge.patterns.ordering import in_order
from forge.transforms.cse import cse
from forge.transforms.dce import dce

EPS = 1e-5


def matches(function: Callable, *args: Any, wanted: tuple[Pattern, ...] = builtin.ALL) -> list[Match]:
    return find_matches(cse(dce(forge.trace(function, *args))), wanted)


def names(function: Callable, *args: Any, wanted: tuple[Pattern, ...] = builtin.ALL) -> list[str]:
    return [match.pattern.name for match in matches(function, *args, wanted=wanted)]


def finder(wanted: tuple[Pattern, ...] = builtin.ALL) -> OperatorExecutor:
    """Return an executor that runs each of these patterns by its reference."""
    executor = OperatorExecutor("finder")
    executor.patterns = wanted
    for each in wanted:
        executor.register_implementation(each.symbol, each.reference)
    return executor


def pattern_ids(jitted: Any) -> set[str]:
    """Return the composites in any stage of a jitted function's program."""
    found = {bound.symbol.id for trace in forge.last_traces(jitted) for bound in trace.bound_symbols}
    return {each for each in found if each.startswith("pattern.")}


def assert_unchanged(function: Callable, *args: torch.Tensor, wanted: tuple[Pattern, ...] = builtin.ALL) -> None:
    """Check that outputs and gradients with every site replaced are those without patterns.

    They are bitwise equal in half precision; in float32, within 2e-6 of the scale, because gradients may be summed in
    another order.
    """
    results = []
    for executors in (["torch"], [finder(wanted), "torch"]):
        inputs = [each.clone().requires_grad_(each.is_floating_point()) for each in args]
        outputs = Direct(function, executors)(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        sum(output.float().square().sum() for output in outputs).backward()
        results.append([*outputs, *[each.grad for each in inputs if each.requires_grad]])
    for plain, replaced in zip(*results, strict=True):
        scale = plain.detach().abs().max().item() if plain.dtype == torch.float32 else 0.0
        torch.testing.assert_close(replaced, plain, rtol=0, atol=2e-6 * scale)


def x(dtype: torch.dtype = torch.float32, *shape: int) -> torch.Tensor:
    return torch.randn(shape or (2, 3, 8), dtype=dtype)


def scale(x: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    return torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)


def rms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return w * (x.float() * scale(x)).to(x.dtype)


def rms_wide(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (w * (x.float() * scale(x))).to(x.dtype)


def rms_gemma(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((x.float() * scale(x)) * (1.0 + w.float())).type_as(x)


def rms_t5(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    normal = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + EPS)
    return w * normal.to(w.dtype)


def rms_one_over_root(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * (1 / torch.sqrt(EPS + (wide**2).mean(2, keepdim=True)))).to(x.dtype) * w


def rms_negative_half(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + EPS).pow(-0.5)).to(x.dtype) * w


def turned(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def turned_pairs(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return (x * cos) + (turned(x) * sin)


def loss(
    logits: torch.Tensor, labels: torch.Tensor, shift: int = 1, ignore: int = -100, **options: Any
) -> torch.Tensor:
    following = F.pad(labels, (0, shift), value=ignore)[..., shift:].contiguous()
    flat = logits.float().view(-1, logits.shape[-1])
    return F.cross_entropy(flat, following.view(-1), ignore_index=-100, **options)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


# programs that match


@DTYPES
@pytest.mark.parametrize(
    ("function", "found"),
    [
        (rms, {"rms_norm"}),
        (rms_wide, {"rms_norm", "rms_norm_wide"}),
        (rms_gemma, {"rms_norm_gemma"}),
        (rms_t5, {"rms_norm"}),
        (rms_one_over_root, {"rms_norm"}),
        (rms_negative_half, {"rms_norm"}),
    ],
)
def test_norms_are_found_however_they_are_written(function, found, dtype):
    args = x(dtype), x(dtype, 8)
    (name,) = names(function, *args)
    assert name in found
    if dtype == torch.float32:  # in half precision some of these round the two uses of x apart, in the gradient
        assert_unchanged(function, *args)


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", [rms, rms_wide, rms_gemma])
def test_norms_are_found_in_mixed_precision(function, weight):
    args = x(torch.bfloat16), x(weight, 8)
    assert len(names(function, *args)) == 1
    assert_unchanged(function, *args)


def test_the_number_of_a_site_is_its_argument():
    (match,) = matches(rms, x(), x(torch.float32, 8))
    assert match.binding["eps"] == EPS
    assert [match.binding[name].name for name in ("x", "weight")] == ["x", "w"]


@DTYPES
def test_residual_and_norm_are_one_call_of_two_outputs(dtype):
    def block(a, b, w):
        total = a + b
        return rms(total, w), total * 2

    args = x(dtype), x(dtype), x(dtype, 8)
    (match,) = matches(block, *args)
    assert match.pattern is builtin.add_rms_norm and len(match.outputs) == 2
    assert_unchanged(block, *args)


@DTYPES
@pytest.mark.parametrize(
    ("function", "found"),
    [
        (rotary, "rotary"),
        (lambda x, c, s: x * c + turned_pairs(x) * s, "rotary_interleaved"),
        (lambda x, c, s: turned(x) * s + c * x, "rotary"),
    ],
    ids=["halves", "pairs", "turned round"],
)
def test_rotary_embeddings_are_found(function, found, dtype):
    args = x(dtype, 2, 4, 3, 8), x(dtype, 3, 8), x(dtype, 3, 8)
    assert names(function, *args) == [found]
    assert_unchanged(function, *args)


PAIR = (builtin.rotary_pair, *builtin.ALL)


def both(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return rotary(q, cos, sin), rotary(k, cos, sin)


def of_heads(dtype: torch.dtype = torch.float32, queries: int = 4, keys: int = 2) -> tuple[torch.Tensor, ...]:
    """Return q, k, cos and sin like a model with grouped queries."""
    return x(dtype, 2, queries, 3, 8), x(dtype, 2, keys, 3, 8), x(dtype, 2, 3, 8), x(dtype, 2, 3, 8)


@DTYPES
@pytest.mark.parametrize("keys", [4, 2, 1])
def test_the_rotary_embeddings_of_queries_and_keys_are_one_site_of_two_outputs(dtype, keys):
    args = of_heads(dtype, keys=keys)
    (match,) = matches(both, *args, wanted=PAIR)
    assert match.pattern is builtin.rotary_pair
    assert [output.shape[1] for output in match.outputs] == [4, keys]
    assert (match.binding["q"].name, match.binding["k"].name) == ("q", "k")
    assert_unchanged(both, *args, wanted=PAIR)


def test_each_layers_queries_go_with_its_own_keys():
    """All layers share their cosines, and a layer's queries are computed from the last one's results."""

    def layers(q, k, cos, sin):
        for _ in range(3):
            q, k = both(q, k, cos, sin)
            q, k = q * k.sum(1, keepdim=True), k + 1
        return q, k

    found = matches(layers, *of_heads(), wanted=PAIR)
    assert [match.pattern.name for match in found] == ["rotary_pair"] * 3
    assert_unchanged(layers, *of_heads(), wanted=PAIR)


def test_two_that_others_stand_between_are_a_pair():
    def function(q, k, cos, sin):
        first = both(q, q, cos, sin)[0]
        second = both(q * first.sum(), k + 1, cos, sin)
        return first, *second, both(k, k, cos, sin)[0]

    assert names(function, *of_heads(), wanted=PAIR) == ["rotary_pair"] * 2
    assert_unchanged(function, *of_heads(), wanted=PAIR)


def test_keys_may_be_turned_before_queries():
    def turned_round(q, k, cos, sin):
        return both(k, q, cos, sin)[::-1]

    assert names(turned_round, *of_heads(), wanted=PAIR) == ["rotary_pair"]
    assert_unchanged(turned_round, *of_heads(), wanted=PAIR)


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda q, k, c, s: (both(q, k, c, s)[0], k * 2), ["rotary"]),
        (lambda q, k, c, s: (both(q, q, c, s)[0], both(k, k, s, c)[0]), ["rotary", "rotary"]),
        (lambda q, k, c, s: (both(both(q, q, c, s)[0], k, c, s)[0], k * 2), ["rotary", "rotary"]),
        (lambda q, k, c, s: (*both(q, k, c, s), both(q * k.sum(), k, c, s)[0]), ["rotary", "rotary_pair"]),
        (lambda q, k, c, s: (both(q, q, c, s)[0], k * c[:, None]), ["rotary"]),
    ],
    ids=["one", "of other cosines", "one of the other", "three", "no other"],
)
def test_what_is_no_pair_of_rotary_embeddings_is_left_as_it_is(function, found):
    args = of_heads()
    assert sorted(names(function, *args, wanted=PAIR)) == found
    assert_unchanged(function, *args, wanted=PAIR)


def test_queries_are_no_pair_with_themselves():
    """Under torch.autocast the queries are cast right after their rotation, the keys later."""

    def function(q, k, cos, sin):
        turned, keys = both(q, k, cos, sin)
        return turned.to(q.dtype), keys.sum(2)

    args = (*of_heads(torch.bfloat16)[:2], *of_heads()[2:])
    assert names(function, *args, wanted=PAIR) == ["rotary_promoted", "rotary"]
    assert_unchanged(function, *args, wanted=PAIR)


def test_where_keys_have_no_gradient_and_queries_do_they_are_no_pair():
    def function(q, k, cos, sin):
        with torch.no_grad():
            turned_keys = both(k, k, cos, sin)[0]
        return both(q, q, cos, sin)[0], turned_keys

    assert names(function, *of_heads(), wanted=PAIR) == ["rotary", "rotary"]


def test_a_kernel_of_rotary_runs_the_pairs_that_no_kernel_of_pairs_takes():
    ran = []

    def one(x, cos, sin):
        ran.append("one")
        return rotary(x, cos, sin)

    def two(q, k, cos, sin):
        ran.append("two")
        return rotary(q, cos, sin), rotary(k, cos, sin)

    args = of_heads()
    for faster, expected in (("q.numel >= 1000000", ["one", "one"]), (None, ["two"])):
        ran.clear()
        kernels = [
            forge.kernel("pattern:rotary", one, grad="composite"),
            forge.kernel("pattern:rotary_pair", two, grad="composite", faster=faster),
        ]
        executor = HubExecutor("kernels")
        executor.add(kernels)
        jitted = forge.jit(both, executors=[executor, "torch"], cache=False)
        torch.testing.assert_close(jitted(*args), both(*args))
        assert ran == expected


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        (lambda x: x.chunk(2, -1), "rotary_halves"),
        (lambda x: (x[..., :4], x[..., 4:]), "rotary_halves"),
        (lambda x: (x[..., ::2], x[..., 1::2]), "rotary_pairs"),
    ],
    ids=["chunk", "slices", "pairs"],
)
def test_rotary_embeddings_with_halves_of_cosines_are_found(parts, found):
    def function(x, cos, sin):
        first, second = parts(x)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    args = x(torch.float32, 2, 4, 3, 8), x(torch.float32, 3, 4), x(torch.float32, 3, 4)
    assert names(function, *args) == [found]
    assert_unchanged(function, *args)


def test_partial_rotary_embeddings_are_found():
    def partial(x, cos, sin):
        return torch.cat((rotary(x[..., :4], cos, sin), x[..., 4:]), -1)

    args = x(torch.float32, 2, 4, 3, 8), x(torch.float32, 3, 4), x(torch.float32, 3, 4)
    assert names(partial, *args) == ["rotary"]
    assert_unchanged(partial, *args)


def test_two_sites_may_share_a_cast():
    def both(q, k, cos, sin):
        cos, sin = cos.to(q.dtype).unsqueeze(0), sin.to(q.dtype).unsqueeze(0)
        return rotary(q, cos, sin), rotary(k, cos, sin)

    args = x(torch.bfloat16), x(torch.bfloat16), x(torch.float32, 3, 8), x(torch.float32, 3, 8)
    assert names(both, *args) == ["rotary", "rotary"]
    assert_unchanged(both, *args)


@DTYPES
@pytest.mark.parametrize(
    ("activation", "found"),
    [
        (F.silu, "swiglu"),
        (lambda g: F.gelu(g, approximate="tanh"), "geglu"),
        (F.gelu, "geglu_exact"),
        (builtin.gelu_tanh.reference, "geglu_written"),
    ],
    ids=["silu", "gelu_tanh", "gelu", "gelu_new"],
)
def test_gated_units_are_found_in_one_and_in_two_projections(activation, found, dtype):
    def fused(x):
        gate, up = x.chunk(2, dim=-1)
        return up * activation(gate)

    assert names(lambda g, u: activation(g) * u, x(dtype), x(dtype)) == [found]
    assert names(fused, x(dtype)) == [found]
    assert_unchanged(fused, x(dtype))


def clamped(g: torch.Tensor, u: torch.Tensor, low: float = -7.0) -> torch.Tensor:
    g, u = g.clamp(min=None, max=7.0), u.clamp(min=low, max=7.0)
    return (u + 1) * (g * torch.sigmoid(g * 1.702))


def test_the_clamped_gated_unit_is_found_with_its_numbers():
    (match,) = matches(clamped, x(), x())
    assert (match.pattern.name, match.binding["limit"], match.binding["alpha"]) == ("swiglu_clamped", 7.0, 1.702)
    assert_unchanged(clamped, x() * 9, x() * 9)


@DTYPES
def test_the_causal_loss_is_found(dtype):
    logits, labels = x(dtype, 2, 5, 8), torch.randint(0, 8, (2, 5))
    (match,) = matches(loss, logits, labels)
    assert match.pattern is builtin.causal_lm_loss
    assert match.binding["logits"].shape == (2, 5, 8) and match.binding["ignore_index"] == -100
    assert_unchanged(loss, logits, labels)


def test_the_causal_loss_takes_the_logits_as_their_projection_gives_them():
    def head(hidden, weight, labels):
        return loss(F.linear(hidden, weight), labels)

    (match,) = matches(head, x(), x(torch.float32, 11, 8), torch.randint(0, 11, (2, 3)))
    assert match.binding["logits"].shape == (2, 3, 11)


# programs that must not match

W = torch.randn(8)
NORMS = {
    "mean over another dim": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + EPS)),
    "mean over two dims": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + EPS)),
    "sum for mean": lambda x, w: w * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS)),
    "mean of a half": lambda x, w: w * (x * torch.rsqrt(x[..., :4].pow(2).mean(-1, keepdim=True) + EPS)),
    "eps outside of the root": lambda x, w: w * (x * (torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) + EPS)),
    "eps subtracted": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) - EPS)),
    "eps before the mean": lambda x, w: w * (x * torch.rsqrt((x.pow(2) + x * EPS).mean(-1, keepdim=True))),
    "no root": lambda x, w: w * (x * torch.reciprocal(x.pow(2).mean(-1, keepdim=True) + EPS)),
    "root for its inverse": lambda x, w: w * (x * torch.sqrt(x.pow(2).mean(-1, keepdim=True) + EPS)),
    "cubed": lambda x, w: w * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + EPS)),
    "absolute values": lambda x, w: w * (x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + EPS)),
    "another tensor's mean": lambda x, w: w * (x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + EPS)),
    "another tensor scaled": lambda x, w: w * (x.neg() * scale(x)),
    "divided": lambda x, w: w * (x / scale(x)),
    "weight added": lambda x, w: w + x * scale(x),
    "detached mean": lambda x, w: w * (x * scale(x.detach())),
    "detached": lambda x, w: w * (x * scale(x)).detach(),
    "float64": lambda x, w: w * (x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + EPS)).float(),
    "rounded between": lambda x, w: w * (x * scale(x)).bfloat16().float(),
    "rounded mean": lambda x, w: w * (x * scale(x.bfloat16())),
}


@pytest.mark.parametrize("name", NORMS)
def test_what_is_almost_a_norm_is_none(name):
    assert names(NORMS[name], x(), W) == []


def test_a_mean_along_the_other_dim_of_a_square_is_no_norm():
    """Without keepdim, the mean of each row scales each column."""
    assert names(lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1) + EPS)), x(torch.float32, 8, 8), W) == []


def test_a_norm_that_rounds_its_mean_is_none_in_half_precision():
    assert names(lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)), x().half(), W.half()) == []


def test_a_norm_of_another_offset_is_not_gemmas():
    (match,) = matches(lambda x, w: (x * scale(x)) * (2.0 + w), x(), W)
    assert match.pattern is builtin.rms_norm


def test_a_norm_whose_mean_has_no_gradient_is_none():
    def function(x, w):
        with torch.no_grad():
            factor = scale(x)
        return w * (x.float() * factor).to(x.dtype)

    jitted = forge.jit(function, executors=[finder(), "torch"])
    inputs = [x().requires_grad_(), W.clone().requires_grad_()]
    actual = torch.autograd.grad(jitted(*inputs).sum(), inputs)
    assert pattern_ids(jitted) == set()
    torch.testing.assert_close(actual, torch.autograd.grad(function(*inputs).sum(), inputs))


def test_a_clone_without_gradient_is_not_what_was_cloned():
    def function(x, w):
        with torch.no_grad():
            fixed = x.clone()
        return rms(fixed, w) * x

    jitted = forge.jit(function, executors=[finder(), "torch"])
    inputs = [x().requires_grad_(), W.clone().requires_grad_()]
    actual = torch.autograd.grad(jitted(*inputs).sum(), inputs)
    torch.testing.assert_close(actual, torch.autograd.grad(function(*inputs).sum(), inputs))


ROTATED = {
    "wrong sign": lambda x: torch.cat((x[..., 4:], -x[..., :4]), -1),
    "no sign": lambda x: torch.cat((x[..., 4:], x[..., :4]), -1),
    "two signs": lambda x: torch.cat((-x[..., 4:], -x[..., :4]), -1),
    "not turned": lambda x: torch.cat((-x[..., :4], x[..., 4:]), -1),
    "unequal parts": lambda x: torch.cat((-x[..., 2:], x[..., :2]), -1),
    "overlapping parts": lambda x: torch.cat((-x[..., 2:6], x[..., :4]), -1),
    "another dim": lambda x: torch.cat((-x[:, :, 2:], x[:, :, :2]), -2),
    "pairs with the wrong sign": lambda x: torch.stack((x[..., 1::2], -x[..., ::2]), -1).flatten(-2),
    "pairs not turned": lambda x: torch.stack((-x[..., ::2], x[..., 1::2]), -1).flatten(-2),
    "pairs into halves": lambda x: torch.cat((-x[..., 1::2], x[..., ::2]), -1),
    "another tensor": lambda x: turned(x + 1),
    "rounded": lambda x: turned(x.bfloat16()).float(),
}


@pytest.mark.parametrize("name", ROTATED)
def test_what_is_almost_a_rotary_embedding_is_none(name):
    args = x(torch.float32, 2, 4, 4, 8), x(torch.float32, 4, 8), x(torch.float32, 4, 8)
    assert names(lambda x, cos, sin: x * cos + ROTATED[name](x) * sin, *args) == []
    assert names(lambda x, cos, sin: x * cos - turned(x) * sin, *args) == []


@pytest.mark.parametrize("signs", [(1, 1), (-1, -1), (1, -1)], ids=str)
def test_written_out_halves_with_other_signs_are_no_rotary_embedding(signs):
    def function(x, cos, sin):
        a, b = x.chunk(2, -1)
        first = a * cos + b * sin if signs[0] > 0 else a * cos - b * sin
        second = b * cos + a * sin if signs[1] > 0 else b * cos - a * sin
        return torch.cat((first, second), -1)

    assert names(function, x(), x(torch.float32, 3, 4), x(torch.float32, 3, 4)) == []


UNITS = {
    "silu of the product": lambda g, u: F.silu(g * u),
    "silu of the sum": lambda g, u: F.silu(g + u),
    "sum": lambda g, u: F.silu(g) + u,
    "sigmoid": lambda g, u: torch.sigmoid(g) * u,
    "quick gelu": lambda g, u: g * torch.sigmoid(1.702 * g) * u,
    "relu": lambda g, u: F.relu(g) * u,
    "relu squared": lambda g, u: F.relu(g).square() * u,
    "half": lambda g, u: 0.5 * F.silu(g) / u,
    "another limit": lambda g, u: clamped(g, u, low=-6.0),
    "rounded": lambda g, u: F.silu(g).bfloat16().float() * u,
}


@pytest.mark.parametrize("name", UNITS)
def test_what_is_almost_a_gated_unit_is_none(name):
    assert names(UNITS[name], x(), x()) == []


LOSSES = {
    "no shift": lambda logits, labels: F.cross_entropy(logits.view(-1, 8), labels.view(-1)),
    "shift by two": lambda logits, labels: loss(logits, labels, shift=2),
    "another last label": lambda logits, labels: loss(logits, labels, ignore=0),
    "sum": lambda logits, labels: loss(logits, labels, reduction="sum"),
    "smoothing": lambda logits, labels: loss(logits, labels, label_smoothing=0.1),
    "weights": lambda logits, labels: loss(logits, labels, weight=torch.arange(8.0)),
    "logits shifted": lambda logits, labels: F.cross_entropy(logits[:, :-1].reshape(-1, 8), labels[:, 1:].reshape(-1)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_another_loss_is_not_the_causal_one(name):
    assert names(LOSSES[name], x(torch.float32, 2, 5, 8), torch.randint(0, 8, (2, 5))) == []


# the place of a site


def test_a_site_waits_for_an_input_that_is_made_after_its_first_output():
    """Gemma in float32: 1 + weight is computed between the residual's sum and the norm."""

    def block(a, b, w):
        total = a + b
        early = total.exp()
        return rms_gemma(total, w.sin()), early

    args = x(), x(), W
    assert names(block, *args) == ["add_rms_norm_gemma"]
    assert_unchanged(block, *args)


def test_a_residual_that_an_input_of_the_norm_needs_stays_out():
    def block(a, b):
        total = a + b
        return rms(total, total.mean((0, 1)))

    assert names(block, x(), x()) == ["rms_norm"]
    assert_unchanged(block, x(), x())


def test_of_two_sites_that_need_each_other_one_is_left():
    def block(a, b, w):
        first, second = a + b, a * w + b
        return rms(first, w + second.mean((0, 1))), rms(second, w + first.mean((0, 1)))

    program = cse(dce(forge.trace(block, x(), x(), W)))
    assert len(find_matches(program, builtin.ALL)) == 2
    replaced, kept = replace_patterns(program, builtin.ALL)
    assert len(kept) == 1
    assert sum(bound.symbol.id.startswith("pattern.") for bound in replaced.bound_symbols) == 1
    assert_unchanged(block, x(), x(), W)


def test_an_output_that_is_one_of_several_of_a_call_stays_out():
    def first_and_exp(x):
        first, _ = x.chunk(2, -1)
        return first, first.exp()

    def program(x):
        first, second = x.chunk(2, -1)
        return first.exp() + second

    wanted = (Pattern(first_and_exp),)
    assert_unchanged(program, x(), wanted=wanted)


def call(name: str, *reads: str, tags: frozenset[Tag] = frozenset()) -> BoundSymbol:
    symbol = Symbol(name, f"test.{name}", meta=lambda *args: None, tags=tags)
    proxies = [TensorProxy(each, (1,), torch.float32, torch.device("cpu")) for each in (*reads, name)]
    return BoundSymbol(symbol, tuple(proxies[:-1]), {}, proxies[-1])


def ordered(*calls: BoundSymbol) -> tuple[str, str]:
    done, stuck = in_order(calls, ["x"])
    return "".join(each.symbol.name for each in done), "".join(each.symbol.name for each in stuck)


def test_a_call_moves_back_to_where_its_inputs_are_there():
    assert ordered(call("a", "c"), call("b", "x"), call("c", "x"), call("d", "b")) == ("bcad", "")


def test_random_calls_keep_their_order():
    random = frozenset({Tag.RANDOM})
    assert ordered(call("a", "c", tags=random), call("b", "x", tags=random), call("c", "x")) == ("cab", "")


def test_nothing_passes_a_call_with_an_effect():
    effect = frozenset({Tag.EFFECT})
    assert ordered(call("a", "c"), call("b", "x", tags=effect), call("c", "x")) == ("", "abc")
    assert ordered(call("a", "c"), call("c", "x"), call("b", "x", tags=effect)) == ("cab", "")


# in whole programs


def test_a_changing_length_does_not_hide_a_site():
    def block(a, b, w, g):
        total = a + b
        return F.silu(rms(total, w)) * g, total

    jitted = forge.jit(block, executors=[finder(), "torch"])
    for length in (3, 5, 7):
        args = x(torch.float32, 2, length, 8), x(torch.float32, 2, length, 8), W, x(torch.float32, 2, length, 8)
        for ours, theirs in zip(jitted(*args), block(*args), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert pattern_ids(jitted) == {"pattern.add_rms_norm", "pattern.swiglu"}


def test_sites_inside_a_checkpoint_are_found():
    def block(x, w):
        return torch.utils.checkpoint.checkpoint(lambda x: rms(x, w).sin(), x, use_reentrant=False)

    jitted = forge.jit(block, executors=[finder(), "torch"])
    inputs = [x().requires_grad_(), W.clone().requires_grad_()]
    actual = torch.autograd.grad(jitted(*inputs).sum(), inputs)
    torch.testing.assert_close(actual, torch.autograd.grad(block(*inputs).sum(), inputs))
    assert pattern_ids(jitted) == {"pattern.rms_norm"}


def test_an_unknown_pattern_is_named_with_those_there_are():
    with pytest.raises(KeyError, match=r"no shipped pattern is called 'rmsnorm'; there are .*rms_norm"):
        builtin.by_name("rmsnorm")


def test_a_reference_is_refused_that_has_no_plain_parameters_or_computes_nothing():
    with pytest.raises(TypeError, match=r"pattern star: \*args is not a plain parameter"):
        Pattern(lambda *args: args[0].exp(), name="star")
    with pytest.raises(ValueError, match="pattern nothing: the reference computes nothing"):
        Pattern(lambda x: x, name="nothing")


@pytest.mark.parametrize("training", [False, True])
def test_a_site_whose_kernel_declines_stays_as_it_is(training: bool) -> None:
    """A value inside a site that others read is computed once."""

    def block(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.silu(gate) * up, F.silu(F.silu(gate))

    def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) * up

    kernel = forge.kernel("pattern:swiglu", swiglu, name="mine", dtypes=[torch.bfloat16], grad="composite")
    jitted = forge.jit(block, kernels=[kernel], executors=["torch"])
    args = [torch.randn(2, 8, requires_grad=training) for _ in range(2)]
    for ours, theirs in zip(jitted(*args), block(*args), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert pattern_ids(jitted) == set()
    rows = forge.explain(jitted).rows
    assert [row.operation for row in rows].count("torch.nn.functional.silu") == 2
    (product,) = [row for row in rows if row.operation == "torch.mul"]
    assert ("mine", "dtype float32 not in T (bfloat16)") in product.declined


def test_a_shipped_pattern_pickles_as_itself() -> None:
    for each in (*builtin.ALL, *builtin.OPT_IN):
        assert pickle.loads(pickle.dumps(each)) is each


@forge.pattern
def squared_relu(x: Any) -> Any:
    return torch.relu(x) ** 2


def test_a_pattern_made_by_the_decorator_pickles_by_its_name() -> None:
    assert pickle.loads(pickle.dumps(squared_relu)) is squared_relu
    other = forge.Pattern(squared_relu.reference, "other")  # no module has it
    with pytest.raises(pickle.PicklingError, match="squared_relu"):
        pickle.dumps(other)


def test_a_scripts_pattern_pickles_by_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cloudpickle", reason="needs the extra: pip install forge-jit[hub]")

    def in_script(x: Any) -> Any:
        return torch.relu(x) ** 2

    in_script.__module__, in_script.__qualname__ = "__main__", "in_script"
    found = forge.pattern(in_script)
    monkeypatch.setattr(sys.modules["__main__"], "in_script", found, raising=False)
    data = pickle.dumps(found)
    monkeypatch.undo()  # as in a process that runs another script
    again, x = pickle.loads(data), torch.randn(3)
    assert again.name == "in_script" and torch.equal(again(x), torch.relu(x) ** 2)
